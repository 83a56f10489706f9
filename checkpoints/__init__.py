"""Files on disk <-> parameter trees: readers, the quantiser, the engine's own format."""

from checkpoints.calibrate import input_scales
from checkpoints.files import CheckpointError
from checkpoints.inventory import account, inventory, step_bytes
from checkpoints.load import LoadReport, load
from checkpoints.locate import SHIPPED, find, resolve
from checkpoints.progress import OnProgress, progress_bar
from checkpoints.quantise import RECIPES, quantize

__all__ = [
    "RECIPES",
    "SHIPPED",
    "CheckpointError",
    "LoadReport",
    "OnProgress",
    "account",
    "find",
    "input_scales",
    "inventory",
    "load",
    "progress_bar",
    "quantize",
    "resolve",
    "step_bytes",
]

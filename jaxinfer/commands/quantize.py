"""`jaxinfer quantize`."""

from pathlib import Path

from rich.progress import Progress

from checkpoints import CheckpointError, input_scales, progress_bar, quantize, resolve
from jaxinfer.commands.sizes import in_bytes, weight_bytes
from jaxinfer.commands.terminal import out


def run(source: str, destination: Path, recipe: str, calibrate: Path | None) -> None:
    """Quantise and say what came of it."""
    directory = resolve(source)
    scales = _calibrate(directory, calibrate, recipe) if calibrate else None
    with progress_bar(f"quantising {source}") as progress:
        quantize(directory, destination, recipe, input_scales=scales, progress=progress)
    before, after = weight_bytes(directory), weight_bytes(destination)
    out.print(
        f"{destination}: {in_bytes(after)}, {after / before:.0%} of {in_bytes(before)}",
        markup=False,
        soft_wrap=True,
    )


def _calibrate(directory: Path, text: Path, recipe: str) -> dict[str, float]:
    if recipe != "nvidia-mix":
        raise CheckpointError(f"the {recipe} recipe has no FP8 modules; leave --calibrate out")
    with Progress(transient=True) as bar:
        task = bar.add_task("calibrating", total=None)
        return input_scales(
            directory,
            text.read_text(),
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )

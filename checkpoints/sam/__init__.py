"""SAM 3 and 3.1: files on disk <-> parameter trees."""

from checkpoints.sam.load import load
from checkpoints.sam.write import write

__all__ = ["load", "write"]

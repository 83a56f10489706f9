"""Sizes for people."""

from pathlib import Path

from checkpoints.files import TensorFiles


def in_bytes(count: float) -> str:
    """`1.23 GB` and the like, in powers of 1000."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"


def in_numbers(count: float) -> str:
    """`34.7 B`, `1.2 M`: numbers of parameters."""
    for unit in ("", " K", " M"):
        if count < 999.5:
            return f"{count:.3g}{unit}"
        count /= 1000
    return f"{count:.3g} B"


def weight_bytes(directory: Path) -> int:
    """Bytes of all tensors of a checkpoint."""
    with TensorFiles(directory) as files:
        return sum(entry.nbytes for entry in files.entries.values())

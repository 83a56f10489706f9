"""`jaxinfer quantize`."""

from pathlib import Path

from checkpoints import progress_bar, quantize, resolve
from jaxinfer.commands.sizes import in_bytes, weight_bytes
from jaxinfer.commands.terminal import out


def run(source: str, destination: Path, recipe: str) -> None:
    """Quantise and say what came of it."""
    directory = resolve(source)
    with progress_bar(f"quantising {source}") as progress:
        quantize(directory, destination, recipe, progress=progress)
    before, after = weight_bytes(directory), weight_bytes(destination)
    out.print(
        f"{destination}: {in_bytes(after)}, {after / before:.0%} of {in_bytes(before)}",
        markup=False,
        soft_wrap=True,
    )

"""`jaxinfer convert`."""

from pathlib import Path

from checkpoints import CheckpointError, LoadReport, engine_format, load, progress_bar, resolve
from jaxinfer.commands.sizes import in_bytes
from jaxinfer.commands.terminal import err, out


def run(source: str, destination: Path) -> None:
    """Load a checkpoint and store it as it lies in memory."""
    directory = resolve(source)
    if destination.exists() and (not destination.is_dir() or any(destination.iterdir())):
        # Before the loading, not only after it.
        raise CheckpointError(f"{destination} is not empty; give a new directory")
    report = LoadReport()
    with progress_bar(f"loading {source}") as progress:
        cfg, params = load(directory, progress=progress, report=report)
    with err.status(f"writing {destination}"):
        engine_format.save(destination, cfg, params, directory)
    out.print(f"{destination}: {in_bytes(report.bytes_on_device)}", markup=False, soft_wrap=True)

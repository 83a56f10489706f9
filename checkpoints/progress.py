"""Progress of long work on files: a callback, and a bar that draws it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

OnProgress = Callable[[int, int], None]
"""Called with the bytes done so far and the bytes in all."""


@contextmanager
def progress_bar(description: str) -> Iterator[OnProgress]:
    """A bar on standard error for the time of a `with` block; yields the callback that moves it."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task(description, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)

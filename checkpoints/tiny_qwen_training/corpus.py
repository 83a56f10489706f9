"""Python source that anyone may redistribute: the interpreter's own standard library."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HELDOUT_PER_MILLE = 20
_SKIPPED_DIRECTORIES = frozenset({
    "__pycache__", "__phello__", "_bundled", "dist-packages", "encodings", "idlelib",
    "lib-dynload", "lib2to3", "msilib", "pydoc_data", "site-packages", "turtledemo",
})  # fmt: skip
_SKIPPED_FILES = frozenset({"html/entities.py", "stringprep.py", "this.py"})


class Document(NamedTuple):
    """A source file: its path below the library's root, with forward slashes, and its text."""

    path: str
    text: str


def documents(root: Path | None = None) -> Iterator[Document]:
    """Every library module in path order, without bundled wheels and tables of data."""
    root = root or Path(sysconfig.get_paths()["stdlib"])
    for file in sorted(root.rglob("*.py"), key=lambda file: file.relative_to(root).as_posix()):
        path = file.relative_to(root)
        if _is_taught(path):
            text = _read(file)
            if text:
                yield Document(path.as_posix(), text)


def is_heldout(path: str) -> bool:
    """Whether the file is kept from training: decided by its path alone, about 2 % of them."""
    return path_hash(path) % 1000 < HELDOUT_PER_MILLE


def path_hash(path: str) -> int:
    """A 64-bit number that depends on the path only."""
    return int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big")


def _is_taught(path: Path) -> bool:
    if _SKIPPED_DIRECTORIES.intersection(path.parts[:-1]):
        return False
    in_build_config = path.parts[0].startswith(("config-", "_sysconfigdata"))
    return not in_build_config and path.as_posix() not in _SKIPPED_FILES


def _read(file: Path) -> str:
    """The file's text, or nothing if it is not UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""

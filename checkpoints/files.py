"""Safetensors files: finding them, reading their headers, reading tensors out of them.

Headers are read and checked first, so that a broken download is reported before any tensor is read.
Tensors are read with positioned reads straight into the caller's memory: no mapping keeps pages
alive, and several threads may read at once.
"""

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ml_dtypes
import numpy as np

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"

DTYPES: Mapping[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "C64": np.dtype(np.complex64),
}
"""The format's names for element types."""

REFETCH = "fetch the file again"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the tensor, the file and the remedy."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies.

    Attributes:
        name: as the file has it.
        dtype: a key of `DTYPES`.
        shape: as the file has it.
        file: the file that holds it.
        offset: of its first byte from the beginning of that file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    offset: int

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.size * DTYPES[self.dtype].itemsize

    def __str__(self) -> str:
        return f"{self.name} ({self.dtype} {list(self.shape)}, {self.file.name})"


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of one safetensors file. Raises CheckpointError if the file is not whole."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > size - 8:
            raise CheckpointError(f"{file} is truncated in its header; {REFETCH}")
        try:
            header = json.loads(stream.read(length))
            entries = {
                name: _entry(name, raw, file, 8 + length)
                for name, raw in header.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(
                f"{file} has no valid safetensors header ({error}); {REFETCH}"
            ) from error
    for entry in entries.values():
        if entry.offset + entry.nbytes > size:
            raise CheckpointError(
                f"{entry} needs {entry.offset + entry.nbytes:,} bytes of {file}, which has "
                f"{size:,}: the file is truncated; {REFETCH}"
            )
    return entries


def _entry(name: str, raw: Mapping[str, Any], file: Path, base: int) -> Entry:
    start, end = raw["data_offsets"]
    if raw["dtype"] not in DTYPES:
        raise CheckpointError(
            f"{name} in {file} has type {raw['dtype']!r}, which this engine cannot read; "
            f"known: {', '.join(DTYPES)}"
        )
    entry = Entry(name, raw["dtype"], tuple(raw["shape"]), file, base + start)
    if start < 0 or entry.nbytes != end - start:
        raise CheckpointError(
            f"{entry} takes {entry.nbytes:,} bytes, its header in {file} says {end - start:,}; "
            f"{REFETCH}"
        )
    return entry


class TensorFiles:
    """The tensors of a checkpoint directory, open for reading; a context manager.

    Attributes:
        directory: of the checkpoint.
        entries: every tensor by its name in the files.
    """

    def __init__(self, directory: Path, entries: Mapping[str, Entry] | None = None) -> None:
        """Read all headers, unless `entries` says what another kind of file holds.

        Raises CheckpointError on absent, truncated or mismatched files.
        """
        self.directory = directory
        self.entries = _find(directory) if entries is None else entries
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> Self:
        try:
            for file in sorted({entry.file for entry in self.entries.values()}):
                self._descriptors[file] = os.open(file, os.O_RDONLY)
        except OSError:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors.clear()

    def read(self, entry: Entry, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Elements `start:stop` of the flattened tensor, in its own type, in new memory."""
        stop = entry.size if stop is None else stop
        out = np.empty(stop - start, DTYPES[entry.dtype])
        self.read_into(entry, start, out)
        return out

    def read_into(self, entry: Entry, start: int, out: np.ndarray) -> None:
        """Fill `out` (1-D, contiguous, in the tensor's type) with elements from `start` on."""
        buffer = memoryview(out.view(np.uint8))
        offset = entry.offset + start * out.itemsize
        while buffer:
            # One call moves at most 2 GiB.
            done = os.preadv(self._descriptors[entry.file], [buffer], offset)
            if done == 0:
                raise CheckpointError(f"{entry.file} ended inside {entry.name}; {REFETCH}")
            buffer, offset = buffer[done:], offset + done


def _find(directory: Path) -> dict[str, Entry]:
    if (directory / INDEX).is_file():
        return _find_sharded(directory)
    if (directory / SINGLE).is_file():
        return read_header(directory / SINGLE)
    others = sorted(directory.glob("*.safetensors"))
    hint = f" ({len(others)} other .safetensors files, but no index)" if others else ""
    raise CheckpointError(
        f"{directory} has neither {SINGLE} nor {INDEX}{hint}; fetch the whole checkpoint"
    )


def _find_sharded(directory: Path) -> dict[str, Entry]:
    """Headers of all shards named by the index, held against it."""
    index = directory / INDEX
    try:
        where: dict[str, str] = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError) as error:
        raise CheckpointError(
            f"{index} is not a valid index ({error!r}); fetch it again"
        ) from error
    shards: dict[str, dict[str, Entry]] = {}
    for name, shard in where.items():
        if shard in shards:
            continue
        if not (directory / shard).is_file():
            raise CheckpointError(
                f"{directory / shard} is absent; the index says it holds {name} and "
                f"{sum(s == shard for s in where.values()) - 1} more tensors. Fetch it"
            )
        shards[shard] = read_header(directory / shard)
    for name, shard in where.items():
        if name not in shards[shard]:
            raise CheckpointError(
                f"{index} says that {name} is in {shard}, which does not hold it; the index and "
                "the shards are of different checkpoints: fetch both again"
            )
    entries: dict[str, Entry] = {}
    for shard, found in shards.items():
        for name, entry in found.items():
            # A tensor left over in a second shard is not the one the index means.
            if where.get(name, shard) == shard:
                entries[name] = entry
    return entries

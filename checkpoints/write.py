"""Writing safetensors shards whose tensors become known one by one."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

import numpy as np

from checkpoints.files import DTYPES, INDEX, SINGLE, CheckpointError

_ALIGNMENT = 8


class Output(NamedTuple):
    """A tensor to be written: `dtype` is a key of `files.DTYPES`."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class _Place:
    output: Output
    shard: str
    offset: int


class ShardWriter:
    """Shards of a checkpoint, laid out in advance; a context manager.

    Tensors may be written in any order and from several threads. The index appears when the `with`
    block ends and every tensor has been written; if it ends with an error the shards are removed.
    """

    def __init__(
        self, directory: Path, groups: Iterable[Iterable[Output]], shard_bytes: int
    ) -> None:
        """Lay out the tensors and write the headers.

        Args:
            directory: an existing directory.
            groups: tensors in order; those of a group go into one shard.
            shard_bytes: size that a shard does not exceed unless a single group does.
        """
        self.directory = directory
        shards = _split(groups, shard_bytes)
        self._places: dict[str, _Place] = {}
        self._descriptors: dict[str, int] = {}
        self._written: set[str] = set()
        for number, outputs in enumerate(shards, 1):
            shard = SINGLE if len(shards) == 1 else _shard_name(number, len(shards))
            header, places = _lay_out(outputs, shard)
            self._places |= places
            descriptor = os.open(directory / shard, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            self._descriptors[shard] = descriptor
            os.pwrite(descriptor, header, 0)
            os.ftruncate(descriptor, len(header) + sum(output.nbytes for output in outputs))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for shard, descriptor in self._descriptors.items():
            os.close(descriptor)
            if error is not None:
                (self.directory / shard).unlink()
        if error is None:
            self._finish()

    def write(self, name: str, values: np.ndarray) -> None:
        """Write one tensor. Raises CheckpointError if it is not the one that was announced."""
        place = self._places[name]
        output = place.output
        if values.dtype != DTYPES[output.dtype] or values.shape != output.shape:
            raise CheckpointError(f"{name} is {values.dtype} {values.shape}, announced {output}")
        buffer = memoryview(np.ascontiguousarray(values).reshape(-1).view(np.uint8))
        offset = place.offset
        while buffer:
            done = os.pwrite(self._descriptors[place.shard], buffer, offset)
            buffer, offset = buffer[done:], offset + done
        self._written.add(name)

    def _finish(self) -> None:
        absent = self._places.keys() - self._written
        if absent:
            raise CheckpointError(f"{len(absent)} tensors were not written, first: {min(absent)}")
        if len(self._descriptors) > 1:
            total = sum(place.output.nbytes for place in self._places.values())
            where = {name: place.shard for name, place in sorted(self._places.items())}
            index = {"metadata": {"total_size": total}, "weight_map": where}
            (self.directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def write_checkpoint(
    directory: Path, tensors: Mapping[str, np.ndarray], shard_bytes: int = 5 * 10**9
) -> None:
    """Write tensors that are all in memory, with an index if they take more than one shard."""
    names = {dtype: name for name, dtype in DTYPES.items()}
    groups = [[Output(name, names[a.dtype], a.shape)] for name, a in tensors.items()]
    with ShardWriter(directory, groups, shard_bytes) as writer:
        for name, values in tensors.items():
            writer.write(name, values)


def _split(groups: Iterable[Iterable[Output]], shard_bytes: int) -> list[list[Output]]:
    shards: list[list[Output]] = [[]]
    room = shard_bytes
    for group in map(list, groups):
        nbytes = sum(output.nbytes for output in group)
        if shards[-1] and nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1] += group
        room -= nbytes
    return shards


def _lay_out(outputs: list[Output], shard: str) -> tuple[bytes, dict[str, _Place]]:
    """The header of a shard, and where in the file its tensors go."""
    # Wide types first keeps every tensor aligned, on which other readers rely.
    ordered = sorted(outputs, key=lambda o: (-DTYPES[o.dtype].itemsize, o.name))
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    starts = {}
    for output in ordered:
        starts[output] = offset
        header[output.name] = {
            "dtype": output.dtype,
            "shape": list(output.shape),
            "data_offsets": [offset, offset + output.nbytes],
        }
        offset += output.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    head = len(text).to_bytes(8, "little") + text
    return head, {o.name: _Place(o, shard, len(head) + start) for o, start in starts.items()}


def _shard_name(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"

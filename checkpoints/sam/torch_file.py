"""PyTorch's files (`torch.save`), without PyTorch and without running what is pickled in them.

Such a file is an uncompressed zip archive: `NAME/data.pkl` describes the tensors, `NAME/data/KEY`
are the storages whose elements they view. Only the description is read here; tensors become
entries, to be read at their place by `files.TensorFiles`.
"""

import math
import struct
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from checkpoints.files import DTYPES, REFETCH, CheckpointError, Entry, TensorFiles
from checkpoints.sam.torch_pickle import PickleError, Storage, StoredTensor, read

PICKLE_BYTES = 2**24
"""The largest description that is read; the published ones are under 2**19."""

_LOCAL_HEADER = struct.Struct("<4s22xHH")
_OLD_FORMAT = b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19."
_REFUSED = (
    "Nothing in it was run. If the file comes from someone you trust, load it with PyTorch and "
    "save its tensors alone: torch.save({name: tensor, ...}, file)"
)


@dataclass(frozen=True, slots=True)
class StridedEntry(Entry):
    """A tensor whose elements do not lie in order; `strides` in elements."""

    strides: tuple[int, ...]

    @property
    def span(self) -> int:
        """Elements from its first to its last, both counted."""
        return _span(self.shape, self.strides)


class _Record(NamedTuple):
    offset: int
    nbytes: int


def read_entries(file: Path) -> dict[str, Entry]:
    """The tensors of a PyTorch file: of a dict of tensors, or of the one under its key "model".

    Raises CheckpointError if the file is not whole, in PyTorch's old format, holds anything else
    than tensors, or asks for code to be run.
    """
    with file.open("rb") as stream:
        records = _records(file, stream)
        root, description = _description(file, records)
        if description.nbytes > PICKLE_BYTES:
            raise CheckpointError(
                f"{file} has a description of {description.nbytes:,} bytes, more than any dict of "
                f"tensors needs. {_REFUSED}"
            )
        if (order := records.get(f"{root}/byteorder")) and _bytes(stream, order) != b"little":
            raise CheckpointError(f"{file} was written on a big-endian machine. {_REFUSED}")
        try:
            saved = read(_bytes(stream, description))
        except PickleError as error:
            raise CheckpointError(f"{file}: its pickle {error}. {_REFUSED}") from error
    if isinstance(saved, dict) and isinstance(saved.get("model"), dict):
        saved = saved["model"]
    if not isinstance(saved, dict):
        raise CheckpointError(f"{file} holds a {type(saved).__name__}, not a dict of tensors")
    storages = {
        name.removeprefix(f"{root}/data/"): record
        for name, record in records.items()
        if name.startswith(f"{root}/data/")
    }
    return {name: _entry(file, name, value, storages) for name, value in saved.items()}


def read_tensor(files: TensorFiles, entry: Entry) -> np.ndarray:
    """A whole tensor in its own type and shape."""
    if not isinstance(entry, StridedEntry):
        return files.read(entry).reshape(entry.shape)
    flat = files.read(replace(entry, shape=(entry.span,)))
    strides = [stride * flat.itemsize for stride in entry.strides]
    return np.lib.stride_tricks.as_strided(flat, entry.shape, strides, writeable=False)


def _records(file: Path, stream: BinaryIO) -> dict[str, _Record]:
    """Where each record of the archive lies."""
    begin = stream.read(len(_OLD_FORMAT))
    if begin == _OLD_FORMAT:
        raise CheckpointError(
            f"{file} is in the format of PyTorch before 1.6, which is pickled throughout; load it "
            "with PyTorch and save it again with torch.save"
        )
    try:
        with zipfile.ZipFile(stream) as archive:
            infos = archive.infolist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError, OSError) as error:
        what = "is truncated" if begin.startswith(b"PK\3\4") else "is no file of torch.save"
        raise CheckpointError(f"{file} {what} ({error}); {REFETCH}") from error
    records: dict[str, _Record] = {}
    size = file.stat().st_size
    for info in infos:
        if info.filename in records:
            raise CheckpointError(f"{file} has two records {info.filename}; {REFETCH}")
        records[info.filename] = _record(file, stream, info, size)
    return records


def _record(file: Path, stream: BinaryIO, info: zipfile.ZipInfo, size: int) -> _Record:
    if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1:
        raise CheckpointError(
            f"{file}: its record {info.filename} is compressed or encrypted, which torch.save "
            f"never does; {REFETCH}"
        )
    # What the archive's directory says has not been checked: the offset may even be negative.
    if 0 <= info.header_offset <= size - _LOCAL_HEADER.size:
        stream.seek(info.header_offset)
        signature, name, extra = _LOCAL_HEADER.unpack(stream.read(_LOCAL_HEADER.size))
        offset = info.header_offset + _LOCAL_HEADER.size + name + extra
        whole = info.compress_size == info.file_size and offset + info.file_size <= size
        if signature == b"PK\3\4" and whole:
            return _Record(offset, info.file_size)
    raise CheckpointError(f"{file}: its record {info.filename} lies outside the file; {REFETCH}")


def _description(file: Path, records: Mapping[str, _Record]) -> tuple[str, _Record]:
    """The archive's inner name, and its `data.pkl`."""
    found = [path for path in map(PurePosixPath, records) if path.parts[1:] == ("data.pkl",)]
    if len(found) != 1:
        raise CheckpointError(f"{file} is a zip archive, but not one of torch.save; {REFETCH}")
    root = found[0].parts[0]
    if f"{root}/constants.pkl" in records:
        raise CheckpointError(f"{file} is a TorchScript program, not a dict of tensors. {_REFUSED}")
    return root, records[str(found[0])]


def _bytes(stream: BinaryIO, record: _Record) -> bytes:
    stream.seek(record.offset)
    return stream.read(record.nbytes)


def _entry(file: Path, name: Any, value: Any, storages: Mapping[str, _Record]) -> Entry:
    if not isinstance(name, str) or not isinstance(value, StoredTensor):
        raise CheckpointError(f"{file}: {name!r} is a {type(value).__name__}, not a tensor")
    storage, start, shape, strides = value.storage, value.offset, value.shape, value.strides
    if not (
        isinstance(storage, Storage)
        and _are_counts((start,))
        and _are_counts(shape)
        and _are_counts(strides)
        and len(shape) == len(strides)
    ):
        raise CheckpointError(f"{file}: {name} is not described as a tensor is; {REFETCH}")
    record = storages.get(storage.key)
    itemsize = DTYPES[storage.dtype].itemsize
    if record is None or storage.size * itemsize > record.nbytes:
        raise CheckpointError(f"{file} lacks the elements of {name}; {REFETCH}")
    if start + _span(shape, strides) > storage.size:
        raise CheckpointError(f"{file}: {name} reaches beyond its storage; {REFETCH}")
    place = name, storage.dtype, shape, file, record.offset + start * itemsize
    if _in_order(shape, strides):
        return Entry(*place)
    return StridedEntry(*place, strides)


def _are_counts(values: Any) -> bool:
    return isinstance(values, tuple) and all(type(v) is int and v >= 0 for v in values)


def _span(shape: tuple[int, ...], strides: tuple[int, ...]) -> int:
    if 0 in shape:
        return 0
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))


def _in_order(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    inner = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    return 0 in shape or all(
        n == 1 or stride == wanted for n, stride, wanted in zip(shape, strides, inner, strict=True)
    )

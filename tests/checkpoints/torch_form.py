"""Files as `torch.save` writes them, made without PyTorch, sound and unsound."""

import zipfile
from collections.abc import Mapping
from pathlib import Path

import numpy as np

CLASSES = {
    "float32": "FloatStorage",
    "float16": "HalfStorage",
    "bfloat16": "BFloat16Storage",
    "complex64": "ComplexFloatStorage",
    "int8": "CharStorage",
}
REBUILD = b"ctorch._utils\n_rebuild_tensor_v2\n"
ORDERED_DICT = b"ccollections\nOrderedDict\n)R"


def text(value: str) -> bytes:
    encoded = value.encode()
    return b"X" + len(encoded).to_bytes(4, "little") + encoded


def number(value: int) -> bytes:
    size = value.bit_length() // 8 + 1
    return b"\x8a" + bytes([size]) + value.to_bytes(size, "little", signed=True)


def numbers(*values: int) -> bytes:
    return b"(" + b"".join(map(number, values)) + b"t"


def storage(key: str, kind: str, size: int) -> bytes:
    fields = text("storage") + f"ctorch\n{kind}\n".encode() + text(key) + text("cpu")
    return b"(" + fields + number(size) + b"tQ"


def tensor(stored: bytes, offset: bytes, shape: bytes, strides: bytes) -> bytes:
    return REBUILD + b"(" + stored + offset + shape + strides + b"\x89" + ORDERED_DICT + b"tR"


def pickled(items: Mapping[str, bytes], wrap: bool = False) -> bytes:
    """A pickle of a dict whose values are given as pickled."""
    body = b"}(" + b"".join(text(name) + value for name, value in items.items()) + b"u"
    if wrap:
        body = b"}(" + text("model") + body + text("epoch") + number(3) + b"u"
    return b"\x80\x02" + body + b"."


def archive(
    file: Path,
    pickle: bytes,
    storages: Mapping[str, bytes] | None = None,
    compression: int = zipfile.ZIP_STORED,
) -> Path:
    with zipfile.ZipFile(file, "w", compression) as out:
        out.writestr("archive/data.pkl", pickle)
        out.writestr("archive/byteorder", "little")
        for key, data in (storages or {}).items():
            out.writestr(f"archive/data/{key}", data)
    return file


def save(file: Path, tensors: Mapping[str, np.ndarray], wrap: bool = False) -> Path:
    """Write a dict of tensors."""
    items, storages = {}, {}
    for key, (name, array) in enumerate(tensors.items()):
        strides = [stride // array.itemsize for stride in np.ascontiguousarray(array).strides]
        stored = storage(str(key), CLASSES[array.dtype.name], array.size)
        items[name] = tensor(stored, number(0), numbers(*array.shape), numbers(*strides))
        storages[str(key)] = array.tobytes()
    return archive(file, pickled(items, wrap), storages)

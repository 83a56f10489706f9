"""PyTorch's files are read as PyTorch means them, and nothing that is pickled in them runs."""

import os
import pickle
import zipfile
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoints import CheckpointError
from checkpoints.files import TensorFiles
from checkpoints.sam.torch_file import StridedEntry, read_entries, read_tensor
from tests.checkpoints.torch_form import (
    archive,
    number,
    numbers,
    pickled,
    storage,
    tensor,
    text,
)

GOLDENS = Path(__file__).parents[1] / "goldens" / "torch_file"


def ramp(*shape: int, dtype: object = np.float32) -> np.ndarray:
    return np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)


MEANT = {
    "float32": ramp(3, 4),
    "float64": ramp(5, dtype=np.float64),
    "float16": ramp(2, 3, dtype=np.float16),
    "bfloat16": ramp(2, 3, dtype=ml_dtypes.bfloat16),
    "complex64": (ramp(2, 3) * (1 - 1j)).astype(np.complex64),
    "int64": ramp(4, dtype=np.int64),
    "bool": np.array([True, False, True]),
    "scalar": np.float32(7),
    "empty": ramp(0, 3),
    "parameter": ramp(2, 2),
    "transposed": ramp(3, 4).T,
    "channels last": ramp(2, 3, 4, 5),
    "every other": ramp(4, 6)[1::2, ::2],
    "expanded": np.broadcast_to(ramp(1, 3), (4, 3)),
    "shared": ramp(4, 6),
    "rows of shared": ramp(4, 6)[1:3],
    "columns of shared": ramp(4, 6)[:, 2:4],
}
"""What make_torch_file.py saved."""


def read_all(file: Path) -> dict[str, np.ndarray]:
    entries = read_entries(file)
    with TensorFiles(file.parent, entries) as files:
        return {name: read_tensor(files, entry) for name, entry in entries.items()}


@pytest.mark.parametrize("name", ["plain.pt", "protocol4.pt"])
def test_reads_what_torch_saved(name: str) -> None:
    found = read_all(GOLDENS / name)
    assert found.keys() == MEANT.keys()
    for key, meant in MEANT.items():
        assert found[key].dtype == meant.dtype, key
        np.testing.assert_array_equal(found[key], meant, err_msg=key)


def test_reads_the_model_of_a_training_checkpoint() -> None:
    found = read_all(GOLDENS / "wrapped.pt")
    assert {name: a.shape for name, a in found.items()} == {
        "0.weight": (2, 3),
        "0.bias": (2,),
        "1.weight": (2,),
        "1.bias": (2,),
    }
    np.testing.assert_array_equal(found["0.weight"], ramp(2, 3))


def test_only_strided_tensors_need_more_than_a_read() -> None:
    entries = read_entries(GOLDENS / "plain.pt")
    strided = {name for name, entry in entries.items() if isinstance(entry, StridedEntry)}
    assert strided == {
        "transposed",
        "channels last",
        "every other",
        "expanded",
        "columns of shared",
    }


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("before_1.6.pt", "before 1.6.*save it again"),
        ("module.pt", "asks for torch.nn.modules.container.Sequential.*save its tensors alone"),
    ],
)
def test_other_files_of_torch(name: str, said: str) -> None:
    with pytest.raises(CheckpointError, match=said):
        read_entries(GOLDENS / name)


# --- hostile pickles ----------------------------------------------------------------------------


class Attack:
    """Runs a command where it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> object:
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("nested", [False, True])
def test_attacks_do_not_run(tmp_path: Path, protocol: int, nested: bool) -> None:
    marker = tmp_path / "marker"
    attack = Attack(marker)
    value = {"model": {"a": [({"b": attack},)]}} if nested else attack
    hostile = pickle.dumps(value, protocol)
    pickle.loads(hostile)
    assert marker.exists(), "the attack is a real one"
    marker.unlink()
    said = "instruction" if protocol == 0 and nested else "asks for .*system|instruction"
    with pytest.raises(CheckpointError, match=said):
        read_entries(archive(tmp_path / "hostile.pt", hostile))
    assert not marker.exists()


ONE = tensor(storage("0", "FloatStorage", 4), number(0), numbers(4), numbers(1))
FLOATS = b"ctorch\nFloatStorage\n"
HOSTILE: dict[str, tuple[bytes, str]] = {
    "eval": (b"\x80\x02cbuiltins\neval\n" + text("1") + b"\x85R.", "asks for builtins.eval,"),
    "old eval": (b"c__builtin__\neval\n(V1\ntR.", "asks for __builtin__.eval,"),
    "stack global": (b"\x80\x04" + text("os") + text("system") + b"\x93.", "asks for os.system,"),
    "attribute of torch": (
        b"\x80\x04" + text("torch") + text("serialization.os.system") + b"\x93.",
        "asks for torch.serialization.os.system,",
    ),
    "a trusted module's other function": (
        b"\x80\x02ctorch._utils\n_import_dotted_name\n.",
        "asks for torch._utils._import_dotted_name,",
    ),
    "name that is no text": (b"\x80\x04N" + text("x") + b"\x93.", "a name that is a NoneType"),
    "extension code": (b"\x80\x02\x82\x01.", "instruction EXT1"),
    "instance": (b"(ios\nsystem\n.", "instruction INST"),
    "object": (b"(" + FLOATS + b"o.", "instruction OBJ"),
    "new object": (b"\x80\x02" + FLOATS + b")\x81.", "instruction NEWOBJ"),
    "text as persistent identity": (b"Pstorage\n.", "instruction PERSID"),
    "calls a storage class": (b"\x80\x02" + FLOATS + b")R.", "calls torch.FloatStorage"),
    "calls a tensor": (b"\x80\x02" + ONE + b")R.", "calls a StoredTensor"),
    "calls with a list": (b"\x80\x02ccollections\nOrderedDict\n]R.", "with a list"),
    "calls with too few": (b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n)R.", "is broken"),
    "sets attributes of a function": (
        b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n}b.",
        "changes a _Name",
    ),
    "sets items of a tuple": (b"\x80\x02)NNs.", "changes a tuple"),
    "tuple as key": (b"\x80\x02}" + b")" + b"\x85" * 9000 + b"Ns.", "key that is a tuple"),
    "other persistent identity": (
        b"\x80\x02(" + text("module") + FLOATS + text("0") + text("cpu") + number(1) + b"tQ.",
        "refers to something outside",
    ),
    "bytes beyond any file": (b"\x80\x04\x8e" + b"\xff" * 7 + b"\x7f.", "is broken"),
    "text beyond any file": (b"\x80\x02X\xff\xff\xff\xff.", "is broken"),
    "long beyond any file": (b"\x80\x02\x8b\xff\xff\xff\x7f.", "is broken"),
    "negative length": (b"\x80\x02\x8b\xff\xff\xff\xff.", "is broken"),
    "empty stack": (b"\x80\x02R.", "is broken"),
    "no mark": (b"\x80\x02Nt.", "is broken"),
    "mark as value": (b"\x80\x02(.", "is broken"),
    "unknown memo": (b"\x80\x02h\x07.", "is broken"),
    "no end": (b"\x80\x02}", "is broken"),
    "no pickle": (b"\xff\xfe\xfd", "is broken"),
    "empty": (b"", "is broken"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_pickles(tmp_path: Path, case: str) -> None:
    hostile, said = HOSTILE[case]
    file = archive(tmp_path / "hostile.pt", hostile, {"0": bytes(16)})
    with pytest.raises(CheckpointError, match=said) as error:
        read_entries(file)
    assert str(file) in str(error.value)
    assert "Nothing in it was run" in str(error.value)


ZERO, FOUR = number(0), storage("0", "FloatStorage", 4)
UNSOUND: dict[str, tuple[bytes, str]] = {
    "begins beyond its storage": (tensor(FOUR, number(5), numbers(0), numbers(1)), "beyond"),
    "ends beyond its storage": (tensor(FOUR, number(1), numbers(4), numbers(1)), "beyond"),
    "strides beyond its storage": (tensor(FOUR, ZERO, numbers(2, 2), numbers(3, 1)), "beyond"),
    "overflows 64 bits": (tensor(FOUR, ZERO, numbers(2), numbers(2**64 - 1)), "beyond"),
    "overflows when multiplied": (
        tensor(FOUR, ZERO, numbers(2**33, 2**33), numbers(2**33, 1)),
        "beyond",
    ),
    "negative offset": (tensor(FOUR, number(-1), numbers(4), numbers(1)), "not described"),
    "negative stride": (tensor(FOUR, number(3), numbers(4), numbers(-1)), "not described"),
    "negative size": (tensor(FOUR, ZERO, numbers(-4), numbers(1)), "not described"),
    "bool for a size": (tensor(FOUR, ZERO, b"\x88\x85", numbers(1)), "not described"),
    "list for a shape": (tensor(FOUR, ZERO, b"]", numbers()), "not described"),
    "text for an offset": (tensor(FOUR, text("0"), numbers(4), numbers(1)), "not described"),
    "fewer strides than sizes": (tensor(FOUR, ZERO, numbers(2, 2), numbers(1)), "not described"),
    "no storage": (tensor(b"N", ZERO, numbers(4), numbers(1)), "not described"),
    "absent storage": (
        tensor(storage("1", "FloatStorage", 4), ZERO, numbers(4), numbers(1)),
        "lacks the elements",
    ),
    "path as storage": (
        tensor(storage("../data.pkl", "FloatStorage", 4), ZERO, numbers(4), numbers(1)),
        "lacks the elements",
    ),
    "storage larger than its record": (
        tensor(storage("0", "FloatStorage", 5), ZERO, numbers(5), numbers(1)),
        "lacks the elements",
    ),
    "storage of a wider type": (
        tensor(storage("0", "DoubleStorage", 4), ZERO, numbers(4), numbers(1)),
        "lacks the elements",
    ),
    "a number": (number(3), "is a int, not a tensor"),
}


@pytest.mark.parametrize("case", UNSOUND)
def test_unsound_tensors(tmp_path: Path, case: str) -> None:
    described, said = UNSOUND[case]
    file = archive(tmp_path / "unsound.pt", pickled({"x": described}), {"0": bytes(16)})
    with pytest.raises(CheckpointError, match=said) as error:
        read_entries(file)
    assert str(file) in str(error.value)


def test_a_dict_in_itself_ends(tmp_path: Path) -> None:
    endless = b"\x80\x02}q\x00" + text("model") + b"h\x00s."
    with pytest.raises(CheckpointError, match="'model' is a dict, not a tensor"):
        read_entries(archive(tmp_path / "x.pt", endless))


# --- hostile archives ---------------------------------------------------------------------------

SOUND = pickled({"x": ONE})


def test_compressed_records(tmp_path: Path) -> None:
    file = archive(tmp_path / "x.pt", SOUND, {"0": bytes(16)}, zipfile.ZIP_DEFLATED)
    with pytest.raises(CheckpointError, match="compressed or encrypted"):
        read_entries(file)


def test_record_outside_the_file(tmp_path: Path) -> None:
    file = archive(tmp_path / "x.pt", SOUND, {"0": b"elementselements"})
    data = bytearray(file.read_bytes())
    local = data.index(b"PK\3\4", data.index(b"little"))
    data[local + 28 : local + 30] = b"\xff\xff"  # a huge extra field in front of the elements
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="data/0 lies outside the file"):
        read_entries(file)


@pytest.mark.filterwarnings("ignore:Duplicate name")
def test_two_records_of_one_name(tmp_path: Path) -> None:
    file = archive(tmp_path / "x.pt", SOUND, {"0": bytes(16)})
    with zipfile.ZipFile(file, "a") as more:
        more.writestr("archive/data.pkl", SOUND)
    with pytest.raises(CheckpointError, match=r"two records archive/data.pkl"):
        read_entries(file)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "no file of torch.save"),
        (b"<!DOCTYPE html><title>Log in</title>", "no file of torch.save.*fetch"),
        (b"PK\3\4 and then nothing", "truncated.*fetch"),
    ],
)
def test_no_archives(tmp_path: Path, content: bytes, said: str) -> None:
    (file := tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=said):
        read_entries(file)


def test_other_archives(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as out:
        out.writestr("word/document.xml", "<a/>")
    with pytest.raises(CheckpointError, match=r"zip archive, but not one of torch.save"):
        read_entries(tmp_path / "x.pt")


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=4))
def test_damaged_files_are_refused_or_read(
    tmp_path_factory: pytest.TempPathFactory, damage: list[tuple[int, int]]
) -> None:
    """Any other exception, or a read past the end, would fail here."""
    data = bytearray((GOLDENS / "wrapped.pt").read_bytes())
    for place, value in damage:
        data[place % len(data)] = value
    (file := tmp_path_factory.getbasetemp() / "damaged.pt").write_bytes(data)
    try:
        entries = read_entries(file)
    except CheckpointError:
        return
    with TensorFiles(file.parent, entries) as files:
        for entry in entries.values():
            if entry.size < 1000:
                assert read_tensor(files, entry).shape == entry.shape

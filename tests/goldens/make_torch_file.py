"""Make `torch_file/`: small files as `torch.save` writes them.

Run with torch 2.13 (CPU); see README.md for the contents and the command. Every element is a whole
number, its place in an `arange`, so that a test can say what it must be.
"""

from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parent / "torch_file"


def ramp(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """0, 1, 2, … in a shape."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


def tensors() -> dict[str, torch.Tensor]:
    """Every way in which a tensor can lie in its storage."""
    shared = ramp(4, 6)
    return {
        "float32": ramp(3, 4),
        "float64": ramp(5, dtype=torch.float64),
        "float16": ramp(2, 3, dtype=torch.float16),
        "bfloat16": ramp(2, 3, dtype=torch.bfloat16),
        "complex64": torch.complex(ramp(2, 3), -ramp(2, 3)),
        "int64": ramp(4, dtype=torch.int64),
        "bool": torch.tensor([True, False, True]),
        "scalar": torch.tensor(7.0),
        "empty": ramp(0, 3),
        "parameter": nn.Parameter(ramp(2, 2)),
        "transposed": ramp(3, 4).T,
        "channels last": ramp(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "every other": ramp(4, 6)[1::2, ::2],
        "expanded": ramp(1, 3).expand(4, 3),
        "shared": shared,
        "rows of shared": shared[1:3],
        "columns of shared": shared[:, 2:4],
    }


def main() -> None:
    """Write the files."""
    HERE.mkdir(exist_ok=True)
    torch.save(tensors(), HERE / "plain.pt")
    torch.save(tensors(), HERE / "protocol4.pt", pickle_protocol=4)
    module = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    state = module.state_dict()
    for tensor in state.values():
        tensor.copy_(ramp(*tensor.shape))
    training = {"model": state, "epoch": 3, "lr": 1e-4, "best": None, "seen": [1, 2], "ok": True}
    training["optimizer"] = OrderedDict(state={0: {"exp_avg": ramp(3)}}, groups=[{"lr": 0.5}])
    torch.save(training, HERE / "wrapped.pt")
    torch.save({"a": ramp(2)}, HERE / "before_1.6.pt", _use_new_zipfile_serialization=False)
    torch.save({"model": module}, HERE / "module.pt")


if __name__ == "__main__":
    main()

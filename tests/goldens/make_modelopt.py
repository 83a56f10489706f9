"""Make `modelopt.safetensors`: weights as NVIDIA's quantiser exports them.

Run with torch 2.13 (CPU) and nvidia-modelopt 0.47; see README.md for the contents and the command.

Functions of modelopt that do the work, in their order:
- `modelopt.torch.quantization.quantize` with `W4A16_NVFP4_CFG` or `FP8_DEFAULT_CFG`: max
  calibration (per-tensor amax of the weight; for FP8 also of the inputs seen);
- `modelopt.torch.export.quant_utils.preprocess_linear_fusion`: one amax for the tensors of a
  fused product;
- `modelopt.torch.export.unified_export_hf._export_quantized_weight`: the step of
  `export_hf_checkpoint` that packs a module's weight and registers its scales. For NVFP4 it calls
  `NVFP4QTensor.get_weights_scaling_factor` and `.quantize`; for FP8
  `quant_utils.to_quantized_weight`.
"""

import copy
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export.quant_utils import preprocess_linear_fusion
from modelopt.torch.export.unified_export_hf import _export_quantized_weight
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import save_file
from torch import Tensor, nn

PATH = Path(__file__).parent / "modelopt.safetensors"
BLOCK = 16


def normal(shape: tuple[int, int], scale: float, seed: int) -> Tensor:
    """Normal bf16 weights."""
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(
        torch.bfloat16
    )


def with_zero_blocks() -> Tensor:
    """Some blocks, and one whole row, all zero; one block of zeros of both signs."""
    weight = normal((32, 64), 0.02, seed=2)
    weight[1, 16:32] = 0
    weight[5] = 0
    weight[7, 0:16] = -0.0
    return weight


def with_outliers() -> Tensor:
    """Three huge weights press the other blocks' scales to the bottom of e4m3."""
    weight = normal((32, 64), 0.02, seed=3)
    weight[0, 3], weight[17, 40], weight[31, 63] = 3000.0, -750.0, 96.0
    return weight


def on_ties() -> Tensor:
    """Weights on every rounding boundary of e2m1, and the bf16 numbers just below and above them.

    The largest weight is 6 * 448, so the per-tensor scale is 1, and a block with amax 6 * 2^k has
    scale 2^k.
    """
    magnitudes = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0], dtype=torch.bfloat16)
    signed = torch.cat([magnitudes, -magnitudes])
    rows = [torch.cat([signed * 2.0**k, signed.flip(0) * 2.0 ** (k - 3)]) for k in range(8)]
    rows.append(torch.cat([signed * 448.0, torch.zeros(BLOCK, dtype=torch.bfloat16)]))
    for step in (-1, 1):
        beside = (signed.view(torch.int16) + step).view(torch.bfloat16)
        beside = torch.where(signed.abs() == 6, signed, beside)
        rows.append(torch.cat([beside, beside * 4]))
    return torch.stack(rows)


def calibrated(weights: list[Tensor], config: dict, inputs: Tensor | None = None) -> nn.Sequential:
    """Linear modules with these weights, calibrated by modelopt."""
    model = nn.Sequential(
        *(nn.Linear(w.shape[1], w.shape[0], bias=False, dtype=w.dtype) for w in weights)
    )
    for module, weight in zip(model, weights, strict=True):
        module.weight.data.copy_(weight)

    def calibrate(quantised: nn.Module) -> None:
        for module in quantised:
            module(
                torch.ones(1, module.in_features, dtype=torch.bfloat16)
                if inputs is None
                else inputs
            )

    return mtq.quantize(model, copy.deepcopy(config), calibrate)


def exported(name: str, module: nn.Module, original: Tensor) -> dict[str, Tensor]:
    """The module's tensors as modelopt writes them to a checkpoint, beside the original weight."""
    _export_quantized_weight(module, torch.bfloat16)
    out = {f"{name}.original": original, f"{name}.weight": module.weight.data}
    for scale in ("weight_scale", "weight_scale_2", "input_scale"):
        if getattr(module, scale, None) is not None:
            out[f"{name}.{scale}"] = getattr(module, scale)
    return out


def dequantised(tensors: dict[str, Tensor], name: str) -> Tensor:
    """modelopt's own reading of an NVFP4 weight, float32."""
    packed = tensors[f"{name}.weight"]
    shape = torch.Size((packed.shape[0], packed.shape[1] * 2))
    return NVFP4QTensor(shape, torch.float32, packed).dequantize(
        torch.float32,
        scale=tensors[f"{name}.weight_scale"],
        double_scale=tensors[f"{name}.weight_scale_2"],
        block_sizes={-1: BLOCK},
    )


@torch.no_grad()
def main() -> None:
    """Write everything and print what was written."""
    nvfp4 = {
        "nvfp4.normal_32x64": normal((32, 64), 0.02, seed=10),
        "nvfp4.normal_96x128": normal((96, 128), 0.05, seed=1),
        "nvfp4.zero_blocks": with_zero_blocks(),
        "nvfp4.zero": torch.zeros((32, 64), dtype=torch.bfloat16),
        "nvfp4.outliers": with_outliers(),
        "nvfp4.tiny": normal((32, 64), 1e-30, seed=4),
        "nvfp4.ties": on_ties(),
    }
    tensors: dict[str, Tensor] = {}
    for name, weight in nvfp4.items():
        tensors |= exported(name, calibrated([weight], mtq.W4A16_NVFP4_CFG)[0], weight)

    pair = [normal((32, 64), 0.02, seed=5), normal((32, 64), 0.05, seed=6)]
    gate_up = calibrated(pair, mtq.W4A16_NVFP4_CFG)
    preprocess_linear_fusion(list(gate_up))
    for name, module, weight in zip(("gate", "up"), gate_up, pair, strict=True):
        tensors |= exported(f"nvfp4.shared.{name}", module, weight)
    for name in [key.removesuffix(".weight") for key in tensors if key.endswith(".weight")]:
        tensors[f"{name}.dequantised"] = dequantised(tensors, name)

    fp8 = {
        "fp8.normal_32x64": normal((32, 64), 0.02, seed=7),
        "fp8.normal_96x128": normal((96, 128), 0.3, seed=8),
        "fp8.outliers": with_outliers(),
        "fp8.zero_blocks": with_zero_blocks(),
    }
    for name, weight in fp8.items():
        inputs = normal((8, weight.shape[1]), 2.0, seed=9)
        tensors |= exported(name, calibrated([weight], mtq.FP8_DEFAULT_CFG, inputs)[0], weight)

    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(tensors, PATH)
    PATH.chmod(0o644)
    for name, tensor in tensors.items():
        print(f"{name:34} {str(tensor.dtype).removeprefix('torch.'):14} {list(tensor.shape)}")


if __name__ == "__main__":
    main()

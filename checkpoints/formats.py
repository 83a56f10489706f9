"""How quantised weights are stored, by the tools that publish them.

The tensors of a module decide its format, not the configuration: exporters mix formats freely and
describe the mixture in different ways. The configuration is only asked whether it names a method
that this engine knows to be unreadable.

| tool | weight | scales |
|---|---|---|
| ModelOpt NVFP4 | `weight` U8 | `weight_scale` E4M3, `weight_scale_2` multiplies |
| compressed-tensors NVFP4 | `weight_packed` U8 | the same, but `weight_global_scale` divides |
| ModelOpt FP8 | `weight` E4M3 | `weight_scale` scalar, `input_scale` if static |
| compressed-tensors FP8 | `weight` E4M3 | `weight_scale` scalar or one an output row |

Activation scales of NVFP4 modules are not used: NVFP4 weights multiply unquantised inputs here.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from checkpoints.files import CheckpointError, Entry
from jaxinfer.qwen.params import Format
from pallas_kernels.weights import NVFP4_BLOCK

FLOATS = ("BF16", "F16", "F32")
"""Types in which dense tensors and scales may be stored."""

SUFFIXES = (
    "weight",
    "weight_packed",
    "weight_scale",
    "weight_scale_2",
    "weight_global_scale",
    "input_scale",
    "input_global_scale",
    "weight_scale_inv",
    "pre_quant_scale",
    "weight_zero_point",
    "qweight",
)
"""Tensors that a module may have, the unreadable ones included so that they are named as such."""

KV_SCALES = ("k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale", "output_scale")
"""Scales of quantised attention: unused, because the KV cache keeps the model's own type."""

_UNREADABLE: Mapping[str, str] = {
    "weight_scale_inv": "block FP8 (one scale a 128x128 block)",
    "pre_quant_scale": "AWQ-style input smoothing",
    "weight_zero_point": "asymmetric quantisation",
    "qweight": "GPTQ or AWQ",
}
REMEDY = (
    "use the bf16 checkpoint, or one in ModelOpt or compressed-tensors NVFP4 or FP8, or quantise "
    "the bf16 checkpoint with `jaxinfer quantize`"
)


class FormatError(CheckpointError):
    """Tensors of a module that make no readable weight."""


@dataclass(frozen=True, slots=True)
class Stored:
    """The tensors of one module, by what they are to a weight.

    Attributes:
        format: as `jaxinfer.qwen.params.Format`.
        weight: dense values, E4M3 values, or packed E2M1 codes.
        block_scale: E4M3, one for 16 inputs; NVFP4 only.
        scale: the global scale, or those of the output rows; None for a dense module.
        input_scale: of FP8 with static activations.
        divides: the global scale is the reciprocal of ours.
        unused: tensors that belong to the module and that this engine has no use for.
    """

    format: Format
    weight: Entry
    block_scale: Entry | None = None
    scale: Entry | None = None
    input_scale: Entry | None = None
    divides: bool = False
    unused: tuple[Entry, ...] = ()

    def entries(self) -> Iterator[Entry]:
        """All tensors of the module."""
        for entry in (self.weight, self.block_scale, self.scale, self.input_scale, *self.unused):
            if entry is not None:
                yield entry


def stored(found: Mapping[str, Entry], shape: tuple[int, ...]) -> Stored:
    """Read the format of one module off its tensors.

    Args:
        found: the module's tensors by suffix; not empty.
        shape: of the weight in its dense form.

    Raises FormatError, naming tensor and file, if the tensors are of no readable format or do not
    have the types and shapes of their format.
    """
    for suffix, method in _UNREADABLE.items():
        if suffix in found:
            raise FormatError(f"{found[suffix]} is {method}, which is not supported; {REMEDY}")
    if "weight_packed" in found:
        return _nvfp4(found, shape, "weight_packed", "weight_global_scale", "input_global_scale")
    if "weight" not in found:
        raise FormatError(f"{next(iter(found.values()))} stands alone: its weight is missing")
    weight = found["weight"]
    if weight.dtype == "U8":
        return _nvfp4(found, shape, "weight", "weight_scale_2", "input_scale")
    if weight.dtype == "F8_E4M3":
        return _fp8(found, shape)
    if weight.dtype not in FLOATS:
        raise FormatError(
            f"{weight} has an unsupported type (supported: {', '.join(FLOATS)}, F8_E4M3 and packed "
            f"NVFP4 in U8); {REMEDY}"
        )
    for suffix, entry in found.items():
        if suffix != "weight":
            raise FormatError(f"{entry} is the scale of a quantised weight, but {weight} is dense")
    expect(weight, FLOATS, shape)
    return Stored("dense", weight)


def expect(entry: Entry, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
    """Raise FormatError unless a tensor has one of these types and one of these shapes."""
    if entry.dtype not in dtypes:
        raise FormatError(f"{entry} has the wrong type; wanted {' or '.join(dtypes)}")
    if entry.shape not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in shapes)
        raise FormatError(f"{entry} has the wrong shape; wanted {wanted}")


def _nvfp4(
    found: Mapping[str, Entry], shape: tuple[int, ...], weight: str, scale: str, inputs: str
) -> Stored:
    rows, cols = shape[0], shape[-1]
    for suffix in ("weight_scale", scale):
        if suffix not in found:
            raise FormatError(
                f"{found[weight]} looks like NVFP4, but the module has no {suffix}; {REMEDY}"
            )
    _no_others(found, (weight, "weight_scale", scale, inputs), "NVFP4")
    expect(found[weight], ("U8",), (rows, cols // 2))
    if found["weight_scale"].shape != (rows, cols // NVFP4_BLOCK):
        raise FormatError(
            f"{found['weight_scale']} has the wrong shape; wanted "
            f"{[rows, cols // NVFP4_BLOCK]}, one scale for {NVFP4_BLOCK} inputs (no other group "
            "size is supported)"
        )
    expect(found["weight_scale"], ("F8_E4M3",), (rows, cols // NVFP4_BLOCK))
    expect(found[scale], FLOATS, (), (1,))
    unused = (found[inputs],) if inputs in found else ()
    divides = scale == "weight_global_scale"
    return Stored(
        "nvfp4",
        found[weight],
        found["weight_scale"],
        found[scale],
        divides=divides,
        unused=unused,
    )


def _fp8(found: Mapping[str, Entry], shape: tuple[int, ...]) -> Stored:
    weight, scale = found["weight"], found.get("weight_scale")
    if scale is None:
        raise FormatError(f"{weight} has no weight_scale beside it; {REMEDY}")
    _no_others(found, ("weight", "weight_scale", "input_scale"), "FP8")
    expect(weight, ("F8_E4M3",), shape)
    rows = shape[0]
    if scale.size > 1 and scale.shape not in ((rows,), (rows, 1)):
        raise FormatError(
            f"{scale} is neither one scale nor one for each of {rows} output rows: block and "
            f"group FP8 are not supported; {REMEDY}"
        )
    expect(scale, FLOATS, scale.shape)
    kind = "fp8_channel" if scale.size > 1 else "fp8"
    inputs = found.get("input_scale")
    if inputs is not None:
        expect(inputs, FLOATS, (), (1,))
        kind += "_static"
    return Stored(kind, weight, scale=scale, input_scale=inputs)


def _no_others(found: Mapping[str, Entry], known: tuple[str, ...], method: str) -> None:
    for suffix, entry in found.items():
        if suffix not in known:
            raise FormatError(
                f"{entry} is not part of an {method} module of a known tool; {REMEDY}"
            )


# --- the configuration's word -------------------------------------------------------------------

_ALGORITHMS = ("NVFP4", "W4A16_NVFP4", "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "MIXED_PRECISION")


@dataclass(frozen=True)
class Quantization:
    """What `config.json` and `hf_quant_config.json` say about quantisation.

    Attributes:
        method: `quant_method`, or "" for none.
        problem: why the checkpoint cannot be read, or "".
    """

    method: str = ""
    problem: str = field(default="")

    @classmethod
    def from_dicts(cls, config: Mapping[str, Any], hf_quant: Mapping[str, Any]) -> "Quantization":
        """From the two files' contents (either may be empty)."""
        text = config.get("text_config", {})
        raw = config.get("quantization_config") or text.get("quantization_config") or {}
        algorithms = hf_quant.get("quantization", {})
        method = raw.get("quant_method", "modelopt" if algorithms or "quant_algo" in raw else "")
        match method:
            case "":
                return cls()
            case "modelopt" | "modelopt_fp4" | "modelopt_mixed":
                problem = _modelopt_problem(raw) or _modelopt_problem(algorithms)
            case "compressed-tensors":
                problem = _compressed_tensors_problem(raw)
            case "fp8" if raw.get("weight_block_size"):
                blocks = "x".join(map(str, raw["weight_block_size"]))
                problem = f"block FP8 ({blocks})"
            case "fp8":
                problem = ""
            case _:
                problem = "not a method this engine reads"
        return cls(method, problem)


def _modelopt_problem(raw: Mapping[str, Any]) -> str:
    layers = raw.get("quantized_layers") or {}
    for described in (raw, *layers.values()):
        algorithm = described.get("quant_algo")
        if algorithm is not None and algorithm not in _ALGORITHMS:
            return f"quant_algo {algorithm!r}"
        if "NVFP4" in (algorithm or "") and described.get("group_size", NVFP4_BLOCK) != NVFP4_BLOCK:
            return f"{algorithm} with group size {described['group_size']}"
    return ""


def _compressed_tensors_problem(raw: Mapping[str, Any]) -> str:
    for group in raw.get("config_groups", {}).values():
        weights = (group or {}).get("weights") or {}
        bits, kind = weights.get("num_bits"), weights.get("type", "float")
        if kind != "float" or bits not in (4, 8):
            return f"{bits}-bit {kind} weights"
        if bits == 4 and weights.get("group_size", NVFP4_BLOCK) != NVFP4_BLOCK:
            return f"4-bit weights with group size {weights['group_size']}"
        if bits == 8 and weights.get("strategy", "tensor") not in ("tensor", "channel"):
            return f"FP8 with strategy {weights['strategy']!r}"
    return ""

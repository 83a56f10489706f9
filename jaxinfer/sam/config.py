"""The shape of a SAM 3 or 3.1 image model."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal


class ConfigError(ValueError):
    """A configuration that this engine cannot run; the message names the field and the remedy."""


@dataclass(frozen=True)
class TrunkConfig:
    """The vision transformer. Sizes in elements, `image_size` and `patch_size` in pixels.

    Attributes:
        window: side of an attention window, in patches.
        global_layers: layers (from 0) whose attention sees the whole picture.
        table: side of the learnt position table, in patches; it is tiled over the picture.
        gelu: "erf", the exact form that the model is defined with, or "tanh", the approximation
            that Meta's own code computes on a GPU.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    image_size: int
    patch_size: int
    window: int
    global_layers: tuple[int, ...]
    table: int
    layer_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    gelu: Literal["erf", "tanh"] = "erf"

    def __post_init__(self) -> None:
        _whole_parts(self, "image_size", "patch_size")
        _whole_parts(self, "grid", "window")
        _whole_parts(self, "hidden_size", "num_heads")
        if self.hidden_size // self.num_heads % 4:
            raise ConfigError(
                f"a head of the trunk is {self.hidden_size // self.num_heads} wide; rotary angles "
                "need a multiple of 4: change hidden_size or num_heads"
            )
        beyond = [i for i in self.global_layers if not 0 <= i < self.num_layers]
        if beyond:
            raise ConfigError(
                f"global_layers names layer {beyond[0]}; the trunk has {self.num_layers}, from 0"
            )

    @property
    def grid(self) -> int:
        """Patches along a side of the picture."""
        return self.image_size // self.patch_size


@dataclass(frozen=True)
class TextConfig:
    """The text encoder. `context` is the number of tokens a prompt is padded to."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    context: int

    def __post_init__(self) -> None:
        _whole_parts(self, "hidden_size", "num_heads")


@dataclass(frozen=True)
class Config:
    """Everything static about the model; hashable, so that it can be a static argument of `jit`.

    Attributes:
        width: of everything behind trunk and text encoder.
        num_heads: of its attention.
        intermediate_size: of its feed-forward layers.
        num_queries: objects found at most for one prompt.
    """

    trunk: TrunkConfig
    text: TextConfig
    width: int
    num_heads: int
    intermediate_size: int
    geometry_layers: int
    encoder_layers: int
    decoder_layers: int
    num_queries: int

    def __post_init__(self) -> None:
        _whole_parts(self, "width", "num_heads")
        if self.width % 8:
            raise ConfigError(f"width is {self.width}; the mask head needs a multiple of 8")

    @property
    def mask_size(self) -> int:
        """Side of the mask logits: four times the grid."""
        return 4 * self.trunk.grid


def _whole_parts(shape: object, whole: str, part: str) -> None:
    if getattr(shape, whole) % getattr(shape, part):
        raise ConfigError(
            f"{whole} ({getattr(shape, whole)}) is not a multiple of {part} "
            f"({getattr(shape, part)}): change one of them"
        )


def for_gpu(cfg: Config) -> Config:
    """The same with GELU as Meta's own code computes it on a GPU, within a product of matrices.

    The two forms differ by less than bfloat16 resolves.
    """
    return replace(cfg, trunk=replace(cfg.trunk, gelu="tanh"))


SAM3 = Config(
    trunk=TrunkConfig(
        hidden_size=1024,
        intermediate_size=4736,
        num_layers=32,
        num_heads=16,
        image_size=1008,
        patch_size=14,
        window=24,
        global_layers=(7, 15, 23, 31),
        table=24,
    ),
    text=TextConfig(
        vocab_size=49408,
        hidden_size=1024,
        intermediate_size=4096,
        num_layers=24,
        num_heads=16,
        context=32,
    ),
    width=256,
    num_heads=8,
    intermediate_size=2048,
    geometry_layers=3,
    encoder_layers=6,
    decoder_layers=6,
    num_queries=200,
)
"""SAM 3 and SAM 3.1: their image models have one architecture."""


_GELUS: dict[str, Literal["erf", "tanh"]] = {
    "gelu": "erf",
    "gelu_pytorch_tanh": "tanh",
    "gelu_new": "tanh",
}


class _Section:
    """One mapping of the file, and where it stands there."""

    def __init__(self, raw: Mapping[str, Any], path: str = "") -> None:
        self.raw, self.path = raw, path

    def section(self, name: str) -> "_Section":
        """The mapping called `name`."""
        raw = self.raw.get(name)
        if not isinstance(raw, Mapping):
            raise ConfigError(f"{self.path}{name} is missing; is the file complete?")
        return _Section(raw, f"{self.path}{name}.")

    def whole(self, name: str) -> int:
        """A whole number above 0; of a pair of equal ones, one."""
        value = self.raw.get(name)
        if isinstance(value, list | tuple) and len(set(value)) == 1:
            value = value[0]
        if value is None:
            raise ConfigError(f"{self.path}{name} is missing; is the file complete?")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(
                f"{self.path}{name} is {value!r}; it must be one whole number above 0"
            )
        return value

    def expect(self, name: str, *allowed: object) -> None:
        """Refuse a field that is there and none of what this engine can run."""
        value = self.raw.get(name)
        if value is not None and value not in allowed:
            options = " or ".join(repr(a) for a in allowed)
            raise ConfigError(f"{self.path}{name} is {value!r}; this engine runs {options}")


def from_dict(raw: Mapping[str, Any]) -> Config:
    """The shape from a `config.json` of `Sam3Model` or `Sam3VideoModel` (its `detector_config`).

    The published file's `layer_norm_eps` of 1e-6 is read as 1e-5, with which the weights were
    trained and with which the original runs them; a model of another shape has what its file says.
    """
    top = _Section(raw)
    if "detector_config" in raw:
        top = top.section("detector_config")
    elif raw.get("model_type") not in ("sam3", "sam3_video"):
        raise ConfigError(
            f"model_type is {raw.get('model_type')!r}; this engine runs 'sam3' and the detector of "
            "'sam3_video' (SAM 3 and SAM 3.1)"
        )
    vision, decoder = top.section("vision_config"), top.section("detr_decoder_config")
    geometry, encoder = top.section("geometry_encoder_config"), top.section("detr_encoder_config")
    masks = top.section("mask_decoder_config")
    cfg = Config(
        trunk=_trunk(vision.section("backbone_config")),
        text=_text(top.section("text_config")),
        width=decoder.whole("hidden_size"),
        num_heads=decoder.whole("num_attention_heads"),
        intermediate_size=decoder.whole("intermediate_size"),
        geometry_layers=geometry.whole("num_layers"),
        encoder_layers=encoder.whole("num_layers"),
        decoder_layers=decoder.whole("num_layers"),
        num_queries=decoder.whole("num_queries"),
    )
    vision.expect("fpn_hidden_size", cfg.width)
    vision.expect("hidden_act", "gelu")
    vision.expect("scale_factors", [4.0, 2.0, 1.0, 0.5], [4.0, 2.0, 1.0])
    geometry.expect("roi_size", 7)
    masks.expect("num_upsampling_stages", 3)
    for part in (geometry, encoder, decoder, masks):
        part.expect("hidden_size", cfg.width)
        part.expect("num_attention_heads", cfg.num_heads)
        part.expect("intermediate_size", cfg.intermediate_size)
        part.expect("hidden_act", "relu")
    if replace(cfg.trunk, layer_norm_eps=1e-5) == replace(SAM3.trunk, gelu=cfg.trunk.gelu):
        return replace(cfg, trunk=replace(cfg.trunk, layer_norm_eps=1e-5))
    return cfg


def _trunk(raw: _Section) -> TrunkConfig:
    raw.expect("num_channels", 3)
    raw.expect("layer_scale_init_value")
    raw.expect("hidden_act", *_GELUS)
    rope = raw.raw.get("rope_parameters") or {}
    _Section(rope, f"{raw.path}rope_parameters.").expect("rope_type", "axial", "default")
    layers = raw.raw.get("global_attn_indexes")
    if layers is None:
        raise ConfigError(f"{raw.path}global_attn_indexes is missing; is the file complete?")
    return TrunkConfig(
        hidden_size=raw.whole("hidden_size"),
        intermediate_size=raw.whole("intermediate_size"),
        num_layers=raw.whole("num_hidden_layers"),
        num_heads=raw.whole("num_attention_heads"),
        image_size=raw.whole("image_size"),
        patch_size=raw.whole("patch_size"),
        window=raw.whole("window_size"),
        global_layers=tuple(layers),
        table=raw.whole("pretrain_image_size") // raw.whole("patch_size"),
        layer_norm_eps=float(raw.raw.get("layer_norm_eps", 1e-6)),
        rope_theta=float(rope.get("rope_theta", raw.raw.get("rope_theta", 10000.0))),
        gelu=_GELUS[raw.raw.get("hidden_act") or "gelu"],
    )


def _text(raw: _Section) -> TextConfig:
    raw.expect("model_type", "clip_text_model")
    raw.expect("hidden_act", "gelu")
    raw.expect("layer_norm_eps", 1e-5)
    return TextConfig(
        vocab_size=raw.whole("vocab_size"),
        hidden_size=raw.whole("hidden_size"),
        intermediate_size=raw.whole("intermediate_size"),
        num_layers=raw.whole("num_hidden_layers"),
        num_heads=raw.whole("num_attention_heads"),
        context=raw.whole("max_position_embeddings"),
    )

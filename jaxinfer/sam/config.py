"""The shape of a SAM 3 or 3.1 image model."""

from collections.abc import Mapping
from dataclasses import dataclass
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

    @property
    def mask_size(self) -> int:
        """Side of the mask logits: four times the grid."""
        return 4 * self.trunk.grid


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


def from_dict(raw: Mapping[str, Any]) -> Config:
    """The shape from a `config.json` of `Sam3Model` or `Sam3VideoModel` (its `detector_config`)."""
    raise NotImplementedError

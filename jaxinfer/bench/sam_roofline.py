"""The arithmetic of SAM 3, and the least time that an H200 needs for it.

A matrix product of `m x k` and `k x n` counts `2 m k n` operations; norms, softmax and other
functions of single elements are left out. What is counted is the model as it was published, so that
a way to compute the same with fewer products shows as speed.
"""

import math
from dataclasses import dataclass

from jaxinfer.sam.config import Config

BF16, FP8 = 790e12, 1500e12
"""Operations a second of the best large matrix products on an H200: a practical ceiling, some way
below the 989e12 and 1979e12 of the data sheet."""
DEVICE = "NVIDIA H200"
"""By the name that JAX gives it; on others no share is told."""


@dataclass(frozen=True)
class Operations:
    """Floating-point operations.

    Attributes:
        linears: of the trunk's blocks for a picture: those that FP8 can do.
        picture: of all else that a picture needs.
        prompt: of a prompt, its text features given.
        text: of the text encoder for a prompt.
    """

    linears: float
    picture: float
    prompt: float
    text: float

    def total(self, pictures: int, prompts: int) -> float:
        """Of so many pictures and prompts, the text features given."""
        return pictures * (self.linears + self.picture) + prompts * self.prompt

    def least_seconds(self, pictures: int, prompts: int, *, fp8: bool, kind: str) -> float:
        """What they take at least on a device of this kind; NaN where that is not known."""
        if kind != DEVICE:
            return math.nan
        rest = pictures * self.picture + prompts * self.prompt
        return pictures * self.linears / (FP8 if fp8 else BF16) + rest / BF16


def operations(cfg: Config) -> Operations:
    """Of a picture, a prompt and its text; prompts are text alone."""
    trunk, text = cfg.trunk, cfg.text
    n, d, w = trunk.grid**2, trunk.hidden_size, cfg.width
    block = 2 * n * (4 * d * d + 2 * d * trunk.intermediate_size)
    everywhere = len(trunk.global_layers)
    attention = (everywhere * n + (trunk.num_layers - everywhere) * trunk.window**2) * 4 * n * d
    patches = 2 * n * 3 * trunk.patch_size**2 * d
    letters, e = text.context, text.hidden_size
    layer = 2 * letters * (4 * e * e + 2 * e * text.intermediate_size) + 4 * letters**2 * e
    return Operations(
        linears=trunk.num_layers * block,
        picture=patches + attention + _neck(n, d, w) + _class_token(cfg),
        prompt=_encoder(cfg) + _decoder(cfg) + _masks(cfg),
        text=text.num_layers * layer + 2 * letters * e * w,
    )


def _neck(n: int, d: int, w: int) -> float:
    """Transposed convolutions of 2 x 2 by stride 2, then 1 x 1 and 3 x 3 at each of three sizes."""
    up = 2 * n * d * 4 * d // 2
    x4 = up + 2 * 4 * n * (d // 2) * 4 * (d // 4) + 2 * 16 * n * (d // 4 * w + 9 * w * w)
    x2 = up + 2 * 4 * n * (d // 2 * w + 9 * w * w)
    return x4 + x2 + 2 * n * (d * w + 9 * w * w)


def _class_token(cfg: Config) -> float:
    """The picture's keys and values, for one query."""
    n, w = cfg.trunk.grid**2, cfg.width
    return cfg.geometry_layers * (2 * n * 2 * w * w + 4 * n * w)


def _encoder(cfg: Config) -> float:
    n, w, prompt = cfg.trunk.grid**2, cfg.width, cfg.text.context + 1
    own = 2 * n * 4 * w * w + 4 * n * n * w
    return cfg.encoder_layers * (own + _cross(n, prompt, w) + 4 * n * w * cfg.intermediate_size)


def _decoder(cfg: Config) -> float:
    n, w, prompt = cfg.trunk.grid**2, cfg.width, cfg.text.context + 1
    q = cfg.num_queries + 1
    own = 2 * q * 4 * w * w + 4 * q * q * w
    seen = _cross(q, prompt, w) + _cross(q, n, w)
    bias = 2 * 2 * q * cfg.trunk.grid * (2 * w + w * cfg.num_heads)
    heads = 2 * q * (2 * w * w + 4 * w) + 2 * q * (2 * w * w + w * w)
    layers = own + seen + bias + heads + 4 * q * w * cfg.intermediate_size
    scoring = 4 * prompt * w * cfg.intermediate_size + 2 * q * w * w
    return cfg.decoder_layers * layers + scoring


def _masks(cfg: Config) -> float:
    n, w, q = cfg.trunk.grid**2, cfg.width, cfg.num_queries
    convolutions = 2 * (4 + 16) * n * 9 * w * w
    pixels = 2 * 16 * n * w * w + 2 * q * 16 * n * w
    return _cross(n, cfg.text.context + 1, w) + convolutions + pixels + 3 * 2 * q * w * w


def _cross(queries: int, keys: int, w: int) -> float:
    """Attention from some tokens to others, with its four projections."""
    return 2 * queries * 2 * w * w + 2 * keys * 2 * w * w + 4 * queries * keys * w

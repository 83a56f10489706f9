"""The bytes that a decode step must move, and how near a measured step comes to moving only those.

For `b` sequences of `c` tokens and `T` rows each (a token and `T - 1` drafts):

    weights     every matrix once, but of the experts only the chosen ones: with even, independent
                choice `E (1 - (1 - k/E)^(bT))` of `E` a layer, an upper estimate of what trained
                routers choose (`checkpoints.step_bytes`)
    keys        b (c + T) · L · 2 · Hkv · d · itemsize: read, and the new rows written
    recurrent   b · 2 · Lg · Hv · dk · dv · 4: read and written once a step, whatever `T`
    convolution b · 2 · Lg · (W - 1) · C · itemsize

Activations, logits and the drafting head are left out.
"""

import math
from dataclasses import asdict, dataclass
from typing import Any

import jax.numpy as jnp

from checkpoints import account, step_bytes
from jaxinfer.qwen.config import Config
from jaxinfer.qwen.params import Params


@dataclass(frozen=True)
class Device:
    """What a device can do at best.

    Attributes:
        bytes_a_second: of its memory, by the data sheet.
        copied_a_second: bytes read and written by the best copy that was measured.
        flops: bfloat16 matrix products, dense, by the data sheet.
    """

    bytes_a_second: float
    copied_a_second: float
    flops: float


DEVICES = {"NVIDIA H200": Device(4.8e12, 4.3e12, 989e12)}
"""By the name that JAX gives it; on others no share of a roofline is told."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that a decode step moves, by what they are; see the module."""

    weights: float
    keys: float
    recurrent: float
    convolution: float

    @property
    def total(self) -> float:
        """Bytes of all kinds."""
        return sum(asdict(self).values())


def traffic(
    cfg: Config,
    params: Params,
    streams: int,
    context: float,
    rows: int = 1,
    kv_dtype: str | None = None,
) -> Traffic:
    """The least that a decode step must move.

    Args:
        cfg: the model.
        params: arrays or shapes.
        streams: sequences.
        context: tokens that each has.
        rows: of each sequence: 1, or 1 and the drafts that are verified.
        kv_dtype: how keys and values are stored; None for the model's own type.
    """
    own = jnp.dtype(cfg.dtype).itemsize
    kept = jnp.dtype(kv_dtype or cfg.dtype).itemsize
    token = len(cfg.attention_layers) * 2 * cfg.num_key_value_heads * cfg.head_dim * kept
    head = cfg.linear_key_head_dim * cfg.linear_value_head_dim
    layers = len(cfg.gdn_layers)
    taps = cfg.linear_conv_kernel_dim - 1
    return Traffic(
        weights=step_bytes(cfg, params, streams * rows),
        keys=streams * (context + rows) * token,
        recurrent=streams * 2 * layers * cfg.linear_num_value_heads * head * 4,
        convolution=streams * 2 * layers * taps * cfg.conv_dim * own,
    )


def active_parameters(cfg: Config, params: Params) -> float:
    """Weights that multiply a token on its way through the layers: no embedding, no head."""
    rows = account(cfg, params)
    inner = (row for row in rows if row.module not in ("embed_tokens", "lm_head"))
    return sum(row.parameters * row.per_token / row.nbytes for row in inner)


def shares(moved: float, seconds: float | None, kind: str) -> dict[str, Any]:
    """A step's bytes, the time that the device needs for them, and the share of what it took.

    None where the device, or the time, is not known.
    """
    device = DEVICES.get(kind)
    told: dict[str, Any] = {
        "bytes_a_step": round(moved),
        "roofline_milliseconds": None,
        "share_of_datasheet": None,
        "share_of_copy": None,
    }
    if device is not None:
        least = moved / device.bytes_a_second
        told["roofline_milliseconds"] = round(1e3 * least, 4)
        if seconds:
            told["share_of_datasheet"] = round(least / seconds, 4)
            told["share_of_copy"] = round(moved / device.copied_a_second / seconds, 4)
    return told


def prefill_roofline(cfg: Config, params: Params, tokens: int, calls: int, kind: str) -> float:
    """Seconds that a prompt takes at least, NaN on a device that is not known.

    The longer of two: reading the weights once a call, and `2 · active parameters · tokens`
    floating-point operations. Attention's own products are left out.
    """
    device = DEVICES.get(kind)
    if device is None:
        return math.nan
    read = calls * step_bytes(cfg, params, math.ceil(tokens / calls)) / device.bytes_a_second
    computed = 2 * active_parameters(cfg, params) * tokens / device.flops
    return max(read, computed)

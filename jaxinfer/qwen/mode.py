"""How a forward pass is cut into pieces of fixed shape; see `pallas_kernels.rows` for why."""

from dataclasses import dataclass

import jax

from jaxinfer.qwen.config import CHUNK


@dataclass(frozen=True)
class Mode:
    """A static argument of every layer.

    Attributes:
        tile: rows computed together by everything that treats tokens one by one; None computes all
            at once, fast but with bits that depend on the batch (training).
        chunked: tokens are prompt chunks (Gated DeltaNet in its parallel form, every expert over
            all rows); otherwise they are decode or verify rows, each computed as if alone.
    """

    tile: int | None
    chunked: bool


TRAIN = Mode(tile=None, chunked=True)
PREFILL = Mode(tile=CHUNK, chunked=True)


def decode_mode() -> Mode:
    """The mode of decode and verify steps: the tile that is cheapest on this backend."""
    return Mode(tile=8 if jax.default_backend() == "cpu" else 64, chunked=False)

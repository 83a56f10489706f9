"""The kernels find the changes that plain JAX finds, in pictures of any size and shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxinfer.sam import outlines
from pallas_kernels.backend import Impl
from pallas_kernels.mask_changes import mask_changes

KEPT = 2


def compare(sizes: list[tuple[int, int]], side: int, room: int, impl: Impl) -> None:
    rng = np.random.default_rng(side)
    coarse = jnp.asarray(rng.normal(size=(len(sizes), KEPT + 1, 5, 5)), jnp.float32)
    logits = jax.image.resize(coarse, (*coarse.shape[:2], side, side), "cubic")
    logits = logits.astype(jnp.bfloat16)
    places = jax.tree.map(jnp.asarray, outlines.places(sizes, side, room))
    kept = jnp.full(len(sizes), KEPT, jnp.int32)
    given = places.size, places.first, places.fraction
    count, changes, words = map(np.asarray, mask_changes(logits, kept, *given, impl=impl))
    expected = map(np.asarray, mask_changes(logits, kept, *given, impl="plain"))
    counts, listed, packed = expected
    assert not count[:, KEPT:].any()
    # With a product fused into a sum some last bit is another one.
    most = 0 if impl == "interpret" else 4
    for p, (_, width) in enumerate(sizes):
        for k in range(KEPT):
            differ = np.bitwise_count(words[p, k, :width] ^ packed[p, k, :width]).sum()
            assert differ <= most
            if not differ:
                assert count[p, k] == counts[p, k] > 0
                here = slice(min(count[p, k], changes.shape[-1]))
                assert np.array_equal(changes[p, k, here], listed[p, k, here])


@pytest.mark.parametrize("sizes", [[(256, 256), (31, 200)], [(200, 1), (1, 256)]])
def test_interpreted(sizes: list[tuple[int, int]]) -> None:
    compare(sizes, 24, 256, "interpret")


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "room"), [((1008, 1008), 1024), ((1080, 1920), 2048)])
def test_on_a_gpu(size: tuple[int, int], room: int) -> None:
    compare([size, (size[0] // 2, size[1] - 7)], 288, room, "kernel")

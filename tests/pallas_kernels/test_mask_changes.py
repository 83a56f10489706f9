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
    counts = jnp.arange(KEPT + 1) < kept[:, None]
    # As it is written: with a product fused into a sum some last bit is another one.
    with jax.disable_jit(impl == "interpret"):
        expected = jax.vmap(jax.vmap(outlines.traced, (0, 0, None)))(logits, counts, places)
    assert not count[:, KEPT:].any()
    for p, (_, width) in enumerate(sizes):
        for k in range(KEPT):
            here, wanted = count[p, k], int(expected.count[p, k])
            bits = np.bitwise_count(words[p, k, :width] ^ expected.words[p, k, :width]).sum()
            assert bits <= (0 if impl == "interpret" else 4)
            if not bits:
                listed = min(here, changes.shape[-1])
                assert here == wanted
                assert np.array_equal(changes[p, k, :listed], expected.changes[p, k, :listed])


@pytest.mark.parametrize("sizes", [[(256, 256), (31, 200)], [(200, 1), (1, 256)]])
def test_interpreted(sizes: list[tuple[int, int]]) -> None:
    compare(sizes, 24, 256, "interpret")


@pytest.mark.gpu
@pytest.mark.parametrize(("size", "room"), [((1008, 1008), 1024), ((1080, 1920), 2048)])
def test_on_a_gpu(size: tuple[int, int], room: int) -> None:
    compare([size, (size[0] // 2, size[1] - 7)], 288, room, "kernel")

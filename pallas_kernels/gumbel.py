"""Gumbel noise as a function of (seed, index, token) alone, for use inside kernels.

Random bits come from the counter-based generator Threefry-2x32 with 20 rounds (Salmon, Moraes,
Dror, Shaw: "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011). Keys, counters and the way from
bits to noise are those of `jax.random`, so that

    gumbel(*noise_key(seed, index), ids, V)
    jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), index), (V,), mode="high")[ids]

are the same noise but for the rounding of two logarithms. It takes 46 random bits a token: with the
ordinary 23 it would end at 16, which the largest of a whole vocabulary's now and then exceeds.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def threefry(
    key: tuple[jax.Array, jax.Array], high: jax.Array, low: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Two words of random bits for each pair of counter words; all are uint32."""
    keys = (*key, key[0] ^ key[1] ^ _PARITY)
    x, y = high + keys[0], low + keys[1]
    for turn in range(5):
        for bits in _ROTATIONS[turn % 2]:
            x = x + y
            y = x ^ ((y << np.uint32(bits)) | (y >> np.uint32(32 - bits)))
        x = x + keys[(turn + 1) % 3]
        y = y + keys[(turn + 2) % 3] + np.uint32(turn + 1)
    return x, y


def noise_key(seed: jax.Array, index: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The key of one token's noise, from a uint32 seed and its index in the sequence."""
    zero = jnp.zeros_like(seed)
    return threefry((zero, seed), zero, index.astype(jnp.uint32))


def gumbel(key: tuple[jax.Array, jax.Array], ids: jax.Array, size: int) -> jax.Array:
    """Float32 noise of tokens `ids` (int32) of a vocabulary of `size`."""
    counter = ids.astype(jnp.uint32)
    coarse = _uniform(key, counter)
    fine = _uniform(key, counter + np.uint32(size))
    u = jnp.where(coarse >= 0.5, coarse, coarse + 2.0**-23 * fine + 2.0**-47)
    return -jnp.log(-jnp.log1p(-u))


def _uniform(key: tuple[jax.Array, jax.Array], counter: jax.Array) -> jax.Array:
    """Float32 multiples of 2^-23 in [0, 1)."""
    x, y = threefry(key, jnp.zeros_like(counter), counter)
    bits = ((x ^ y) >> np.uint32(9)) | np.uint32(0x3F800000)
    return lax.bitcast_convert_type(bits, jnp.float32) - 1.0

"""Verify steps through interpreted kernels compute what they do in plain JAX.

Prefill is left to the kernels' own tests: interpreting it takes a minute.
"""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import load, resolve
from jaxinfer.qwen import model
from jaxinfer.qwen.config import FULL, LINEAR, Config
from jaxinfer.qwen.mode import FAMILIES, decode_mode
from jaxinfer.qwen.params import Params, init, nvidia_mix
from jaxinfer.qwen.state import Pieces, Rows, State, init_state, own_pages


@pytest.fixture(scope="module")
def small() -> tuple[Config, Params]:
    """One layer of either kind, random, in FP8 and NVFP4."""
    cfg, _ = load(resolve("tiny_qwen"), vision=False)
    cfg = replace(cfg, layer_types=(LINEAR, FULL))
    return cfg, init(cfg, jax.random.key(0), nvidia_mix)


def prefilled(cfg: Config, params: Params, tokens: jax.Array) -> State:
    """After a prompt of two pieces `[2, 64]`."""
    table, zero = own_pages(1, 128), jnp.zeros(2, jnp.int32)
    pieces = Pieces(
        table=jnp.repeat(table, 2, axis=0),
        slot=zero,
        start=jnp.array([0, 64]),
        valid=jnp.array([64, 30]),
        source=zero,
        snapshot=zero + 1,
        fresh=jnp.ones(2, bool),
    )

    @jax.jit
    def prefill(params: Params, state: State) -> tuple[jax.Array, State]:
        x, positions = model.embed(params, cfg, tokens), model.text_positions(pieces.start, 64)
        return model.prefill(params, cfg, x, state, pieces, positions)

    return prefill(params, init_state(cfg, 1, 3, 2))[1]


def run(
    cfg: Config, params: Params, state: State, tokens: jax.Array, kernels: frozenset[str]
) -> tuple[list[jax.Array], State]:
    """A verify step of which one row holds, then another."""
    rows, active = Rows(own_pages(1, 128), jnp.zeros(1, jnp.int32)), jnp.ones(1, bool)

    @jax.jit
    def verify(params: Params, state: State, tokens: jax.Array) -> tuple[jax.Array, State]:
        mode = decode_mode(kernels, interpret=True)
        x = model.embed(params, cfg, tokens)
        hidden, state = model.decode(params, cfg, x, state, rows, active, mode)
        return model.logits(params, hidden, mode), model.accept(state, rows, jnp.ones(1, jnp.int32))

    out = []
    for start in (3, 5):
        scores, state = verify(params, state, tokens[:1, start : start + 2])
        out.append(scores)
    return out, state


def test_verify_and_replay(small: tuple[Config, Params]) -> None:
    tokens = jax.random.randint(jax.random.key(1), (2, 64), 0, 4000)
    start = prefilled(*small, tokens)
    ours, state = run(*small, start, tokens, frozenset(FAMILIES))
    plain, expected = run(*small, start, tokens, frozenset())
    for a, b in zip(ours, plain, strict=True):
        assert _distance(a, b) < 0.03
    assert (state.length == expected.length).all()
    # The last entry is scratch, and holds anything.
    for name in ("conv", "recurrent", "pending_x", "pending_g", "pending_beta"):
        assert _distance(getattr(state, name)[:, :1], getattr(expected, name)[:, :1]) < 0.03


def _distance(a: jax.Array, b: jax.Array) -> float:
    a, b = (np.asarray(x, np.float64) for x in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))

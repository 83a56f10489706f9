"""A token's result depends on its own sequence alone, bit for bit."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import load, resolve
from jaxinfer.qwen import model
from jaxinfer.qwen.config import CHUNK, Config
from jaxinfer.qwen.mode import decode_mode
from jaxinfer.qwen.params import Params
from jaxinfer.qwen.state import State, init_state
from tests.qwen.helpers import jit_decode, jit_prefill, run_prompt

ROOM, ROWS = 256, 4


@pytest.fixture(scope="module", params=["tiny_qwen", "tiny_qwen-nvfp4"])
def checkpoint(request: pytest.FixtureRequest) -> tuple[Config, Params]:
    """Two layers of each kind are enough, and compile in half the time."""
    cfg, params = load(resolve(request.param))
    kinds = cfg.layer_types[2:4]
    return replace(cfg, layer_types=kinds), params


def tokens(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 4000, length)


def assert_same(a: jax.Array, b: jax.Array) -> None:
    np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def assert_same_state(a: State, b: State, length: int) -> None:
    for name in ("conv", "recurrent", "pending", "length"):
        assert_same(getattr(a, name), getattr(b, name))
    assert_same(a.k[:, :, :length], b.k[:, :, :length])
    assert_same(a.v[:, :, :length], b.v[:, :, :length])


@pytest.mark.also_gpu
@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (3,)])
def test_prefill_split_anywhere_on_the_grid(
    checkpoint: tuple[Config, Params], sizes: tuple[int, ...]
) -> None:
    cfg, params = checkpoint
    x = model.embed(params, cfg, tokens(150))
    one_by_one, state = run_prompt(params, cfg, x)
    hidden, other = run_prompt(params, cfg, x, sizes=sizes)
    assert_same(hidden, one_by_one)
    assert_same_state(state, other, 150)


@pytest.mark.also_gpu
def test_prefill_in_a_batch_of_unequal_lengths(checkpoint: tuple[Config, Params]) -> None:
    cfg, params = checkpoint
    lengths = (150, 7, 64)
    state = init_state(cfg, len(lengths), ROOM, ROWS)
    ids = np.zeros((len(lengths), 3 * CHUNK), np.int32)
    for row, length in enumerate(lengths):
        ids[row, :length] = tokens(length, seed=row)
    x = model.embed(params, cfg, jnp.asarray(ids))
    places = model.text_positions(jnp.zeros(len(lengths), jnp.int32), ids.shape[1])
    hidden, state = jit_prefill(params, cfg, x, state, jnp.array(lengths), places)
    for row, length in enumerate(lengths):
        alone, single = run_prompt(params, cfg, x[row, :length])
        assert_same(hidden[row, :length], alone)
        assert_same(state.recurrent[:, row], single.recurrent[:, 0])
        assert_same(state.conv[:, row], single.conv[:, 0])


def advance(
    cfg: Config, params: Params, state: State, rows: np.ndarray, keep: int
) -> tuple[jax.Array, State]:
    """One verify step over `rows [B, T]` of which the first `keep` are accepted."""
    x = model.embed(params, cfg, jnp.asarray(rows))
    hidden, state = jit_decode(params, cfg, x, state, decode_mode())
    return hidden[:, :keep], model.accept(state, jnp.full(rows.shape[0], keep))


def test_verify_rows_are_decode_rows_and_rejected_ones_leave_no_trace(
    checkpoint: tuple[Config, Params],
) -> None:
    cfg, params = checkpoint
    _, start = run_prompt(params, cfg, model.embed(params, cfg, tokens(71)))
    ids, wrong = tokens(7, seed=1), tokens(3, seed=2)

    state, one_by_one = start, []
    for token in ids:
        hidden, state = advance(cfg, params, state, np.array([[token]]), 1)
        one_by_one.append(hidden)

    state, verified = start, []
    for begin, keep in ((0, 2), (2, 1), (3, 4)):
        rows = np.concatenate([ids[begin : begin + keep], wrong])[None, :ROWS]
        hidden, state = advance(cfg, params, state, rows, keep)
        verified.append(hidden)
    assert_same(jnp.concatenate(verified, 1), jnp.concatenate(one_by_one, 1))


@pytest.mark.also_gpu
def test_decode_does_not_depend_on_batch_or_slot(checkpoint: tuple[Config, Params]) -> None:
    cfg, params = checkpoint
    prompts = [tokens(length, seed=length) for length in (5, 64, 71, 100, 3)]
    states = [run_prompt(params, cfg, model.embed(params, cfg, p))[1] for p in prompts]

    def batch(order: list[int]) -> State:
        parts = [states[i] for i in order]

        def join(name: str) -> jax.Array:
            arrays = [getattr(part, name) for part in parts]
            return jnp.concatenate(arrays, 0 if arrays[0].ndim == 1 else 1)

        return State(**{name: join(name) for name in vars(states[0])})

    follow = tokens(5, seed=9)
    alone = [advance(cfg, params, s, follow[i : i + 1, None], 1)[0] for i, s in enumerate(states)]
    for order in ([0, 1, 2, 3, 4], [3, 1], [4, 2, 0]):
        hidden, _ = advance(cfg, params, batch(order), follow[order][:, None], 1)
        for row, index in enumerate(order):
            assert_same(hidden[row], alone[index][0])

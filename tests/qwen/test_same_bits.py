"""A token's result depends on its own sequence alone, bit for bit."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from checkpoints import load, resolve
from jaxinfer.qwen import model
from jaxinfer.qwen.config import CHUNK, Config
from jaxinfer.qwen.params import Params
from jaxinfer.qwen.state import State, own_pages
from tests.qwen import helpers
from tests.qwen.helpers import ROOM, jit_prefill, kept, pieces_of, step

SLOTS, SNAPSHOTS = 2, 1
"""Of every state here, and calls are of one, two or four pieces: each other shape is compiled."""


@pytest.fixture(scope="module", params=["tiny_qwen", "tiny_qwen-nvfp4"])
def checkpoint(request: pytest.FixtureRequest) -> tuple[Config, Params]:
    """Two layers of each kind are enough, and compile in half the time."""
    cfg, params = load(resolve(request.param))
    kinds = cfg.layer_types[2:4]
    return replace(cfg, layer_types=kinds), params


def tokens(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 4000, length)


def empty(cfg: Config) -> State:
    return helpers.empty(cfg, SLOTS, snapshots=SNAPSHOTS)


def run_prompt(
    params: Params, cfg: Config, x: jax.Array, sizes: tuple[int, ...] = ()
) -> tuple[jax.Array, State]:
    return helpers.run_prompt(params, cfg, x, sizes=sizes, slots=SLOTS, snapshots=SNAPSHOTS)


def assert_same(a: jax.Array, b: jax.Array) -> None:
    np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def assert_same_state(a: State, b: State, length: int) -> None:
    for name in ("pending", "length"):
        assert_same(getattr(a, name)[0], getattr(b, name)[0])
    for name in ("conv", "recurrent"):
        assert_same(getattr(a, name)[:, 0], getattr(b, name)[:, 0])
    assert_same(kept(a.k, 0, length), kept(b.k, 0, length))
    assert_same(kept(a.v, 0, length), kept(b.v, 0, length))


@pytest.mark.also_gpu
@pytest.mark.parametrize("sizes", [(1, 2, 1), (2, 2), (4,)])
def test_prefill_split_anywhere_on_the_grid(
    checkpoint: tuple[Config, Params], sizes: tuple[int, ...]
) -> None:
    cfg, params = checkpoint
    x = model.embed(params, cfg, tokens(200))
    one_by_one, state = run_prompt(params, cfg, x)
    hidden, other = run_prompt(params, cfg, x, sizes=sizes)
    assert_same(hidden, one_by_one)
    assert_same_state(state, other, 200)


@pytest.mark.also_gpu
def test_several_prompts_packed_into_one_call(checkpoint: tuple[Config, Params]) -> None:
    cfg, params = checkpoint
    lengths = (100, 7)
    prompts = [model.embed(params, cfg, tokens(length, seed=length)) for length in lengths]
    parts = [
        pieces_of(slot, 0, length, -(-length // CHUNK), SLOTS)
        for slot, length in enumerate(lengths)
    ]
    parts.append(pieces_of(0, 0, 0, 1, SLOTS))  # fills up the call
    parts[-1] = replace(parts[-1], slot=jnp.array([SLOTS]))
    pieces = jax.tree.map(lambda *a: jnp.concatenate(a), *parts)
    x = np.concatenate([np.pad(p, ((0, -len(p) % CHUNK), (0, 0))) for p in prompts])
    x = np.pad(x, ((0, CHUNK), (0, 0))).reshape(-1, CHUNK, x.shape[-1])
    places = model.text_positions(pieces.start, CHUNK)
    hidden, state = jit_prefill(params, cfg, x, empty(cfg), pieces, places)
    begin = 0
    for slot, length in enumerate(lengths):
        alone, single = run_prompt(params, cfg, prompts[slot])
        count = -(-length // CHUNK)
        assert_same(hidden[begin : begin + count].reshape(-1, x.shape[-1])[:length], alone)
        assert_same(state.recurrent[:, slot], single.recurrent[:, 0])
        assert_same(state.conv[:, slot], single.conv[:, 0])
        assert_same(kept(state.k, slot, length), kept(single.k, 0, length))
        assert state.length[slot] == length
        begin += count


@pytest.mark.also_gpu
def test_going_on_from_a_snapshot_is_going_on(checkpoint: tuple[Config, Params]) -> None:
    cfg, params = checkpoint
    x = model.embed(params, cfg, tokens(150))
    hidden, state = run_prompt(params, cfg, x)
    x = np.pad(x, ((0, 42), (0, 0))).reshape(3, CHUNK, -1)

    # The first slot runs two pieces and leaves a snapshot; the second takes it up, and the pages.
    shared = empty(cfg)
    first = replace(pieces_of(0, 0, 128, 2, SLOTS), snapshot=jnp.array([2, 3]))
    places = model.text_positions(first.start, CHUNK)
    _, shared = jit_prefill(params, cfg, x[:2], shared, first, places)
    table = own_pages(SLOTS, ROOM)
    table = table.at[1, :2].set(table[0, :2])[1:]
    rest = replace(pieces_of(1, 128, 22, 1, SLOTS), table=table, source=jnp.array([3]))
    places = model.text_positions(rest.start, CHUNK)
    again, shared = jit_prefill(params, cfg, x[2:], shared, rest, places)
    assert_same(again[0, :22], hidden[128:])
    assert_same(shared.recurrent[:, 1], state.recurrent[:, 0])
    assert_same(shared.conv[:, 1], state.conv[:, 0])


@pytest.mark.also_gpu
def test_what_nobody_wrote_is_never_read(checkpoint: tuple[Config, Params]) -> None:
    cfg, params = checkpoint
    x = model.embed(params, cfg, tokens(71))
    hidden, state = run_prompt(params, cfg, x)
    poisoned = jax.tree.map(
        lambda a: jnp.full_like(a, jnp.nan) if jnp.issubdtype(a.dtype, jnp.floating) else a,
        empty(cfg),
    )
    x = np.pad(x, ((0, 57), (0, 0))).reshape(2, CHUNK, -1)
    pieces = pieces_of(0, 0, 71, 2, SLOTS)
    places = model.text_positions(pieces.start, CHUNK)
    out, poisoned = jit_prefill(params, cfg, x, poisoned, pieces, places)
    assert_same(out.reshape(128, -1)[:71], hidden)
    token = np.array([[5]])
    assert_same(*(step(params, cfg, s, token)[0] for s in (state, poisoned)))


@pytest.mark.also_gpu
def test_verify_rows_are_decode_rows_and_rejected_ones_leave_no_trace(
    checkpoint: tuple[Config, Params],
) -> None:
    cfg, params = checkpoint
    _, start = run_prompt(params, cfg, model.embed(params, cfg, tokens(71)))
    ids, wrong = tokens(7, seed=1), tokens(3, seed=2)

    state, one_by_one = start, []
    for token in ids:
        hidden, state = step(params, cfg, state, np.array([[token]]))
        one_by_one.append(hidden)

    state, verified = start, []
    for begin, keep in ((0, 2), (2, 1), (3, 4)):
        rows = np.concatenate([ids[begin : begin + keep], wrong])[None, :4]
        hidden, state = step(params, cfg, state, rows, keep)
        verified.append(hidden[:, :keep])
    assert_same(jnp.concatenate(verified, 1), jnp.concatenate(one_by_one, 1))


@pytest.mark.also_gpu
def test_decode_does_not_depend_on_batch_or_slot(checkpoint: tuple[Config, Params]) -> None:
    cfg, params = checkpoint
    prompts = [tokens(length, seed=length) for length in (5, 64, 71, 100, 3)]
    states = [run_prompt(params, cfg, model.embed(params, cfg, p))[1] for p in prompts]

    def batch(order: list[int]) -> State:
        """The sequences in this order in the slots of one state."""
        parts, pages = [jax.device_get(states[i]) for i in order], ROOM // CHUNK

        def join(name: str) -> jax.Array:
            arrays = [getattr(part, name) for part in parts]
            if name in ("k", "v"):
                first = [arrays[0][:, :1], *(a[:, 1 : 1 + pages] for a in arrays)]
                return jnp.asarray(np.concatenate(first, 1))
            axis = 0 if arrays[0].ndim == 1 else 1
            own, scratch = ([a.take([i], axis) for a in arrays] for i in (0, 1))
            return jnp.asarray(np.concatenate([*own, scratch[0]], axis))

        return State(**{name: join(name) for name in vars(states[0])})

    follow = tokens(5, seed=9)
    alone = [step(params, cfg, s, follow[i : i + 1, None])[0] for i, s in enumerate(states)]
    for order in ([0, 1, 2, 3, 4], [3, 1], [4, 2, 0, 1, 3]):
        hidden, _ = step(params, cfg, batch(order), follow[order][:, None])
        for row, index in enumerate(order):
            assert_same(hidden[row], alone[index][0])

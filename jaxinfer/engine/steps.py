"""The compiled steps: prefill a chunk of one slot, decode (or verify) all of them.

Everything a step needs to know of a request lies in `Slots` on the device; both steps take it,
donated, and return it with what is new.
"""

from dataclasses import dataclass, replace
from functools import partial

import jax
import jax.numpy as jnp

from jaxinfer.engine.ngram import ngram_drafts
from jaxinfer.engine.sampling import Sampler, init_sampler, sample
from jaxinfer.qwen import model
from jaxinfer.qwen.config import CHUNK, Config
from jaxinfer.qwen.mode import PREFILL, Mode, decode_mode
from jaxinfer.qwen.params import Params
from jaxinfer.qwen.state import State, init_state, read_slot, write_slot

SPECULATIONS = ("ngram", "mtp", "auto")
AUTO_SUFFIX = 4
"""Shortest repeated suffix for which "auto" trusts the n-gram rather than the MTP head."""


@dataclass(frozen=True)
class Plan:
    """What is static about an engine's steps.

    Attributes:
        cfg: the model.
        speculation: None, or one of `SPECULATIONS`.
        drafts: tokens drafted a step (0 without speculation).
        vocabulary: ids that stand for something; the rest only pads the logits and is never
            chosen. None for all.
    """

    cfg: Config
    speculation: str | None
    drafts: int
    vocabulary: int | None = None

    @property
    def rows(self) -> int:
        """Rows of a sequence in a decode step."""
        return 1 + self.drafts


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """All requests in flight.

    Attributes:
        state: the model's state of `B` sequences.
        history: `[B, S]` int32, tokens known so far; the newest is not in `state` yet.
        drafts: `[B, K]` int32, proposed continuation of `history`.
        drafted: `[B]` int32, how many of them count.
        active: `[B]` bool, slots that decode.
        sampler: how each slot samples.
    """

    state: State
    history: jax.Array
    drafts: jax.Array
    drafted: jax.Array
    active: jax.Array
    sampler: Sampler


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Committed:
    """What a decode step adds.

    Attributes:
        tokens: `[B, T]` int32, the first `count` of a row are new.
        logprobs: `[B, T]` float32.
        count: `[B]` int32, 0 for slots that are not active.
        drafted: `[B]` int32, drafts that were verified.
    """

    tokens: jax.Array
    logprobs: jax.Array
    count: jax.Array
    drafted: jax.Array


def init_slots(plan: Plan, batch: int, context: int) -> Slots:
    """Empty slots, each with room for `context` tokens and a step's overhang."""
    room = -(-(context + plan.rows) // CHUNK) * CHUNK
    return Slots(
        state=init_state(plan.cfg, batch, room, plan.rows),
        history=jnp.zeros((batch, room), jnp.int32),
        drafts=jnp.zeros((batch, plan.drafts), jnp.int32),
        drafted=jnp.zeros(batch, jnp.int32),
        active=jnp.zeros(batch, bool),
        sampler=init_sampler(batch),
    )


@partial(jax.jit, donate_argnums=0)
def claim(slots: Slots, slot: jax.Array, sampler: Sampler) -> Slots:
    """Empty a slot for a new request with these (scalar) sampling parameters."""
    empty = jax.tree.map(jnp.zeros_like, read_slot(slots.state, slot))
    return replace(
        slots,
        state=write_slot(slots.state, slot, empty),
        active=slots.active.at[slot].set(False),
        sampler=jax.tree.map(lambda a, v: a.at[slot].set(v), slots.sampler, sampler),
    )


@partial(jax.jit, donate_argnums=0)
def release(slots: Slots, slot: jax.Array) -> Slots:
    """Stop decoding a slot."""
    return replace(slots, active=slots.active.at[slot].set(False))


@partial(jax.jit, static_argnums=1, donate_argnums=2)
def prefill_step(
    params: Params,
    plan: Plan,
    slots: Slots,
    slot: jax.Array,
    tokens: jax.Array,
    valid: jax.Array,
    following: jax.Array,
) -> tuple[Slots, jax.Array, jax.Array]:
    """Run one chunk of a prompt; after the last one sample a token and draft what follows.

    Args:
        params: the model's parameters.
        plan: static.
        slots: donated.
        slot: scalar, which one.
        tokens: `[64]`, the chunk.
        valid: scalar, how many of them are real.
        following: scalar, the prompt's next token, or -1 after its last chunk.

    Returns:
        The slots, the token sampled after the chunk and its log probability (scalars); they mean
        nothing unless the chunk was the last.
    """
    cfg, rows = plan.cfg, decode_mode()
    state = read_slot(slots.state, slot)
    start = state.length
    positions = model.text_positions(start, CHUNK)
    x = model.embed(params, cfg, tokens[None])
    hidden, state = model.prefill(params, cfg, x, state, valid[None], positions)

    last = hidden[:, valid - 1][:, None]
    one = jax.tree.map(lambda a: a[slot][None], slots.sampler)
    index = (start + valid)[:, None]
    token, logprob = sample(_scores(plan, params, last, rows), one, index, rows.tile or 1)
    token, logprob = token[0, 0], logprob[0, 0]
    done = following < 0
    following = jnp.where(done, token, following)

    place = start[0] + jnp.arange(CHUNK + 1)
    known = jnp.append(tokens, 0).at[valid].set(following)
    history = slots.history.at[slot, place].set(known, mode="drop")
    drafts, drafted, state = _draft(
        plan,
        params,
        state,
        hidden,
        known[None, 1:],
        start,
        valid[None] - 1,
        history[slot][None],
        PREFILL,
    )
    slots = replace(
        slots,
        state=write_slot(slots.state, slot, state),
        history=history,
        drafts=slots.drafts.at[slot].set(drafts[0]),
        drafted=slots.drafted.at[slot].set(drafted[0]),
        active=slots.active.at[slot].set(done),
    )
    return slots, token, logprob


@partial(jax.jit, static_argnums=1, donate_argnums=2)
def decode_step(params: Params, plan: Plan, slots: Slots) -> tuple[Slots, Committed]:
    """Verify every active slot's drafts, commit what holds and one token more, draft again."""
    cfg, mode = plan.cfg, decode_mode()
    batch = jnp.arange(slots.active.shape[0])
    start, T = slots.state.length, plan.rows
    newest = slots.history[batch, start][:, None]
    tokens = jnp.concatenate([newest, slots.drafts], axis=1)
    hidden, state = model.decode(params, cfg, model.embed(params, cfg, tokens), slots.state, mode)

    after = start[:, None] + 1 + jnp.arange(T)
    scores = _scores(plan, params, hidden, mode)
    chosen, logprobs = sample(scores, slots.sampler, after, mode.tile or 1)
    held = (chosen[:, :-1] == slots.drafts) & (jnp.arange(T - 1) < slots.drafted[:, None])
    accepted = jnp.sum(jnp.cumprod(held, axis=1), axis=1)
    count = jnp.where(slots.active, accepted + 1, 0)
    state = model.accept(state, count)

    # Rows past the accepted ones hold guesses, which the next step overwrites.
    history = slots.history.at[batch[:, None], after].set(chosen, mode="drop")
    drafts, drafted, state = _draft(
        plan, params, state, hidden, chosen, start, accepted, history, mode
    )
    out = Committed(chosen, logprobs, count, jnp.where(slots.active, slots.drafted, 0))
    return replace(slots, state=state, history=history, drafts=drafts, drafted=drafted), out


def _scores(plan: Plan, params: Params, hidden: jax.Array, mode: Mode) -> jax.Array:
    """Logits `[B, T, V]`, minus infinity where an id stands for nothing."""
    scores = model.logits(params, hidden, mode)
    if plan.vocabulary is None:
        return scores
    return jnp.where(jnp.arange(scores.shape[-1]) < plan.vocabulary, scores, -jnp.inf)


def _draft(
    plan: Plan,
    params: Params,
    state: State,
    hidden: jax.Array,
    following: jax.Array,
    start: jax.Array,
    newest: jax.Array,
    history: jax.Array,
    mode: Mode,
) -> tuple[jax.Array, jax.Array, State]:
    """Propose what comes after the newest token of each sequence.

    Args:
        plan: static.
        params: the model's parameters.
        state: its MTP caches receive the rows of this step.
        hidden: `[B, T, D]`, of the rows just run.
        following: `[B, T]`, the token after each of them.
        start: `[B]`, index of the first row.
        newest: `[B]`, the row whose following token is the newest known.
        history: `[B, S]`, with that token in place.
        mode: that of the rows just run.

    Returns:
        Drafts `[B, K]`, how many count `[B]`, and the state.
    """
    B, K = start.shape[0], plan.drafts
    length = start + newest + 2
    ngram = jax.vmap(partial(ngram_drafts, count=K))
    if plan.speculation is None:
        return jnp.zeros((B, 0), jnp.int32), jnp.zeros(B, jnp.int32), state
    if plan.speculation == "ngram":
        drafts, drafted, _ = ngram(history, length)
        return drafts, drafted, state
    ahead, state = _mtp_drafts(plan, params, state, hidden, following, start, newest, mode)
    drafted = jnp.full(B, K, jnp.int32)
    if plan.speculation == "auto":
        copied, found, suffix = ngram(history, length)
        copy = (suffix >= AUTO_SUFFIX) & (found > 0)
        ahead = jnp.where(copy[:, None], copied, ahead)
        drafted = jnp.where(copy, found, drafted)
    return ahead, drafted, state


def _mtp_drafts(
    plan: Plan,
    params: Params,
    state: State,
    hidden: jax.Array,
    following: jax.Array,
    start: jax.Array,
    newest: jax.Array,
    mode: Mode,
) -> tuple[jax.Array, State]:
    """Greedy drafts `[B, K]` of the MTP head, whose cache is filled for this step's rows first."""
    cfg, T = plan.cfg, hidden.shape[1]
    rows, batch = decode_mode(), jnp.arange(start.shape[0])
    x = model.embed(params, cfg, following)
    position = start + state.rope_delta
    ahead, state = model.draft(
        params, cfg, x, hidden, state, start, model.text_positions(position, T), mode
    )
    h = ahead[batch, newest][:, None]
    drafts = []
    for step in range(plan.drafts):
        if step:
            x = model.embed(params, cfg, drafts[-1])
            row = newest + step
            place = model.text_positions(position + row, 1)
            h, state = model.draft(params, cfg, x, h, state, start + row, place, rows)
        drafts.append(jnp.argmax(_scores(plan, params, h, rows), axis=-1).astype(jnp.int32))
    return jnp.concatenate(drafts, axis=1), state

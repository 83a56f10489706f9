"""The compiled steps: prefill some pieces, decode (or verify) some slots, several times over.

Everything a step needs to know of a request lies in `Slots` on the device; every step takes it,
donated, and returns it with what is new. A call names the slots it is about and their pages.
"""

from dataclasses import replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxinfer.engine import sampling
from jaxinfer.engine.drafting import draft, known_logits
from jaxinfer.engine.sampling import LENGTH, Settings, sample
from jaxinfer.engine.slots import Plan, Slots
from jaxinfer.qwen import model
from jaxinfer.qwen.cache import Place
from jaxinfer.qwen.config import CHUNK
from jaxinfer.qwen.params import Params
from jaxinfer.qwen.state import Pieces, Rows


class Prefilled(NamedTuple):
    """What a prefill call tells of its `P` pieces.

    Attributes:
        tokens: `[P]` int32, sampled after the piece; meaningless unless its prompt ended in it.
        logprobs: `[P]` float32.
        top_tokens, top_logprobs: `[P, top]`, the likeliest there.
        prompt: log probability `[P, 64]` of the token after each one, and the likeliest there
            `[P, 64, top]` twice; None unless asked for.
    """

    tokens: jax.Array
    logprobs: jax.Array
    top_tokens: jax.Array
    top_logprobs: jax.Array
    prompt: tuple[jax.Array, jax.Array, jax.Array] | None


class Verified(NamedTuple):
    """A step between the model and the choice of tokens.

    Attributes:
        tokens: `[b, T]` int32, what the rows were fed: the newest token and the drafts.
        drafted: `[b]` int32, how many of the drafts count.
        hidden: `[b, T, D]`, after the final norm.
        scores: `[b, T, V]` float32.
    """

    tokens: jax.Array
    drafted: jax.Array
    hidden: jax.Array
    scores: jax.Array


class Committed(NamedTuple):
    """What a decode step adds. After several steps in one call each leaf has a leading axis.

    Attributes:
        tokens: `[b, T]` int32, the first `count` of a row are new.
        logprobs: `[b, T]` float32.
        top_tokens, top_logprobs: `[b, T, top]`, the likeliest at each place.
        count: `[b]` int32, 0 for slots that are not active.
        drafted: `[b]` int32, drafts that were verified.
        drafts: `[b, K]` int32, proposed for the next step.
        proposed: `[b]` int32, how many of those count.
    """

    tokens: jax.Array
    logprobs: jax.Array
    top_tokens: jax.Array
    top_logprobs: jax.Array
    count: jax.Array
    drafted: jax.Array
    drafts: jax.Array
    proposed: jax.Array


@partial(jax.jit, donate_argnums=0)
def claim(
    slots: Slots,
    slot: jax.Array,
    prompt: jax.Array,
    length: jax.Array,
    limit: jax.Array,
    drafting: jax.Array,
    settings: Settings,
    bias: jax.Array | None,
) -> Slots:
    """Give slots to `N` new requests; to the same one twice if it is named twice.

    Args:
        slots: donated.
        slot: `[N]`.
        prompt: `[N, S]`, of which `length` tokens are real.
        length: `[N]`.
        limit: `[N]`, the most tokens of prompt and answer.
        drafting: `[N]` bool.
        settings: how they sample, with an axis of requests before all others.
        bias: `[V]` for all of them, or None for none.
    """
    state = replace(
        slots.state,
        length=slots.state.length.at[slot].set(0),
        pending=slots.state.pending.at[slot].set(0),
        rope_delta=slots.state.rope_delta.at[slot].set(0),
    )
    return replace(
        slots,
        state=state,
        history=slots.history.at[slot].set(prompt),
        drafted=slots.drafted.at[slot].set(0),
        drafting=slots.drafting.at[slot].set(drafting),
        active=slots.active.at[slot].set(False),
        limit=slots.limit.at[slot].set(limit),
        sampler=sampling.set_slots(slots.sampler, slot, settings, bias, prompt, length),
    )


@partial(jax.jit, static_argnames=("plan", "top", "prompt_logprobs"), donate_argnames="slots")
def prefill_step(
    params: Params,
    slots: Slots,
    pieces: Pieces,
    tokens: jax.Array,
    following: jax.Array,
    masks: jax.Array,
    *,
    plan: Plan,
    top: int = 0,
    prompt_logprobs: bool = False,
) -> tuple[Slots, Prefilled]:
    """Run pieces of prompts; where one ends, sample a token and draft what follows.

    Args:
        params: the model's parameters.
        slots: donated.
        pieces: what is run.
        tokens: `[P, 64]`.
        following: `[P]`, the prompt's token after the piece, or -1 if the prompt ends in it.
        masks: `[P, ceil(V/32)]` uint32, what may be sampled after a prompt.
        plan: static.
        top: static, likeliest tokens to tell.
        prompt_logprobs: static, whether to score the prompts.
    """
    cfg, mode = plan.cfg, plan.decode_mode
    P = tokens.shape[0]
    each, last = jnp.arange(P), jnp.maximum(pieces.valid - 1, 0)
    done = (following < 0) & (pieces.valid > 0)
    positions = model.text_positions(pieces.start, CHUNK)
    x = model.embed(params, cfg, tokens)
    hidden, state = model.prefill(params, cfg, x, slots.state, pieces, positions, plan.prefill_mode)

    end = pieces.start + pieces.valid
    scores = known_logits(plan, params, hidden[each, last][:, None], mode)
    fed = tokens[each, last][:, None]
    tail = _tails(slots.history, pieces.slot, end - 1, fed)
    sampled = sample(
        scores,
        slots.sampler,
        pieces.slot,
        fed,
        tail,
        end[:, None],
        masks[:, None],
        top,
        _row_tile(),
        mode.impl("sampling"),
    )
    token = sampled.tokens[:, 0]
    ends = _ends(slots, pieces.slot, sampled.tokens, end[:, None])[:, 0]

    following = jnp.where(done, token, following)
    known = jnp.roll(tokens, -1, axis=1).at[each, last].set(following)
    scratch = slots.active.shape[0] - 1
    mine = jnp.where(done, pieces.slot, scratch)
    slots = replace(
        slots,
        state=state,
        history=slots.history.at[mine, end].set(token, mode="drop"),
        active=slots.active.at[mine].set(done & ~ends),
        sampler=sampling.count(slots.sampler, mine, token[:, None], done.astype(jnp.int32)),
    )
    place = Place(pieces.table, pieces.start, jnp.where(pieces.fresh, CHUNK, 0))
    slots = draft(
        plan, params, slots, mine, place, hidden, known, last, plan.drafts, plan.prefill_mode
    )

    told = None
    if prompt_logprobs:
        scores = known_logits(plan, params, hidden, plan.prefill_mode)
        told = sampling.prompt_logprobs(scores, known, top, _row_tile())
    first = (token, sampled.logprobs[:, 0], sampled.top_tokens[:, 0], sampled.top_logprobs[:, 0])
    return slots, Prefilled(*first, told)


@partial(jax.jit, static_argnames=("plan", "drafts", "steps", "top"), donate_argnames="slots")
def decode_steps(
    params: Params, slots: Slots, rows: Rows, *, plan: Plan, drafts: int, steps: int, top: int = 0
) -> tuple[Slots, Committed]:
    """Several steps: verify the drafts, commit what holds and one token more, draft again.

    Args:
        params: the model's parameters.
        slots: donated.
        rows: which of them.
        plan: static.
        drafts: static, the most drafts to verify and to make.
        steps: static. Their number is fixed: a loop whose end depended on data would make the host
            wait at every turn.
        top: static, likeliest tokens to tell.
    """

    def step(slots: Slots, _: None) -> tuple[Slots, Committed]:
        slots, verified = _verify(params, plan, slots, rows, drafts, None)
        return _commit(params, plan, slots, rows, verified, None, drafts, top)

    if steps == 1:
        slots, out = step(slots, None)
        return slots, jax.tree.map(lambda a: a[None], out)
    return lax.scan(step, slots, None, length=steps)


@partial(jax.jit, static_argnames=("plan", "drafts"), donate_argnames="slots")
def verify_step(
    params: Params,
    slots: Slots,
    rows: Rows,
    given: tuple[jax.Array, jax.Array],
    *,
    plan: Plan,
    drafts: int,
) -> tuple[Slots, Verified]:
    """The model's part of a step, while the host still makes masks for the choice.

    Args:
        params: the model's parameters.
        slots: donated.
        rows: which of them.
        given: drafts `[b, drafts]` and their number `[b]`, instead of those that the device made;
            a number of -1 leaves those.
        plan: static.
        drafts: static, the most drafts to verify.
    """
    return _verify(params, plan, slots, rows, drafts, given)


@partial(jax.jit, static_argnames=("plan", "top"), donate_argnames="slots")
def commit_step(
    params: Params,
    slots: Slots,
    rows: Rows,
    verified: Verified,
    masks: jax.Array,
    *,
    plan: Plan,
    top: int = 0,
) -> tuple[Slots, Committed]:
    """The rest of a step: choose, commit and draft.

    Args:
        params: the model's parameters.
        slots: donated.
        rows: as in `verify_step`.
        verified: its result.
        masks: `[b, T, ceil(V/32)]` uint32, which tokens may be chosen.
        plan: static.
        top: static, likeliest tokens to tell.
    """
    slots, out = _commit(params, plan, slots, rows, verified, masks, plan.drafts, top)
    return slots, jax.tree.map(lambda a: a[None], out)


def _verify(
    params: Params,
    plan: Plan,
    slots: Slots,
    rows: Rows,
    drafts: int,
    given: tuple[jax.Array, jax.Array] | None,
) -> tuple[Slots, Verified]:
    cfg, mode, at = plan.cfg, plan.decode_mode, rows.slot
    proposed, drafted = slots.drafts[at, :drafts], jnp.minimum(slots.drafted[at], drafts)
    if given is not None:
        mine = given[1] >= 0
        proposed = jnp.where(mine[:, None], given[0], proposed)
        drafted = jnp.where(mine, given[1], drafted)
    newest = slots.history[at, slots.state.length[at]][:, None]
    tokens = jnp.concatenate([newest, proposed], axis=1)
    x = model.embed(params, cfg, tokens)
    hidden, state = model.decode(params, cfg, x, slots.state, rows, slots.active[at], mode)
    scores = known_logits(plan, params, hidden, mode)
    return replace(slots, state=state), Verified(tokens, drafted, hidden, scores)


def _commit(
    params: Params,
    plan: Plan,
    slots: Slots,
    rows: Rows,
    verified: Verified,
    masks: jax.Array | None,
    ahead: int,
    top: int,
) -> tuple[Slots, Committed]:
    """`ahead`: drafts to make for the next step."""
    at, mode = rows.slot, plan.decode_mode
    tokens, drafted, hidden, scores = verified
    T = tokens.shape[1]
    start, active = slots.state.length[at], slots.active[at]
    places = start[:, None] + 1 + jnp.arange(T)
    tail = _tails(slots.history, at, start, tokens)
    sampled = sample(
        scores,
        slots.sampler,
        at,
        tokens,
        tail,
        places,
        masks,
        top,
        _row_tile(),
        mode.impl("sampling"),
    )
    chosen = sampled.tokens

    held = (chosen[:, :-1] == tokens[:, 1:]) & (jnp.arange(T - 1) < drafted[:, None])
    count = 1 + jnp.sum(jnp.cumprod(held, axis=1), axis=1)
    ends = _ends(slots, at, chosen, places)
    # Tokens up to the first one that ends the answer.
    count = jnp.minimum(count, jnp.where(jnp.any(ends, 1), jnp.argmax(ends, 1) + 1, T))
    count = jnp.where(active, count, 0)
    ended = jnp.any(ends & (jnp.arange(T) < count[:, None]), axis=1)

    # Rows past the accepted ones hold guesses, which the next step overwrites.
    history = slots.history.at[at[:, None], places].set(chosen, mode="drop")
    slots = replace(
        slots,
        state=model.accept(slots.state, rows, count),
        history=history,
        active=slots.active.at[at].set(active & ~ended),
        sampler=sampling.count(slots.sampler, at, chosen, count),
    )
    place = Place(rows.table, start, jnp.where(active, T, 0))
    newest = jnp.maximum(count - 1, 0)
    slots = draft(plan, params, slots, at, place, hidden, chosen, newest, ahead, mode)
    drafted = jnp.where(active, drafted, 0)
    return slots, Committed(
        **sampled._asdict(),
        count=count,
        drafted=drafted,
        drafts=slots.drafts[at],
        proposed=slots.drafted[at],
    )


def _row_tile() -> int:
    """How many tokens are chosen together: a fixed number, else it would show in their bits."""
    return 1 if jax.default_backend() == "cpu" else 8


def _tails(history: jax.Array, slot: jax.Array, start: jax.Array, tokens: jax.Array) -> jax.Array:
    """The tokens before each choice, `[b, T, LENGTH-1]`; -1 before the beginning.

    Row `t` of `tokens [b, T]` stands at index `start + t`, and the choice after it.
    """
    T = tokens.shape[1]
    before = start[:, None] - (LENGTH - 2) + jnp.arange(LENGTH - 2)
    past = jnp.where(before >= 0, history[slot[:, None], jnp.maximum(before, 0)], -1)
    line = jnp.concatenate([past, tokens], axis=1)
    return jnp.stack([line[:, t : t + LENGTH - 1] for t in range(T)], axis=1)


def _ends(slots: Slots, at: jax.Array, tokens: jax.Array, places: jax.Array) -> jax.Array:
    """Which of the tokens `[b, T]` at these indices end an answer; the host finds the same."""
    stop = jnp.any(tokens[..., None] == slots.sampler.stops[at][:, None], axis=-1)
    stop &= places >= slots.sampler.earliest[at][:, None]
    return stop | (places + 1 >= slots.limit[at][:, None])

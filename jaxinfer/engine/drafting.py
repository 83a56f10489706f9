"""Proposing what comes next: copied from the text so far, or by the MTP head."""

from dataclasses import replace

import jax
import jax.numpy as jnp

from jaxinfer.engine.ngram import ngram_drafts
from jaxinfer.engine.slots import Plan, Slots
from jaxinfer.qwen import model
from jaxinfer.qwen.cache import Place
from jaxinfer.qwen.mode import Mode
from jaxinfer.qwen.params import Params
from jaxinfer.qwen.state import State
from pallas_kernels.likeliest import argmax_rows

AUTO_SUFFIX = 4
"""Shortest repeated suffix for which "auto" trusts the n-gram rather than the MTP head."""


def draft(
    plan: Plan,
    params: Params,
    slots: Slots,
    at: jax.Array,
    place: Place,
    hidden: jax.Array,
    following: jax.Array,
    newest: jax.Array,
    count: int,
    mode: Mode,
) -> Slots:
    """Propose what comes after the newest token of each sequence.

    Args:
        plan: static.
        params: the model's parameters.
        slots: history is up to date.
        at: `[b]`, slots that receive drafts.
        place: where the rows just run stand.
        hidden: `[b, T, D]`, of those rows.
        following: `[b, T]`, the token after each of them.
        newest: `[b]`, the row whose following token is the newest known.
        count: drafts to make.
        mode: that of the rows just run.
    """
    if plan.speculation is None:
        return slots
    b, room = at.shape[0], slots.drafts.shape[1]
    drafts, drafted = jnp.zeros((b, count), jnp.int32), jnp.zeros(b, jnp.int32)
    if plan.speculation != "ngram":
        drafts, state = _mtp_drafts(
            plan, params, slots.state, place, hidden, following, newest, count, mode
        )
        slots, drafted = replace(slots, state=state), jnp.full(b, count, jnp.int32)
    if plan.speculation != "mtp" and count:
        length = place.start + newest + 2

        def look(slot: jax.Array, length: jax.Array) -> tuple[jax.Array, ...]:
            return ngram_drafts(slots.history[slot], length, count)

        copied, found, suffix = jax.vmap(look)(at, length)
        trusted = AUTO_SUFFIX if plan.speculation == "auto" else 1
        copy = (suffix >= trusted) & (found > 0)
        drafts = jnp.where(copy[:, None], copied, drafts)
        drafted = jnp.where(copy, found, drafted)
    drafted = jnp.where(slots.active[at] & slots.drafting[at], drafted, 0)
    return replace(
        slots,
        drafts=slots.drafts.at[at].set(jnp.pad(drafts, ((0, 0), (0, room - count)))),
        drafted=slots.drafted.at[at].set(drafted),
    )


def _mtp_drafts(
    plan: Plan,
    params: Params,
    state: State,
    place: Place,
    hidden: jax.Array,
    following: jax.Array,
    newest: jax.Array,
    count: int,
    mode: Mode,
) -> tuple[jax.Array, State]:
    """Greedy drafts `[b, count]` of the MTP head, whose pages are filled for the rows first."""
    cfg, (b, T) = plan.cfg, hidden.shape[:2]
    rows = plan.decode_mode
    x = model.embed(params, cfg, following)
    # The rotary position of a text token is its index; after pictures it is `rope_delta` more.
    positions = model.text_positions(place.start, T)
    ahead, state = model.draft(params, cfg, x, hidden, state, place, positions, mode)
    h = ahead[jnp.arange(b), newest][:, None]
    real = jnp.where(place.valid > 0, 1, 0)
    drafts = []
    for step in range(count):
        if step:
            x = model.embed(params, cfg, drafts[-1])
            one = Place(place.table, place.start + newest + step, real)
            positions = model.text_positions(one.start, 1)
            h, state = model.draft(params, cfg, x, h, state, one, positions, rows)
        scores = known_logits(plan, params, h, rows)[:, 0]
        drafts.append(argmax_rows(scores, impl=rows.impl("sampling"))[:, None])
    return jnp.concatenate([*drafts, jnp.zeros((b, 0), jnp.int32)], axis=1), state


def known_logits(plan: Plan, params: Params, hidden: jax.Array, mode: Mode) -> jax.Array:
    """Logits `[B, T, V]`, minus infinity where an id stands for nothing."""
    scores = model.logits(params, hidden, mode)
    if plan.vocabulary is None:
        return scores
    return scores.at[..., plan.vocabulary :].set(-jnp.inf)

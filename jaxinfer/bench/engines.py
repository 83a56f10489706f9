"""Engines for measuring: only what is measured is compiled, and prompts can be taken as read."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp

from jaxinfer.bench.subjects import Subject
from jaxinfer.engine.calls import Calls
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.options import Options
from jaxinfer.engine.slots import FORCED, Plan, Slots
from jaxinfer.engine.steps import Prefilled
from jaxinfer.qwen.config import CHUNK
from jaxinfer.qwen.mode import FAMILIES, usable_kernels
from jaxinfer.qwen.params import Params
from jaxinfer.qwen.state import Pieces, State

PREFILL_TOKENS = 128 * CHUNK
"""Tokens of a prompt in one call while nobody waits, as engines on a GPU have it."""


def known_families(text: str | None) -> frozenset[str] | None:
    """Families from their names with commas between; "none" is none, None leaves it to the engine.

    Raises ValueError for a family that does not exist.
    """
    if text is None:
        return None
    names = frozenset(() if text == "none" else (name.strip() for name in text.split(",")))
    if unknown := names - set(FAMILIES):
        raise ValueError(f"no family of kernels {sorted(unknown)}; there are {', '.join(FAMILIES)}")
    return names


def make_plan(
    subject: Subject, speculation: str | None, drafts: int, kernels: frozenset[str] | None
) -> Plan:
    """The static part of an engine's steps.

    Args:
        subject: the model.
        speculation: None, or where drafts come from.
        drafts: verified in every step.
        kernels: families that use kernels; None for all that can.

    Raises ValueError for a family that cannot be used on this device.
    """
    backend = jax.default_backend()
    usable = usable_kernels(subject.cfg, backend)
    if kernels is not None and kernels - usable:
        raise ValueError(
            f"kernels for {', '.join(sorted(kernels - usable))} cannot be used for a model in "
            f"{subject.cfg.dtype} on a {backend}; leave --kernels out"
        )
    chosen = usable if kernels is None else kernels
    return Plan(subject.cfg, speculation, drafts, kernels=chosen)


def make_engine(
    subject: Subject,
    plan: Plan,
    *,
    streams: int,
    context: int,
    steps: int,
    calls: Calls | None = None,
    prefill_tokens: int = PREFILL_TOKENS,
) -> Engine:
    """An engine with one size of decode call and no prefix cache; nothing is compiled yet.

    Args:
        subject: the model.
        plan: how it decodes; all drafts are verified in every step.
        streams: requests that run together.
        context: tokens that a request may have.
        steps: decode steps a call.
        calls: what runs the steps; None for the usual.
        prefill_tokens: tokens of prompts that a call takes.
    """
    options = Options(
        slots=streams,
        context=context,
        # A page more for each, or the scheduler would keep the last ones waiting.
        pages=streams * (1 + -(-context // CHUNK)),
        snapshots=0,
        lengths=(plan.drafts,),
        verify_lengths=tuple(sorted({0, FORCED, plan.rows - 1})),
        batches=(streams,),
        steps=steps,
        prefill_budget=prefill_tokens,
        prefill_tokens=prefill_tokens,
        kv_dtype=None,
        prefix_cache=False,
        cache_bytes=None,
        snapshot_interval=CHUNK,
        page_bytes=0,
        snapshot_bytes=0,
        turn=None,
    )
    return Engine(subject.params, plan, subject.tokenizer, (), options, calls)


def standing_engine(
    subject: Subject, plan: Plan, *, streams: int, context: int, steps: int
) -> Engine:
    """The same, but that prompts of any length are in place at once: see `TakenAsRead`."""
    whole = streams * -(-context // CHUNK) * CHUNK
    calls = TakenAsRead(plan)
    return make_engine(
        subject,
        plan,
        streams=streams,
        context=context,
        steps=steps,
        calls=calls,
        prefill_tokens=whole,
    )


class TakenAsRead(Calls):
    """Calls that do not run prompts: they set the lengths, and leave noise as keys and state.

    What a decode step does, and what it costs, depends on how long sequences are, not on what was
    said. Long contexts can so be measured without the time, and the compilation, of a prefill.
    """

    def __init__(self, plan: Plan) -> None:
        super().__init__(plan)
        self._noisy = False

    def prefill(
        self,
        params: Params,
        slots: Slots,
        pieces: Pieces,
        tokens: jax.Array,
        following: jax.Array,
        masks: jax.Array,
        *,
        top: int,
        prompt_logprobs: bool,
    ) -> tuple[Slots, Prefilled]:
        """As `prefill_step`, without the model."""
        if not self._noisy:
            slots, self._noisy = replace(slots, state=_noise(slots.state)), True
        return _take_as_read(slots, pieces, tokens, following, self.plan.cfg.vocab_size)

    def forget(self) -> None:
        """Have the next prompt find the noise again that the first one found."""
        self._noisy = False


@jax.jit
def _noise(state: State) -> State:
    """Small random numbers in all pools: zeros would be cheaper to multiply than what is real."""

    def fill(leaf: jax.Array) -> jax.Array:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        # The same in every layer, page and slot: where they lie matters, not what they hold.
        small = 0.1 * jax.random.normal(jax.random.key(0), leaf.shape[2:])
        return jnp.broadcast_to(small.astype(leaf.dtype), leaf.shape)

    return jax.tree.map(fill, state)


@partial(jax.jit, static_argnums=4, donate_argnums=0)
def _take_as_read(
    slots: Slots, pieces: Pieces, tokens: jax.Array, following: jax.Array, vocabulary: int
) -> tuple[Slots, Prefilled]:
    end = pieces.start + pieces.valid
    done = (following < 0) & (pieces.valid > 0)
    last = jnp.take_along_axis(tokens, jnp.maximum(pieces.valid - 1, 0)[:, None], axis=1)[:, 0]
    token = (end + last * 7919) % vocabulary
    mine = jnp.where(done, pieces.slot, slots.active.shape[0] - 1)
    length = slots.state.length.at[pieces.slot].set(0).at[pieces.slot].max(end)
    slots = replace(
        slots,
        state=replace(slots.state, length=length),
        history=slots.history.at[mine, end].set(token, mode="drop"),
        active=slots.active.at[mine].set(done),
    )
    none = jnp.zeros((len(token), 0))
    return slots, Prefilled(token, jnp.zeros(len(token)), none.astype(jnp.int32), none, None)

"""What an engine keeps on the device for the requests in flight."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxinfer.engine.sampling import Sampler, init_sampler
from jaxinfer.qwen.config import Config
from jaxinfer.qwen.mode import Mode, decode_mode, prefill_mode
from jaxinfer.qwen.state import State, init_state

SPECULATIONS = ("ngram", "mtp", "auto")
FORCED = 3
"""Tokens that a grammar forces and that are committed together, if no more are drafted anyway."""


@dataclass(frozen=True)
class Plan:
    """What is static about an engine's steps.

    Attributes:
        cfg: the model.
        speculation: None, or one of `SPECULATIONS`.
        drafts: the most tokens drafted a step (0 without speculation).
        vocabulary: ids that stand for something; the rest only pads the logits and is never
            chosen. None for all.
        kernels: families of kernels to use, see `jaxinfer.qwen.mode.FAMILIES`.
    """

    cfg: Config
    speculation: str | None
    drafts: int
    vocabulary: int | None = None
    kernels: frozenset[str] = frozenset()

    @property
    def prefill_mode(self) -> Mode:
        """How pieces of prompts are computed."""
        return prefill_mode(self.kernels)

    @property
    def decode_mode(self) -> Mode:
        """How rows of decode and verify steps are computed."""
        return decode_mode(self.kernels)

    @property
    def rows(self) -> int:
        """The most rows of a sequence in a decode step."""
        return 1 + max(self.drafts, FORCED)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """All requests in flight; `B` slots, the last of which is scratch.

    Attributes:
        state: the model's.
        history: `[B, S]` int32, tokens known so far; the newest is not in `state` yet.
        drafts: `[B, K]` int32, proposed continuation of `history`.
        drafted: `[B]` int32, how many of them count.
        drafting: `[B]` bool, whether drafts are wanted.
        active: `[B]` bool, slots that decode.
        limit: `[B]` int32, the most tokens that the sequence may have.
        sampler: how each slot samples.
    """

    state: State
    history: jax.Array
    drafts: jax.Array
    drafted: jax.Array
    drafting: jax.Array
    active: jax.Array
    limit: jax.Array
    sampler: Sampler


def init_slots(
    plan: Plan,
    slots: int,
    context: int,
    pages: int,
    snapshots: int = 0,
    kv_dtype: str | None = None,
) -> Slots:
    """Empty slots, for sequences of up to `context` tokens; see `init_state` for the rest."""
    B = slots + 1
    return Slots(
        state=init_state(plan.cfg, slots, pages, plan.rows, snapshots, kv_dtype),
        history=jnp.zeros((B, context + plan.rows), jnp.int32),
        drafts=jnp.zeros((B, plan.rows - 1), jnp.int32),
        drafted=jnp.zeros(B, jnp.int32),
        drafting=jnp.zeros(B, bool),
        active=jnp.zeros(B, bool),
        limit=jnp.zeros(B, jnp.int32),
        sampler=init_sampler(B, plan.cfg.vocab_size),
    )

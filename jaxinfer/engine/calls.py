"""The compiled calls of an engine: each shape is compiled once, when it is first needed."""

from collections.abc import Callable
from typing import Any

import jax

from jaxinfer.engine.slots import Plan, Slots
from jaxinfer.engine.steps import (
    Committed,
    Prefilled,
    Verified,
    commit_step,
    decode_steps,
    prefill_step,
    verify_step,
)
from jaxinfer.qwen.params import Params
from jaxinfer.qwen.state import Pieces, Rows

LONG = 32
"""Pieces of prompts from which on a prefill call's kernels are launched one by one.

They take longer than their launches, so the device never waits; and nothing waits for a graph to be
brought up to date first, which takes some milliseconds."""

ONE_BY_ONE = {"xla_gpu_graph_min_graph_size": 10**6}
"""XLA's option for that: no run of launches is long enough for a graph."""

_compiled: dict[tuple, jax.stages.Compiled] = {}
"""Of all engines of this process: those with the same plan and shapes share their code."""


class Calls:
    """Runs steps by executables that it keeps.

    Attributes:
        plan: what is static about them.
        made: how many executables it has had to look up or compile so far.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._own: dict[tuple, jax.stages.Compiled] = {}

    @property
    def made(self) -> int:
        """How many shapes it has met."""
        return len(self._own)

    @property
    def workspace(self) -> int:
        """The most bytes of device memory that one of them needs besides its arguments."""
        sizes = (c.memory_analysis() for c in self._own.values())
        return max((s.temp_size_in_bytes for s in sizes if s is not None), default=0)

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
        """See `prefill_step`."""
        args = (params, slots, pieces, tokens, following, masks)
        static = {"plan": self.plan, "top": top, "prompt_logprobs": prompt_logprobs}
        return self._get(prefill_step, tokens.shape, args, static)(*args)

    def decode(
        self, params: Params, slots: Slots, rows: Rows, *, drafts: int, steps: int, top: int
    ) -> tuple[Slots, Committed]:
        """See `decode_steps`."""
        args = (params, slots, rows)
        static = {"plan": self.plan, "drafts": drafts, "steps": steps, "top": top}
        return self._get(decode_steps, rows.slot.shape, args, static)(*args)

    def verify(
        self,
        params: Params,
        slots: Slots,
        rows: Rows,
        given: tuple[jax.Array, jax.Array],
        *,
        drafts: int,
    ) -> tuple[Slots, Verified]:
        """See `verify_step`."""
        args = (params, slots, rows, given)
        static = {"plan": self.plan, "drafts": drafts}
        return self._get(verify_step, rows.slot.shape, args, static)(*args)

    def commit(
        self,
        params: Params,
        slots: Slots,
        rows: Rows,
        verified: Verified,
        masks: jax.Array,
        *,
        top: int,
    ) -> tuple[Slots, Committed]:
        """See `commit_step`."""
        args = (params, slots, rows, verified, masks)
        static = {"plan": self.plan, "top": top}
        return self._get(commit_step, masks.shape, args, static)(*args)

    def compile(self, step: Callable[..., Any], shape: tuple, args: tuple, **static: Any) -> None:
        """Compile a step ahead of its first call, for arguments or their shapes.

        Args:
            step: one of the functions in `steps`.
            shape: that of the argument whose shape varies, see the methods above.
            args: arrays, or `jax.ShapeDtypeStruct`s of them.
            static: the static arguments besides the plan.
        """
        self._get(step, shape, args, {"plan": self.plan, **static})

    def _get(
        self, step: Callable[..., Any], shape: tuple, args: tuple, static: dict[str, Any]
    ) -> jax.stages.Compiled:
        # The few things that vary from call to call; all else is the same for all of an engine's.
        key = (step, shape, *static.values())
        if key not in self._own:
            leaves, tree = jax.tree.flatten(args)
            long = (*key, tree, *((leaf.shape, leaf.dtype) for leaf in leaves))
            if long not in _compiled:
                launched = step is prefill_step and shape[0] >= LONG
                options = ONE_BY_ONE if launched else None
                _compiled[long] = step.lower(*args, **static).compile(options)
            self._own[key] = _compiled[long]
        return self._own[key]

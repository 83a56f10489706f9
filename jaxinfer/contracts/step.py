"""The decode step as a whole, at full size, as an engine on an H200 would run it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.contracts import h200
from jaxinfer.contracts.compiled import copied
from jaxinfer.engine.memory import shapes as slot_shapes
from jaxinfer.engine.slots import Plan
from jaxinfer.engine.steps import decode_steps
from jaxinfer.qwen.config import CHUNK, Config
from jaxinfer.qwen.mode import usable_kernels
from jaxinfer.qwen.params import nvidia_mix, shapes
from jaxinfer.qwen.published import RAW
from jaxinfer.qwen.state import Rows

NAME = "decode_step"
PAGES, CONTEXT = 2048, 4096


def decode(
    rows: int, drafts: int = 0, layers: int | None = None
) -> tuple[Callable[..., Any], tuple[Any, Any, Rows]]:
    """A step, and the shapes of its arguments: parameters, slots (to be donated), rows.

    Args:
        rows: sequences.
        drafts: tokens of the MTP head that are verified, and drafted, in the step.
        layers: of the model; None for all.
    """
    cfg = replace(Config.from_dict(RAW), vision=None)
    if layers is not None:
        cfg = replace(cfg, layer_types=cfg.layer_types[:layers])
    plan = Plan(cfg, "mtp" if drafts else None, drafts, kernels=usable_kernels(cfg, "gpu"))
    slots = slot_shapes(plan, rows, CONTEXT, PAGES, 0, None)
    number: Any = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    which = Rows(number((rows, CONTEXT // CHUNK)), number((rows,)))
    step = partial(decode_steps, plan=plan, drafts=drafts, steps=1)
    return step, (shapes(cfg, nvidia_mix), slots, which)


def compiles(rows: int, drafts: int = 0, layers: int | None = None) -> h200.Program:
    """Compile it for an H200: the whole state stays in place, and no weight is copied.

    Raises:
        AssertionError: it is not so.
    """
    step, arguments = decode(rows, drafts, layers)
    program = h200.compile(step, *arguments, donate=(1,), kernels=False)
    state = sum(prod(a.shape) * a.dtype.itemsize for a in jax.tree.leaves(arguments[1]))
    assert program.aliased == state, f"{program.aliased} of {state} bytes of state are in place"
    copies = copied(program, jax.tree.leaves(arguments[0]))
    assert not copies, f"copies weights: {', '.join(f'{m.name} {m.shape}' for m in copies)}"
    return program

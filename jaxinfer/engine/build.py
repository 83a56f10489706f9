"""An engine that fits its device."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import ShapeDtypeStruct
from tokenizers import Tokenizer

from jaxinfer.engine.calls import Calls
from jaxinfer.engine.engine import Engine
from jaxinfer.engine.memory import Pools, device_memory, fit, shapes
from jaxinfer.engine.options import Options
from jaxinfer.engine.slots import FORCED, Plan
from jaxinfer.engine.steps import decode_steps, prefill_step
from jaxinfer.qwen.config import CHUNK
from jaxinfer.qwen.params import Params
from jaxinfer.qwen.state import Pieces, Rows

KV_DTYPES = {None: None, "bf16": "bfloat16", "fp8": "float8_e4m3fn"}
WORKSPACE = 2**30
"""Bytes for compiled steps, until it is known what they need."""
PIECES = 128
"""Of 64 tokens, the most that a GPU prefills in a call while nobody waits: 64 rows an expert fill
tensor cores badly, 256 do well. Every doubling is a call more to compile."""


def build_engine(
    params: Params,
    plan: Plan,
    tokenizer: Tokenizer,
    eos: Sequence[int],
    *,
    slots: int,
    context: int,
    kv_dtype: str | None = None,
    prefix_cache: bool = True,
    cache_bytes: int | None = None,
    memory_fraction: float | None = None,
    pages: int | None = None,
    snapshots: int | None = None,
    snapshot_interval: int = 512,
    steps: int | None = None,
    lengths: Sequence[int] | None = None,
    batches: Sequence[int] | None = None,
    prefill_budget: int | None = None,
    turn: int | None = None,
) -> Engine:
    """Make an engine; see `Options` for what is not said here.

    What is None is chosen: sizes by the memory of the device and what the compiled steps take of
    it, the rest by what pays on such a device.

    Args:
        params: on the device.
        plan: static properties of the steps.
        tokenizer: the checkpoint's.
        eos: ids that end an answer.
        slots: requests that run together.
        context: tokens of the longest request.
        kv_dtype: "bf16" or "fp8"; None for the model's own type.
        prefix_cache: whether prompts share their beginnings.
        cache_bytes: the most bytes that the cache keeps of what nobody uses.
        memory_fraction: the part of the device's memory to use.
        pages: in the pool.
        snapshots: in the pool.
        snapshot_interval: tokens.
        steps: decode steps a call.
        lengths: numbers of drafts to choose from.
        batches: numbers of rows to compile for.
        prefill_budget: tokens that a call may prefill while others decode.
        turn: token with which a message begins.

    Raises:
        TooSmallError: the device's memory does not do.
    """
    device = jax.devices()[0]
    on_host = device_memory(device) is None
    if steps is None:
        steps = 1 if on_host else 4
    if lengths is None:
        # On a CPU every length is another compilation, and a row costs as much as a step.
        lengths = (plan.drafts,) if on_host else range(min(1, plan.drafts), plan.drafts + 1)
    if batches is None:
        batches = (1, slots) if on_host else [2**i for i in range(slots.bit_length())]
    if prefill_budget is None:
        prefill_budget = 2 * CHUNK if on_host else 128 * CHUNK
    pieces = 2 if on_host else min(PIECES, slots * -(-context // CHUNK))

    def choose(workspace: int) -> tuple[Options, Pools]:
        pools = fit(
            plan,
            device,
            slots=slots,
            context=context,
            kv_dtype=KV_DTYPES[kv_dtype],
            prefix_cache=prefix_cache,
            workspace=workspace,
            fraction=memory_fraction,
            pages=pages,
            snapshots=snapshots,
        )
        options = Options(
            slots=slots,
            context=context,
            pages=pools.pages,
            snapshots=pools.snapshots,
            lengths=tuple(lengths),
            verify_lengths=tuple(sorted({0, FORCED, plan.rows - 1})),
            batches=tuple(sorted({*batches, slots})),
            steps=steps,
            prefill_budget=prefill_budget,
            prefill_tokens=max(prefill_budget, pieces * CHUNK),
            kv_dtype=KV_DTYPES[kv_dtype],
            prefix_cache=prefix_cache,
            cache_bytes=cache_bytes,
            snapshot_interval=snapshot_interval,
            page_bytes=pools.page_bytes,
            snapshot_bytes=pools.snapshot_bytes,
            turn=turn,
        )
        return options, pools

    options, _ = choose(WORKSPACE)
    calls = Calls(plan)
    if not on_host:
        compile_largest(calls, params, options)
        if calls.workspace > WORKSPACE:
            options, _ = choose(calls.workspace)
            calls = Calls(plan)
            compile_largest(calls, params, options)
    return Engine(params, plan, tokenizer, eos, options, calls)


def compile_largest(calls: Calls, params: Params, options: Options) -> None:
    """Compile the calls that need most memory, before there are pools."""
    plan = calls.plan
    slots = shapes(
        plan, options.slots, options.context, options.pages, options.snapshots, options.kv_dtype
    )

    def array(*shape: int, dtype: str = "int32") -> Any:
        return ShapeDtypeStruct(shape, jnp.dtype(dtype))

    b, P = options.slots, options.piece_sizes[-1]
    rows = Rows(array(b, options.width), array(b))
    calls.compile(
        decode_steps,
        (b,),
        (params, slots, rows),
        drafts=options.lengths[-1],
        steps=options.steps,
        top=0,
    )
    pieces = Pieces(
        table=array(P, options.width),
        slot=array(P),
        start=array(P),
        valid=array(P),
        source=array(P),
        snapshot=array(P),
        fresh=array(P, dtype="bool"),
    )
    masks = array(P, -(-plan.cfg.vocab_size // 32), dtype="uint32")
    args = (params, slots, pieces, array(P, CHUNK), array(P), masks)
    calls.compile(prefill_step, (P, CHUNK), args, top=0, prompt_logprobs=False)

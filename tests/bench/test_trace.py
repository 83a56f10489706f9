from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.bench.trace import break_down, family, kernels, record

Event = dict[str, Any]


def named(kind: str, name: str, pid: int, tid: int | None = None) -> Event:
    lane = {} if tid is None else {"tid": tid}
    return {"ph": "M", "name": kind, "pid": pid, **lane, "args": {"name": name}}


def ran(name: str, start: float, duration: float, pid: int = 1, tid: int = 14) -> Event:
    return {"ph": "X", "name": name, "ts": start, "dur": duration, "pid": pid, "tid": tid}


GPU = [
    named("process_name", "/device:GPU:0", 1),
    named("process_name", "/host:CPU", 2),
    named("thread_name", "Stream #14(Compute)", 1, 14),
    named("thread_name", "XLA Ops", 1, 15),
    named("thread_name", "python", 2, 3),
]


def test_only_what_runs_in_a_stream_of_the_gpu_is_a_kernel() -> None:
    events = [*GPU, ran("b", 20, 5), ran("a", 10, 5), ran("op", 10, 5, 1, 15), ran("c", 1, 9, 2, 3)]
    assert [kernel.name for kernel in kernels(events)] == ["a", "b"]


def test_times_are_added_up_by_family_and_by_name_without_numbers() -> None:
    events = [
        *GPU,
        ran("delta_step_1", 0, 4),
        ran("delta_step_2", 6, 2),
        ran("loop_add_fusion.7", 8, 1),
        ran("memcpy32", 8.5, 2.5),
    ]
    made = break_down(kernels(events), steps=2)
    assert made.families == {"delta": 3.0, "copies": 1.25, "XLA's fusions": 0.5}
    assert made.names["delta_step"] == (3.0, 1.0)
    # From 4 to 6 nothing runs; from 8.5 to 9 two things do.
    assert made.gaps == 1.0
    assert made.busy == 4.5


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("expert_inner", "experts"),
        ("weighted_sum", "experts"),
        ("matmul_8256x2048", "projection"),
        ("project", "projection"),
        ("paged_attention_sum", "attention"),
        ("rotary_cache", "attention"),
        ("delta_settle", "delta"),
        ("argmax_parts", "sampling"),
        ("sampling_settle", "sampling"),
        ("gemm_fusion_dot_12", "matrix products of libraries"),
        ("input_convert_reduce_fusion", "XLA's fusions"),
        ("MemcpyD2D", "copies"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16", "attention"),
        ("sm90_xmma_fprop_implicit_gemm_bf16bf16_f32", "convolutions"),
        ("nvjet_tst_192x192_64x4", "matrix products of libraries"),
        ("causal_conv1d", "delta"),
        ("something_else", "other"),
    ],
)
def test_a_family_is_told_by_the_name(name: str, kind: str) -> None:
    assert family(name) == kind


def test_a_trace_without_kernels_is_an_error() -> None:
    with pytest.raises(ValueError, match="no kernels"):
        break_down(kernels(GPU), steps=1)


def test_the_profiler_of_this_jax_writes_what_is_read() -> None:
    step = jax.jit(lambda a: jnp.sin(a @ a) @ a)
    a = jnp.ones((256, 256))
    jax.block_until_ready(step(a))
    made = break_down(record(lambda: jax.block_until_ready(step(a))), steps=1)
    assert made.busy > 0

"""Reading what XLA tells of a program for an H200."""

import jax
import jax.numpy as jnp
import pytest

from jaxinfer.contracts import bench, h200
from jaxinfer.contracts.checks import Subject
from jaxinfer.contracts.compiled import compiles, copied
from jaxinfer.contracts.contract import Candidate
from jaxinfer.contracts.registry import CONTRACTS
from pallas_kernels.backend import triton_call
from tests.contracts.test_checks import contract

pytestmark = pytest.mark.skipif(bool(h200.missing()), reason=h200.missing())

STACK = jax.ShapeDtypeStruct((4, 256, 256), jnp.bfloat16)
ROW = jax.ShapeDtypeStruct((1, 256), jnp.bfloat16)


def test_a_copied_layer_is_seen() -> None:
    """A slice in front of a kernel, the classic."""

    def double(x, out):
        out[...] = x[...] * 2

    def copies(stack: jax.Array) -> jax.Array:
        layer = stack[2]
        shape = jax.ShapeDtypeStruct(layer.shape, layer.dtype)
        return triton_call(
            double, layer, grid=(1,), out_shape=shape, impl="kernel", name="double", warps=32
        )

    program = h200.compile(copies, STACK, kernels=False)
    assert copied(program, [STACK])


def test_launches_registers_and_code_are_told() -> None:
    program = h200.compile(lambda x, w: jnp.tanh(x @ w[1].T), ROW, STACK)
    assert [launch.kind for launch in program.launches].count("kCustomKernel") >= 1
    assert all(kernel.registers > 0 and not kernel.spilled for kernel in program.kernels)
    assert ".visible .entry" in program.kernels[0].ptx
    assert not copied(program, [STACK])


def test_loops_are_told_from_what_runs_once() -> None:
    def loop(x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 3, lambda _, x: jnp.sort(x), x)

    depths = {launch.kind: launch.depth for launch in h200.compile(loop, ROW).launches}
    assert depths["kWhile"] == 0
    assert depths["kCustomKernel"] == 1


def test_what_is_not_in_place_is_found() -> None:
    def by_copying(x, pool, slot, *, impl, layer):
        pool = pool.at[layer, slot].add(x)
        return pool[layer, slot], jnp.flip(jnp.flip(pool, 0) * 2.0, 0)

    sizes = {"L": 4, "R": 1, "B": 64, "D": 4096}
    broken = contract(lambda *a: a, candidates={"copying": Candidate(by_copying)})
    compiles(Subject(CONTRACTS["linear_dense"], "xla", {"R": 1, "N": 64, "K": 64, "L": 2}, "plain"))
    with pytest.raises(AssertionError, match="copies"):
        compiles(Subject(broken, "copying", sizes, "plain"))


def test_a_benchmark_calls_each_time_what_it_times() -> None:
    """XLA neither leaves a call out nor takes two for the same."""
    linear, sets = CONTRACTS["linear_fp8"], 3
    sizes = {"R": 1, "N": 512, "K": 512, "L": 1}
    subject = Subject(linear, "xla", sizes, "plain")
    arguments = bench.split(linear, [linear.shaped(sizes)] * sets)
    calls = h200.compile(bench.chain(linear, bench.calling(subject), 5), *arguments, donate=(0,))
    links = h200.compile(bench.chain(linear, None, 5), *arguments, donate=(0,))
    extra = [len([la for la in p.launches if la.depth == 1]) for p in (calls, links)]
    once = h200.compile(bench.calling(subject), *linear.shaped(sizes))
    assert extra[0] - extra[1] >= sets * len(once.launches)
    assert not calls.moved(512 * 512)

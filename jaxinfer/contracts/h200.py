"""Compiling for an H200 on a machine that has none, and reading what came of it.

With the CUDA plugin of JAX installed (`jax-cuda13-plugin`, `jax-cuda13-pjrt`) and `JAX_PLATFORMS`
set to `cpu`, XLA's own compiler for GPUs runs without one. It does not try out matmul algorithms,
so that its programs tell of launches, copies and registers, and not of speed.
"""

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import jax
import numpy as np
from jax._src.cudnn import fused_attention_stablehlo
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

_TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 62914560
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 }
device_description_str: "NVIDIA H200"
"""


@dataclass(frozen=True)
class Kernel:
    """A kernel's machine code.

    Attributes:
        name: its entry.
        registers: a thread.
        spilled: bytes that a thread moves between registers and memory for want of registers.
        ptx: its code.
    """

    name: str
    registers: int
    spilled: int
    ptx: str


@dataclass(frozen=True)
class Launch:
    """A thing that the program has the GPU do.

    Attributes:
        kind: as XLA names it, `kCustomKernel`, `kCopy`, `kWhile`.
        name: of the kernel or the operation.
        depth: 0 for what runs once, more inside of loops and branches.
    """

    kind: str
    name: str
    depth: int


@dataclass(frozen=True)
class Moved:
    """An instruction that gives a buffer another place or form and computes nothing."""

    name: str
    operation: str
    shape: str
    bytes: int


@dataclass(frozen=True)
class Program:
    """A compiled program.

    Attributes:
        hlo: after all of XLA's passes.
        launches: in order.
        kernels: the kernels, if they were asked for.
        aliased: bytes of arguments whose memory the results take.
        temporary: bytes it needs besides arguments and results.
    """

    hlo: str
    launches: tuple[Launch, ...]
    kernels: tuple[Kernel, ...]
    aliased: int
    temporary: int

    @property
    def loops(self) -> int:
        """Loops and branches, which the host launches turn by turn."""
        return sum(launch.kind in ("kWhile", "kConditional") for launch in self.launches)

    def moved(self, at_least: int) -> list[Moved]:
        """Copies of buffers of so many bytes and more."""
        return [move for move in _moves(self.hlo) if move.bytes >= at_least]


def missing() -> str:
    """What this machine lacks, or nothing."""
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        return "jax-cuda13-plugin is not installed"
    if ptxas() is None:
        return "there is no ptxas; it comes with CUDA, or with nvidia-cuda-nvcc"
    if jax.default_backend() != "cpu":
        return "JAX_PLATFORMS is not cpu"
    return ""


def ptxas() -> str | None:
    """NVIDIA's assembler: from the PATH, or from the package `nvidia-cuda-nvcc`."""
    nvidia = importlib.util.find_spec("nvidia")
    for place in (nvidia.submodule_search_locations or []) if nvidia else []:
        for found in Path(place).glob("*/bin/ptxas"):
            return str(found)
    return shutil.which("ptxas")


def compile(
    function: Callable[..., Any],
    *arguments: Any,
    donate: tuple[int, ...] = (),
    kernels: bool = True,
    options: Mapping[str, Any] | None = None,
) -> Program:
    """Compile a function for an H200.

    Args:
        function: of arrays; may be jitted.
        arguments: pytrees of arrays or `jax.ShapeDtypeStruct`s.
        donate: positions of those whose memory the results may take.
        kernels: whether to assemble every kernel once more and tell of its registers.
        options: of XLA's.
    """
    topology = topologies.get_topology_desc(
        platform="cuda", topology="1x1x1", target_config=_TARGET
    )
    mesh = Mesh(np.array(topology.devices[:1]), ("x",))
    there = NamedSharding(mesh, PartitionSpec())
    shaped = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=there), arguments
    )
    with TemporaryDirectory() as directory, jax.set_mesh(mesh), _settings():
        # What asks where it runs, or for which cuDNN, is to be told so.
        with (
            patch.object(jax, "default_backend", lambda: "gpu"),
            patch.object(fused_attention_stablehlo, "check_cudnn_version", lambda: 91200),
            patch.object(fused_attention_stablehlo, "check_compute_capability", lambda _: True),
        ):
            lowered = jax.jit(function, donate_argnums=donate).lower(*shaped)
        dump = {"xla_dump_to": directory, "xla_dump_emitter_re": "ptx" if kernels else ""}
        compiled = lowered.compile(compiler_options={**dump, **(options or {})})
        files = Path(directory)
        (sequence,) = files.glob("*.thunk_sequence.txt")
        memory = compiled.memory_analysis()
        assert memory is not None
        return Program(
            hlo=compiled.as_text() or "",
            launches=_launches(sequence.read_text()),
            kernels=_assemble(sorted(files.glob("*.ptx"))) if kernels else (),
            aliased=memory.alias_size_in_bytes,
            temporary=memory.temp_size_in_bytes,
        )


@contextmanager
def _settings() -> Iterator[None]:
    """Nothing is stored: JAX's cache of compiled programs could not read these again. And all is
    optimised, whatever is done with programs for this machine."""
    wanted = {
        "jax_persistent_cache_min_compile_time_secs": float("inf"),
        "jax_disable_most_optimizations": False,
    }
    before = {name: jax.config.values[name] for name in wanted}
    try:
        for name, value in wanted.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


_CONTAINERS = {"kAsyncStart", "kAsyncDone", "kDynamicSliceFusion", "kSequential"}
"""What XLA lists beside the work that it contains."""


def _launches(sequence: str) -> tuple[Launch, ...]:
    found = []
    for line in sequence.splitlines():
        match = re.match(r"( *)\d+: (k\w+) +\[[^]]*\] *(\S*)", line)
        if match and match[2] not in _CONTAINERS:
            found.append(Launch(match[2], match[3], len(match[1]) // 4))
    return tuple(found)


def _assemble(files: list[Path]) -> tuple[Kernel, ...]:
    with ThreadPoolExecutor() as pool:
        return tuple(kernel for found in pool.map(_assemble_one, files) for kernel in found)


def _assemble_one(file: Path) -> list[Kernel]:
    command = [str(ptxas()), "-arch=sm_90a", "-v", str(file), "-o", "/dev/null"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"ptxas refuses {file.name}: {done.stderr.strip()}")
    ptx, kernels = file.read_text(), []
    for part in done.stderr.split("Compiling entry function '")[1:]:
        stores, loads = re.findall(r"(\d+) bytes spill (?:stores|loads)", part)[:2]
        registers = re.search(r"Used (\d+) registers", part)
        assert registers is not None
        spilled = int(stores) + int(loads)
        kernels.append(Kernel(part.split("'")[0], int(registers[1]), spilled, ptx))
    return kernels


_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%(\S+) = (\w+)\[([\d,]*)\]\S* ([\w-]+)\(")
_FUSED = re.compile(r" fusion\(.*calls=%([\w.-]+)")
_MOVES = {"copy", "copy-start", "transpose", "slice", "dynamic-slice", "gather", "concatenate"}


def _moves(hlo: str) -> list[Moved]:
    """Instructions that only move, among them fusions whose last step does."""
    roots: dict[str, str] = {}
    inside: set[str] = set()
    found: list[tuple[str, str, re.Match[str]]] = []
    computation = ""
    for line in hlo.splitlines():
        head = re.match(r"(?:ENTRY )?%(\S+) \(.*\{$", line)
        computation = head[1] if head else computation
        fused = _FUSED.search(line)
        if fused:
            inside.add(fused[1])
        instruction = _INSTRUCTION.match(line)
        if instruction:
            found.append((computation, fused[1] if fused else "", instruction))
            if line.lstrip().startswith("ROOT"):
                roots[computation] = instruction[4]
    moves = []
    for computation, fused, instruction in found:
        name, dtype, shape, operation = instruction.groups()
        operation = roots.get(fused, operation)
        if operation in _MOVES and computation not in inside:
            count = int(np.prod([int(n) for n in shape.split(",") if n]))
            moves.append(Moved(name, operation, f"{dtype}[{shape}]", count * _width(dtype)))
    return moves


def _width(dtype: str) -> int:
    """Bytes of an element of an HLO type; an eighth counts as one."""
    bits = re.search(r"\d+", dtype)
    return max(1, int(bits[0]) // 8) if bits else 1

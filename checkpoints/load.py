"""Loading: a checkpoint directory -> configuration and parameters on the device.

Headers decide everything before a tensor is read (`plan`). Then each stacked array is allocated on
the device once and filled piece by piece with donated updates, so that the host never holds more
than a few pieces, and every value is checked on its way through.
"""

import json
import logging
import time
from bisect import bisect_right
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from checkpoints.files import DTYPES, CheckpointError, TensorFiles
from checkpoints.formats import Quantization
from checkpoints.locate import MANIFEST
from checkpoints.plan import ArrayPlan, Piece, Plan, make_plan
from checkpoints.progress import OnProgress
from checkpoints.values import check
from jaxinfer.qwen.config import Config
from jaxinfer.qwen.params import Params

PIECE_BYTES = 128 * 2**20
"""Bytes that go to the device at a time; an array up to this size goes whole."""

READERS = 8
"""Threads that read and check."""

logger = logging.getLogger(__name__)


@dataclass
class LoadReport:
    """What a load did.

    Attributes:
        seconds: wall time a stage: "headers" (reading and planning), "read" (from the files, with
            checks), "device" (allocating, copying and waiting), or "restore" for the engine's
            own format.
        bytes_on_device: size of the parameters.
        tensors: number of tensors in the files.
        warnings: what the user should know; each was logged too.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    bytes_on_device: int = 0
    tensors: int = 0
    warnings: tuple[str, ...] = ()

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time of a `with` block to a stage."""
        start = time.perf_counter()
        try:
            yield
        finally:
            elapsed = time.perf_counter() - start
            self.seconds[stage] = self.seconds.get(stage, 0.0) + elapsed


def load(
    directory: str | Path,
    *,
    vision: bool = True,
    progress: OnProgress | None = None,
    report: LoadReport | None = None,
    piece_bytes: int = PIECE_BYTES,
) -> tuple[Config, Params]:
    """Load a checkpoint onto JAX's default device.

    Reads safetensors in any of the formats of `formats`, under any prefix, with experts fused or
    not; or the engine's own format, if the directory was written by `engine_format.save`.

    Args:
        directory: the checkpoint; see `resolve` for names.
        vision: False to leave the vision tower out.
        progress: called as bytes reach the device.
        report: filled in, if given.
        piece_bytes: host memory of one step of the transfer; about three are in use at a time.

    Returns the configuration of what was loaded (`mtp_layers` 0 or `vision` None where the files
    lack that part or it was left out) and the parameters.

    Raises CheckpointError naming tensor, file and remedy if the checkpoint is not sound,
    ConfigError or FileNotFoundError if its configuration is not.
    """
    directory = Path(directory)
    report = LoadReport() if report is None else report
    if (directory / MANIFEST).is_file():
        # Orbax takes more than a second to import: only for those who use it.
        from checkpoints import engine_format

        with report.timed("restore"):
            cfg, params = engine_format.load(directory, vision=vision)
        leaves = jax.tree.leaves(params)
        report.tensors, report.bytes_on_device = len(leaves), sum(a.nbytes for a in leaves)
        if progress is not None:
            progress(report.bytes_on_device, report.bytes_on_device)
        return cfg, params
    with report.timed("headers"):
        files = TensorFiles(directory)
        plan = make_plan(Config.read(directory), files.entries, quantization(directory), vision)
        report.tensors = len(files.entries)
        report.bytes_on_device = sum(a.nbytes for a in jax.tree.leaves(plan.arrays))
    with files:
        report.warnings = plan.warnings + _kv_scale_warnings(plan, files)
        for warning in report.warnings:
            logger.warning("%s: %s", directory, warning)
        with ThreadPoolExecutor(READERS) as pool:
            stream = _Stream(files, pool, report, progress, piece_bytes)
            params = jax.tree.map(stream.array, plan.arrays)
        with report.timed("device"):
            jax.block_until_ready(params)
    return plan.config, params


def quantization(directory: Path) -> Quantization:
    """What `config.json` and `hf_quant_config.json` of a directory say about formats."""
    config, hf_quant = (
        json.loads(path.read_text()) if (path := directory / name).is_file() else {}
        for name in ("config.json", "hf_quant_config.json")
    )
    return Quantization.from_dicts(config, hf_quant)


def _kv_scale_warnings(plan: Plan, files: TensorFiles) -> tuple[str, ...]:
    changed = [e for e in plan.kv_scales if np.any(files.read(e).astype(np.float32) != 1.0)]
    if not changed:
        return ()
    return (
        f"{len(changed)} scales for a quantised KV cache are not used, since the cache keeps the "
        f"model's own type (first: {changed[0]})",
    )


class _Stream:
    """Carries arrays from files to the device."""

    def __init__(
        self,
        files: TensorFiles,
        pool: ThreadPoolExecutor,
        report: LoadReport,
        progress: OnProgress | None,
        piece_bytes: int,
    ) -> None:
        self.files, self.pool, self.report = files, pool, report
        self.progress, self.piece_bytes = progress, piece_bytes
        self.done = 0

    def array(self, plan: ArrayPlan) -> jax.Array:
        """Fill one array."""
        starts = [0, *accumulate(piece.entry.size for piece in plan.pieces)]
        if plan.nbytes * plan.parts <= self.piece_bytes:
            flat = self._read(plan, starts, 0, starts[-1])
            if plan.parts > 1:
                flat = flat.reshape(-1, plan.parts).max(axis=1)
            with self.report.timed("device"):
                array = jax.device_put(flat.reshape(plan.shape))
            self._advance(plan.nbytes)
            return array
        width = plan.shape[-1]
        rows = starts[-1] // width
        step = _rows_a_piece(rows, width * plan.dtype.itemsize, self.piece_bytes)
        with self.report.timed("device"):
            array = jnp.zeros(plan.shape, plan.dtype)
        for row in range(0, rows, step):
            stop = min(row + step, rows)
            piece = self._read(plan, starts, row * width, stop * width).reshape(-1, width)
            with self.report.timed("device"):
                # Waiting for the piece before this one bounds the host memory in flight.
                array.block_until_ready()
                array = _put(array, jax.device_put(piece), row)
            self._advance(piece.nbytes)
        return array

    def _read(self, plan: ArrayPlan, starts: list[int], begin: int, end: int) -> np.ndarray:
        """Elements `begin:end` of the flattened array, checked."""
        with self.report.timed("read"):
            out = np.empty(end - begin, plan.dtype)
            first, last = bisect_right(starts, begin) - 1, bisect_right(starts, end - 1)
            batch = -(-(last - first) // READERS)

            def fill(batch_first: int) -> None:
                for i in range(batch_first, min(batch_first + batch, last)):
                    low, high = max(begin, starts[i]), min(end, starts[i + 1])
                    part = out[low - begin : high - begin]
                    self._fill(plan.pieces[i], low - starts[i], part, plan.holds)

            for _ in self.pool.map(fill, range(first, last, batch)):
                pass
            return out

    def _fill(self, piece: Piece, start: int, out: np.ndarray, holds: str) -> None:
        entry = piece.entry
        if DTYPES[entry.dtype] == out.dtype:
            self.files.read_into(entry, start, out)
        else:
            out[:] = self.files.read(entry, start, start + out.size).astype(out.dtype)
        problem = check(out, holds, start)
        if problem:
            raise CheckpointError(
                f"{entry} {problem}; the file is damaged or the quantiser failed: fetch it again "
                "or use another checkpoint"
            )
        if piece.divides:
            np.reciprocal(out, out=out)

    def _advance(self, nbytes: int) -> None:
        self.done += nbytes
        if self.progress is not None:
            self.progress(self.done, self.report.bytes_on_device)


def _rows_a_piece(rows: int, row_bytes: int, piece_bytes: int) -> int:
    """Rows of a piece: equal pieces if possible, because each size is compiled for."""
    fewest = -(-rows * row_bytes // piece_bytes)
    for count in range(fewest, min(2 * fewest, rows) + 1):
        if rows % count == 0:
            return rows // count
    return max(1, piece_bytes // row_bytes)


@partial(jax.jit, donate_argnums=0)
def _put(array: jax.Array, rows: jax.Array, first: Any) -> jax.Array:
    """`array` with its rows from `first` on replaced, in place; `rows`: `[n, last axis]`."""
    flat = array.reshape(-1, array.shape[-1])
    return lax.dynamic_update_slice(flat, rows, (first, 0)).reshape(array.shape)

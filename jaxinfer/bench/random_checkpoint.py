"""Write a full-size checkpoint of random numbers in a published layout.

    python -m jaxinfer.bench.random_checkpoint DIRECTORY

Names, types, shapes and bytes are those of nvidia/Qwen3.6-35B-A3B-NVFP4 (23.4 GB): what is needed
to try the reader, and the engine behind it, where the real weights cannot be had.
"""

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np

from checkpoints.files import DTYPES
from checkpoints.inventory import inventory, nbytes
from checkpoints.write import Output, ShardWriter
from jaxinfer.qwen.config import Config
from jaxinfer.qwen.params import nvidia_mix
from jaxinfer.qwen.published import RAW

POOL_BYTES = 64 << 20
SHARD_BYTES = 8 * 10**9


class RandomTensors:
    """Values of any type and size, cut from a pool of random bytes."""

    def __init__(self, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self._bytes = rng.integers(0, 256, POOL_BYTES, np.uint8)
        # Finite E4M3: exponent and mantissa below the code that means NaN.
        self._e4m3 = (self._bytes & 0x80) | (self._bytes & 0x7F) % 0x78
        normal = 0.02 * rng.standard_normal(POOL_BYTES // 8)
        self._bf16 = normal.astype(ml_dtypes.bfloat16)
        self._rng = rng

    def draw(self, output: Output) -> np.ndarray:
        """An array for one tensor; scales are chosen to make weights of about 0.02."""
        name, dtype = output.name, DTYPES[output.dtype]
        if output.dtype == "F32":
            value = 0.02 if name.endswith("input_scale") else 1e-4
            return np.full(output.shape, value, np.float32)
        if name.endswith(".weight_scale"):
            return np.full(output.shape, 64.0, dtype)
        pool = {"U8": self._bytes, "F8_E4M3": self._e4m3.view(ml_dtypes.float8_e4m3fn)}
        values = pool.get(output.dtype, self._bf16)
        size = int(np.prod(output.shape))
        start = int(self._rng.integers(len(values)))
        if start + size > len(values):
            values = np.resize(values, start + size)
        return values[start : start + size].reshape(output.shape)


def write(directory: Path, seed: int = 0) -> None:
    """Write the checkpoint and its `config.json` into a new directory."""
    directory.mkdir(parents=True)
    tensors = inventory(Config.from_dict(RAW), nvidia_mix)
    outputs = [Output(name, dtype, shape) for name, (dtype, shape) in tensors.items()]
    source = RandomTensors(seed)
    began = time.perf_counter()
    groups = [[output] for output in outputs]
    with ShardWriter(directory, groups, SHARD_BYTES) as writer, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda o: writer.write(o.name, source.draw(o)), outputs))
    (directory / "config.json").write_text(json.dumps(RAW, indent=2) + "\n")
    seconds = time.perf_counter() - began
    print(f"{len(outputs):,} tensors, {nbytes(tensors):,} bytes in {seconds:.0f} s", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    write(parser.parse_args().directory)


if __name__ == "__main__":
    main()

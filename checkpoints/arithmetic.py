"""The arithmetic of quantisation, bit for bit that of NVIDIA's ModelOpt with max calibration.

It is NumPy's and not XLA's because every quotient must be rounded as written: XLA rewrites a
division by a constant, and one by a product, into something that may differ in the last bit, and
that bit decides ties.
"""

import ml_dtypes
import numpy as np

from pallas_kernels.weights import FP8_MAX, NVFP4_BLOCK

E2M1_MAX = np.float32(6.0)
_E4M3_MAX = np.float32(FP8_MAX)
_SMALLEST_SCALE = np.float32(2.0**-117)
_SMALLEST_BLOCK_SCALE = np.float32(2.0**-9)
_MAGNITUDE = {2: np.uint16(0x7FFF), 4: np.uint32(0x7FFFFFFF)}
"""All bits but the sign, by bytes of the type."""
_SLICE = 2**16
"""Elements of one pass, so that its temporaries stay in the processor's cache."""


def amax(weights: np.ndarray) -> np.float32:
    """Largest magnitude in a tensor (bf16, f16 or f32), NaN if one of its values is."""
    # The bits of magnitudes are ordered like the magnitudes, with infinity and NaN above all.
    bits = weights.reshape(-1).view(np.uint32 if weights.itemsize == 4 else np.uint16)
    largest = max(
        (bits[i : i + _SLICE] & _MAGNITUDE[weights.itemsize]).max()
        for i in range(0, bits.size, _SLICE)
    )
    return np.float32(largest.astype(bits.dtype).view(weights.dtype))


def nvfp4(
    weights: np.ndarray, largest: np.float32 | None = None
) -> tuple[np.ndarray, np.ndarray, np.float32]:
    """Quantise a matrix to NVFP4: `w = e2m1(q) · block_scale · scale`.

    Args:
        weights: `[N, K]` bf16, f16 or f32, K a multiple of 16.
        largest: magnitude that the global scale covers; by default that of `weights`. Tensors that
            share a scale (gate and up of an expert) are given the larger of theirs.

    Returns codes `[N, K/2]` uint8 (even columns in the low nibble), block scales `[N, K/16]`
    float8_e4m3fn, and the global scale. A matrix of zeros (all magnitudes below
    1e-32) gets the global scale 1.
    """
    largest = amax(weights) if largest is None else largest
    scale = _scale(largest, _E4M3_MAX * E2M1_MAX)
    rows, cols = weights.shape
    q = np.empty((rows, cols // 2), np.uint8)
    block_scale = np.empty((rows, cols // NVFP4_BLOCK), ml_dtypes.float8_e4m3fn)
    start = 0
    for part in _rows(weights):
        stop = start + len(part)
        blocks = part.astype(np.float32).reshape(len(part), -1, NVFP4_BLOCK)
        block_amax = np.abs(blocks).max(axis=-1)
        wanted = np.clip(block_amax / (E2M1_MAX * scale), _SMALLEST_BLOCK_SCALE, _E4M3_MAX)
        wanted[block_amax == 0] = 1.0
        block_scale[start:stop] = wanted
        blocks /= (block_scale[start:stop].astype(np.float32) * scale)[..., None]
        codes = _e2m1(blocks).reshape(len(part), -1, 2)
        q[start:stop] = codes[..., 0] | (codes[..., 1] << 4)
        start = stop
    return q, block_scale, scale


def fp8(weights: np.ndarray) -> tuple[np.ndarray, np.float32]:
    """Quantise a matrix to E4M3 with one scale: `w = q · scale`.

    Args:
        weights: `[N, K]` bf16, f16 or f32.

    Returns `[N, K]` float8_e4m3fn and the scale, which is 1 for a matrix of zeros.
    """
    largest = amax(weights)
    scale = _scale(largest, _E4M3_MAX)
    q = np.empty(weights.shape, ml_dtypes.float8_e4m3fn)
    start = 0
    for part in _rows(weights):
        # ModelOpt's quotient is in the weight's type before it is rounded to E4M3.
        scaled = (part.astype(np.float32) / scale).astype(weights.dtype).astype(np.float32)
        q[start : start + len(part)] = np.clip(scaled, -_E4M3_MAX, _E4M3_MAX)
        start += len(part)
    return q, scale


def _scale(largest: np.float32, reach: np.float32) -> np.float32:
    """`largest / reach`; 1 where that is zero or so small that float32 loses its products."""
    scale = largest / reach
    return np.float32(1.0) if scale < _SMALLEST_SCALE else scale


def _e2m1(x: np.ndarray) -> np.ndarray:
    """The nearest code, uint8; ties go to the even code, magnitudes above 6 to 6."""
    size = np.abs(x)
    code = (x < 0).view(np.uint8) << 3
    for boundary, tie_goes_up in zip(
        (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0), (False, True) * 4, strict=False
    ):
        compare = np.greater_equal if tie_goes_up else np.greater
        code += compare(size, np.float32(boundary)).view(np.uint8)
    return code


def _rows(weights: np.ndarray) -> list[np.ndarray]:
    """Runs of rows of a bounded size."""
    flat = weights.reshape(-1, weights.shape[-1])
    step = max(1, _SLICE // flat.shape[1])
    return [flat[start : start + step] for start in range(0, len(flat), step)]

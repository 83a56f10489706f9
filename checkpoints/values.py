"""Checks on values as they stream past, done on bits so that they keep up with the disk."""

import numpy as np

_SLICE = 2**18
"""Elements looked at together: few enough to stay in the processor's cache."""

_EXPONENTS = {"bfloat16": 0x7F80, "float16": 0x7C00, "float32": 0x7F800000}


def check(values: np.ndarray, holds: str, first: int = 0) -> str:
    """What is wrong with a flat array, as a predicate of its tensor; "" if nothing is.

    Args:
        values: 1-D.
        holds: as in `plan.ArrayPlan`: "finite", "e4m3", "codes", "scales" or "block scales".
        first: number of the first value in its tensor.
    """
    for start in range(0, values.size, _SLICE):
        part = values[start : start + _SLICE]
        match holds:
            case "codes":
                return ""
            case "finite":
                bad, problem = _not_finite(part), "is not finite"
            case "e4m3":
                bad, problem = (part.view(np.uint8) & 0x7F) == 0x7F, "is NaN"
            case "scales":
                bad, problem = ~((part > 0) & (part < np.inf)), "is not a positive finite scale"
            case "block scales":
                # Codes 1 to 0x7E are the positive finite numbers.
                bad = part.view(np.uint8) - np.uint8(1) > 0x7D
                problem = "is not a positive finite block scale"
            case _:
                raise ValueError(f"unknown kind of values {holds!r}")
        if bad.any():
            where = int(bad.argmax())
            return f"has {float(part[where])} at element {first + start + where}, which {problem}"
    return ""


def _not_finite(values: np.ndarray) -> np.ndarray:
    exponent = _EXPONENTS[values.dtype.name]
    bits = values.view(np.uint32 if values.itemsize == 4 else np.uint16)
    return (bits & exponent) == exponent

"""Which block sizes were fastest on which GPU."""

import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

PATH = Path(__file__).with_name("tuned.json")

Table = dict[str, dict[str, dict[str, dict[str, Any]]]]
"""Knobs by kind of device, operation and `key`; the candidate is the knob `candidate`."""


def key(sizes: Mapping[str, int]) -> str:
    """The sizes for which an operation is tuned apart, `K=2048 N=4096`."""
    return " ".join(f"{symbol}={sizes[symbol]}" for symbol in sorted(sizes))


def tuned(
    operation: str, device_kind: str, table: Table | None = None, **sizes: int
) -> dict[str, Any]:
    """The knobs that won on a kind of device, without the candidate; none if it was not tuned.

    Args:
        operation: name of the contract.
        device_kind: as JAX calls it.
        table: where to look; None for the package's own.
        sizes: those of the contract's group.
    """
    known = read() if table is None else table
    found = known.get(device_kind, {}).get(operation, {}).get(key(sizes), {})
    return {name: value for name, value in found.items() if name != "candidate"}


@lru_cache
def read(path: Path = PATH) -> Table:
    """What a file holds; nothing if there is none."""
    return json.loads(path.read_text()) if path.exists() else {}


def with_winner(
    table: Table, device_kind: str, operation: str, place: str, knobs: Mapping[str, Any]
) -> Table:
    """The table with one more entry, or another one."""
    of_device = table.get(device_kind, {})
    of_operation = {**of_device.get(operation, {}), place: dict(knobs)}
    return {**table, device_kind: {**of_device, operation: of_operation}}


def write(table: Table, path: Path = PATH) -> None:
    """Store a table."""
    path.write_text(json.dumps(table, indent=1, sort_keys=True) + "\n")
    read.cache_clear()

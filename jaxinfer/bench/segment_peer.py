"""The same model and batches in another engine, and how ours compares.

The peer runs first and ends before JAX takes the device: both would not fit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from jaxinfer.bench.peer import Rival, rival
from jaxinfer.peers.protocol import Peer, PeerError

Record = dict[str, Any]

DRIVERS: Mapping[str, str] = {"transformers": "sam_transformers", "stub": "stub"}
"""The driver for each peer that can be asked for."""

VARIANTS = ("eager", "compiled")
REPEATS = 10
"""Batches that are timed."""


def segment_rivals(name: str | None, python: Path | None, options: str) -> list[Rival]:
    """From what the command line gives: the peer in both variants, unless `options` names one.

    Args:
        name: a key of `DRIVERS`, or None for no peer.
        python: see `Rival`.
        options: a JSON object, or @FILE with one; see `rival`.

    Raises ValueError for a peer that is not known, and for options that are something else.
    """
    if name is None:
        return []
    if name not in DRIVERS:
        raise ValueError(f"no peer {name!r} for pictures; there are {', '.join(DRIVERS)}")
    other = rival(DRIVERS[name], python, options)
    assert other is not None
    if "variant" in other.options:
        return [other]
    return [replace(other, options={**other.options, "variant": one}) for one in VARIANTS]


def measure_segment_peers(
    rivals: Sequence[Rival], config: Mapping[str, Any], batches: Sequence[int]
) -> Iterator[Record]:
    """Run each batch in each peer; a line with `failure` where that cannot be done.

    Args:
        rivals: engines and variants.
        config: the model's `config.json`, as transformers reads it.
        batches: pictures that run together.
    """
    for other in rivals:
        line: Record = {"bench": "segment-peer", "variant": other.options.get("variant")}
        with Peer(other.name, other.python) as peer:
            try:
                line["about"] = dict(peer.load({**config, **other.config}, other.options))
            except PeerError as error:
                yield line | {"failure": str(error)}
                continue
            for batch in batches:
                line["batch"] = batch
                try:
                    took = median(peer.segment(batch, REPEATS))
                except PeerError as error:
                    yield line | {"failure": str(error)}
                    continue
                yield line | {
                    "milliseconds": round(1e3 * took, 3),
                    "images_per_second": round(batch / took, 2),
                }


def beside(record: Record, peers: Sequence[Record]) -> Record:
    """A line with the fastest peer at its batch, and our pictures a second divided by its."""
    mine = [
        peer for peer in peers if peer.get("batch") == record["batch"] and "failure" not in peer
    ]
    if not mine:
        return record
    peer = max(mine, key=lambda line: line["images_per_second"])
    ratio = record["images_per_second"] / peer["images_per_second"]
    told = {key: peer[key] for key in ("about", "variant", "milliseconds", "images_per_second")}
    return record | {"peer": told, "ratio_to_peer": round(ratio, 4)}

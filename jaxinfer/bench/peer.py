"""The same prompts and lengths in another engine, and how ours compares.

The peer runs first and ends before JAX takes the device: both would not fit.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jaxinfer.bench.timeline import figures
from jaxinfer.peers.protocol import Peer

Record = dict[str, Any]


class Shape(NamedTuple):
    """Requests that run together, tokens of a prompt, tokens of an answer, requests in all."""

    streams: int
    prompt: int
    output: int
    requests: int


@dataclass(frozen=True)
class Rival:
    """An engine to compare with.

    Attributes:
        name: a key of `jaxinfer.peers.protocol.DRIVERS`.
        python: interpreter of its environment; None for this one.
        options: of its driver.
        config: replaces parts of the model's `config.json`, such as `quantization_config`.
    """

    name: str
    python: Path | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)


def rival(name: str | None, python: Path | None, options: str) -> Rival | None:
    """From what the command line gives.

    Args:
        name: None for no peer.
        python: see `Rival`.
        options: a JSON object, or @FILE with one. Its `config` replaces parts of the model's, the
            rest goes to the driver.

    Raises ValueError if it is something else.
    """
    if name is None:
        return None
    if options.startswith("@"):
        options = Path(options[1:]).read_text()
    try:
        given = json.loads(options)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        raise ValueError(f"--peer-options must be a JSON object, not {options!r}")
    return Rival(name, python, given, given.pop("config", {}))


def measure_peer(
    other: Rival, config: Mapping[str, Any], shapes: Sequence[Shape]
) -> dict[Shape, Record]:
    """Load a peer and run every shape twice; the second run is told.

    Args:
        other: the engine.
        config: the model's `config.json`.
        shapes: what to run.
    """
    text = config.get("text_config", config)
    rng = np.random.default_rng(0)
    told = {}
    with Peer(other.name, other.python) as peer:
        peer.load({**config, **other.config}, other.options)
        for shape in shapes:
            size = (shape.requests, shape.prompt)
            prompts = rng.integers(0, text["vocab_size"], size).tolist()
            peer.generate(prompts, shape.output, shape.streams)
            answers = peer.generate(prompts, shape.output, shape.streams)
            gaps = [answer.between for answer in answers if answer.between is not None]
            told[shape] = {
                "about": dict(peer.about),
                **figures(answers),
                "steady_tokens_per_second": shape.streams / float(np.median(gaps))
                if gaps
                else None,
            }
    return told


def against(record: Record, peer: Record | None, ours: str, theirs: str) -> Record:
    """A line with the peer's figures beside ours, and ours divided by theirs.

    Args:
        record: our line.
        peer: the peer's, or None.
        ours: which of our figures counts, with dots into what is nested.
        theirs: which of the peer's.
    """
    if peer is None:
        return record
    own, other = _at(record, ours), _at(peer, theirs)
    ratio = round(own / other, 4) if own and other else None
    return record | {"peer": peer, "ratio_to_peer": ratio, "ratio_of": ours}


def _at(record: Any, path: str) -> Any:
    for name in path.split("."):
        record = record[name]
    return record

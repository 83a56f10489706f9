"""Driving an engine by hand."""

from collections.abc import Iterable, Sequence

from checkpoints import resolve
from jaxinfer import Completion
from jaxinfer.engine import Chunk
from jaxinfer.engine.engine import Engine, Request

HELDOUT = resolve("tiny_qwen").parent / "heldout"
EOS = (4065, 4063)


def chunks(engine: Engine, requests: Sequence[Request]) -> dict[Request, list[Chunk]]:
    """Step until these have ended; what they were given."""
    given: dict[Request, list[Chunk]] = {request: [] for request in requests}
    while not all(request.ended for request in requests):
        for request, chunk in engine.step():
            if request in given:
                given[request].append(chunk)
    return given


def run(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """Step until these have ended; their completions, in order."""
    return [Completion.join(given) for given in chunks(engine, requests).values()]


def bits(completions: Iterable[Completion]) -> list[tuple]:
    """What must not change by a single bit; nor does `==` on floats let it."""
    return [(c.token_ids, c.logprobs, c.top_logprobs, c.text, c.finish_reason) for c in completions]

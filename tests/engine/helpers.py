"""Driving an engine by hand."""

from collections.abc import Iterable, Sequence

from checkpoints import resolve
from jaxinfer import Completion
from jaxinfer.engine import Chunk
from jaxinfer.engine.engine import Engine, Request

# Sizes of engines. Each other one is another compilation, so files share them.
SMALL = {
    "slots": 7,
    "batches": (7,),
    "context": 320,
    "pages": 40,
    "snapshots": 12,
    "prefill_budget": 64,
}
ALONE = SMALL | {"slots": 1, "batches": (1,), "prefix_cache": False, "steps": 1}
"""For one request at a time."""
TIGHT = {
    "slots": 4,
    "batches": (4,),
    "context": 256,
    "pages": 5,
    "snapshots": 4,
    "prefill_budget": 64,
    "steps": 2,
}
"""Pages for one request that is as long as can be, and a page or two for each of three."""
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

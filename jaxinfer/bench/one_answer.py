"""Whether a request's answer is the same in any company, at a size at which tests do not run.

Some prompts are answered alone, one after another, and then in batches and with drafts verified
beside each token. Tokens and the bits of their log probabilities must be the same. Prompts are
taken as read (`engines.TakenAsRead`): what is compared is decoding and verifying.
"""

from collections.abc import Iterator, Sequence

from jaxinfer.bench.decode import Record
from jaxinfer.bench.engines import TakenAsRead, make_engine, make_plan
from jaxinfer.bench.measure import run
from jaxinfer.bench.subjects import Subject
from jaxinfer.engine.request import Completion, SamplingParams
from jaxinfer.qwen.config import CHUNK

CIRCUMSTANCES = ((8, 0), (32, 0), (1, 3), (8, 3))
"""Streams, and drafts in every step."""

ALONE, SHORTEST, TOKENS = 4, 100, 32
"""Prompts that are answered alone too, tokens of the first, tokens of each answer."""


def measure_one_answer(
    subject: Subject,
    circumstances: Sequence[tuple[int, int]] = CIRCUMSTANCES,
    *,
    kernels: frozenset[str] | None = None,
) -> Iterator[Record]:
    """Compare answers in these circumstances with those given alone; see `make_plan`."""
    most = max(max(streams for streams, _ in circumstances), ALONE)
    prompts = [subject.prompts(1, SHORTEST + 5 * number, seed=number)[0] for number in range(most)]
    alone = _answers(subject, prompts[:ALONE], 1, 0, kernels)
    for streams, drafts in circumstances:
        given = _answers(subject, prompts[: max(streams, ALONE)], streams, drafts, kernels)
        pairs = list(zip(alone, given, strict=False))
        yield {
            "model": subject.name,
            "weights": subject.weights,
            "streams": streams,
            "drafts": drafts,
            "answers": len(pairs),
            "tokens": TOKENS,
            "same_tokens": all(a.token_ids == b.token_ids for a, b in pairs),
            "same_bits": all(a.logprobs == b.logprobs for a, b in pairs),
        }


def _answers(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    streams: int,
    drafts: int,
    kernels: frozenset[str] | None,
) -> list[Completion]:
    plan = make_plan(subject, "ngram" if drafts else None, drafts, kernels)
    context = -(-(len(prompts[-1]) + TOKENS + drafts + 1) // CHUNK) * CHUNK
    calls = TakenAsRead(plan)
    engine = make_engine(
        subject,
        plan,
        streams=streams,
        context=context,
        steps=4,
        calls=calls,
        prefill_tokens=streams * context,
    )
    sampling = SamplingParams(
        max_tokens=TOKENS, temperature=0.0, ignore_eos=True, logprobs=True, prefix_cache=False
    )
    completions = []
    for first in range(0, len(prompts), streams):
        calls.forget()
        completions += run(engine, prompts[first : first + streams], sampling).completions
    return completions

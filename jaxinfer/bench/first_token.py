"""Load a model, answer one prompt, and say when what was done; `startup` runs it.

    python -m jaxinfer.bench.first_token DIRECTORY

prints one JSON object: `began` and `ended` by the clock on the wall, and the seconds of each stage
between: importing, finding the device, loading, making the engine, the first token; and for
comparison those of a second prompt.
"""

import time

BEGAN = time.time()

import argparse  # noqa: E402
import json  # noqa: E402

import jax  # noqa: E402

from jaxinfer.engine import LLM, SamplingParams  # noqa: E402


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--context", type=int, default=2048)
    a = parser.parse_args()
    marks = [("imports", time.time())]
    jax.devices()
    marks.append(("device", time.time()))
    llm = LLM(a.directory, max_batch=1, context=a.context, speculation=None)
    loaded = sum(llm.report.seconds.values())
    marks += [("load", marks[-1][1] + loaded), ("engine", time.time())]
    sampling = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True, prefix_cache=False)
    first = None
    for number in range(2):
        ids = [(number + 7 * i) % llm.config.vocab_size for i in range(a.prompt)]
        asked = time.time()
        for chunk in llm.stream(ids, sampling):
            if first is None and chunk.token_ids:
                first = time.time()
                marks.append(("first token", first))
                again = 0.0
            elif number and chunk.token_ids and not again:
                again = time.time() - asked
    stages, before = {}, BEGAN
    for name, when in marks:
        stages[name], before = when - before, when
    print(json.dumps({"began": BEGAN, "ended": first, "stages": stages | {"(again)": again}}))


if __name__ == "__main__":
    main()

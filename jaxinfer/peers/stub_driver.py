"""A driver without an engine: a token or a picture takes it a millisecond, and it fails on demand.

For tests, and to try a comparison where no other engine is installed. Options: `fail` is "error" to
refuse, "crash" to die, "hang" to say nothing; `at` is the command at which that happens.
"""

import os
import sys
import time

from driver_lines import serve


def load(config, options):
    """Nothing is loaded."""
    fail(options, "load")
    return options, {"engine": "stub", "settings": config.get("model_type")}


def generate(options, prompts, max_tokens, streams):
    """Every answer takes `max_tokens` milliseconds."""
    fail(options, "generate")
    print("what libraries print is not an answer")
    answers, began = [], time.perf_counter()
    for begin in range(0, len(prompts), streams):
        asked, times = time.perf_counter() - began, []
        for _ in range(max_tokens):
            time.sleep(0.001)
            times.append(time.perf_counter() - began)
        answers += [{"asked": asked, "times": times} for _ in prompts[begin : begin + streams]]
    return answers


def segment(options, batch, repeats):
    """Every picture takes a millisecond."""
    fail(options, "segment")
    time.sleep(0.001 * batch * repeats)
    return [0.001 * batch] * repeats


def fail(options, command):
    """Misbehave, if that was asked for."""
    if options.get("at", "generate") != command:
        return
    if options.get("fail") == "error":
        raise RuntimeError("out of memory, say")
    if options.get("fail") == "crash":
        print("the last words of a driver", file=sys.stderr, flush=True)
        os._exit(3)
    if options.get("fail") == "hang":
        print("thinking", file=sys.stderr, flush=True)
        time.sleep(600)


if __name__ == "__main__":
    serve(load, generate=generate, segment=segment)

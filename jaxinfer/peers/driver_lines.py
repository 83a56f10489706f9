"""A driver's half of the protocol; imported by the scripts beside it, under any Python from 3.9 on.

One JSON object a line. Commands come on standard input, an answer to each goes to standard output:

    {"cmd": "load", "config": {...}, "options": {...}}
        -> {"about": {...}}                      what was loaded, and by which versions
    {"cmd": "generate", "prompts": [[id, ...], ...], "max_tokens": n, "streams": s}
        -> {"answers": [{"asked": t, "times": [t, ...]}, ...]}
                                                 seconds; one time for each token known on the host
    {"cmd": "quit"}                              ends the process
    anything that fails -> {"error": "..."}      and the process goes on

`streams` is how many of the prompts are under way together; each next one is asked when one ends.
"""

import json
import os
import sys
import traceback


def serve(load, generate):
    """Answer commands until there are no more.

    Args:
        load: called with configuration and options; returns the model, and a dict about it.
        generate: called with the model, prompts, max_tokens and streams; returns the answers.
    """
    # Libraries print what they like: that goes to standard error, where people look for it.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    model = None
    for line in sys.stdin:
        command = json.loads(line)
        if command["cmd"] == "quit":
            return
        try:
            if command["cmd"] == "load":
                model, about = load(command["config"], command["options"])
                answer = {"about": about}
            else:
                arguments = (command["prompts"], command["max_tokens"], command["streams"])
                answer = {"answers": generate(model, *arguments)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)

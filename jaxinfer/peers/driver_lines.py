"""A driver's half of the protocol; imported by the scripts beside it, under any Python from 3.9 on.

One JSON object a line. Commands come on standard input, an answer to each goes to standard output:

    {"cmd": "load", "config": {...}, "options": {...}}
        -> {"about": {...}}                      what was loaded, and by which versions
    {"cmd": "generate", "prompts": [[id, ...], ...], "max_tokens": n, "streams": s}
        -> {"answers": [{"asked": t, "times": [t, ...]}, ...]}
                                                 seconds; one time for each token known on the host
    {"cmd": "segment", "batch": b, "repeats": n}
        -> {"answers": [t, ...]}                 seconds of each of n batches of b pictures
    {"cmd": "quit"}                              ends the process
    anything that fails -> {"error": "..."}      and the process goes on

`streams` is how many of the prompts are under way together; each next one is asked when one ends.
"""

import json
import os
import sys
import traceback


def serve(load, **commands):
    """Answer commands until there are no more.

    Args:
        load: called with configuration and options; returns the model, and a dict about it.
        commands: by name; called with the model and the command's fields, they return the answers.
    """
    # Libraries print what they like: that goes to standard error, where people look for it.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    model = None
    for line in sys.stdin:
        fields = json.loads(line)
        name = fields.pop("cmd")
        if name == "quit":
            return
        try:
            if name == "load":
                model, about = load(**fields)
                answer = {"about": about}
            else:
                answer = {"answers": commands[name](model, **fields)}
        except Exception as error:
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)

"""Drives vLLM in its own process and event loop: dummy weights, token ids in, greedy decoding.

Options: `engine` holds arguments of `vllm.LLM` (for example `max_model_len`, `quantization`,
`speculative_config`), which are added to what is set here; `files` holds further JSON files of the
model's directory, by name.
"""

import json
import os
import tempfile
import time

# The engine's loop runs in this process: what is timed has no second process in it.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

import vllm  # pyright: ignore[reportMissingImports]
from driver_lines import serve
from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]


def load(config, options):
    """Write the configuration where vLLM wants it, and let it make up the weights."""
    directory = tempfile.mkdtemp(prefix="vllm-model-")
    for name, content in {"config.json": config, **options.get("files", {})}.items():
        with open(os.path.join(directory, name), "w") as file:
            json.dump(content, file)
    arguments = {
        "model": directory,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enable_prefix_caching": False,
        "gpu_memory_utilization": 0.9,
        "limit_mm_per_prompt": {"image": 0, "video": 0},
        **options.get("engine", {}),
    }
    if "vision_config" not in config:
        del arguments["limit_mm_per_prompt"]
    llm = LLM(**arguments)
    about = {
        "engine": "vllm",
        "weights": "dummy",
        "quantization": (config.get("quantization_config") or {}).get("quant_method"),
        "arguments": {key: value for key, value in arguments.items() if key != "model"},
        "versions": {"vllm": vllm.__version__},
    }
    return llm, about


def generate(llm, prompts, max_tokens, streams):
    """Keep `streams` requests under way; the time of a token is when `step` brought it."""
    engine = llm.llm_engine
    sampling = {"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True}
    params = SamplingParams(**sampling, detokenize=False)
    answers, known, running, number = [], [], set(), 0
    began = time.perf_counter()
    while number < len(prompts) or running:
        while number < len(prompts) and len(running) < streams:
            answers.append({"asked": time.perf_counter() - began, "times": []})
            known.append(0)
            engine.add_request(str(number), {"prompt_token_ids": prompts[number]}, params)
            running.add(number)
            number += 1
        for output in engine.step():
            now = time.perf_counter() - began
            # Some versions number requests anew behind the name that they were given.
            index = int(output.request_id.split("-")[0])
            total = len(output.outputs[0].token_ids)
            answers[index]["times"] += [now] * (total - known[index])
            known[index] = total
            if output.finished:
                running.discard(index)
    return answers


if __name__ == "__main__":
    serve(load, generate=generate)

"""Drives Hugging Face transformers: random weights in the published shape, greedy decoding.

Options: `variant` is "eager", or "compiled" for a static cache and decode steps under
`torch.compile` with CUDA graphs; `dtype` (bfloat16); `device` (cuda if there is one); `experts`,
the `experts_implementation`.
"""

import time

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from driver_lines import serve
from transformers import (  # pyright: ignore[reportMissingImports]
    DynamicCache,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    StaticCache,
)


def load(config, options):
    """Draw the weights on the device."""
    text = Qwen3_5MoeTextConfig(**config.get("text_config", config))
    device = options.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    how = {"dtype": getattr(torch, options.get("dtype", "bfloat16"))}
    if options.get("experts"):
        how["experts_implementation"] = options["experts"]
    with torch.device(device):
        net = Qwen3_5MoeForCausalLM._from_config(text, **how).eval()
    variant = options.get("variant", "eager")
    if variant not in ("eager", "compiled"):
        raise ValueError(f"variant is {variant!r}; give 'eager' or 'compiled'")
    model = {"net": net, "device": device, "step": net, "caches": {}, "static": False}
    if variant == "compiled":
        mode = "reduce-overhead" if device == "cuda" else "default"
        model.update(step=torch.compile(net, mode=mode, dynamic=False), static=True)
    about = {
        "engine": "transformers",
        "variant": variant,
        "weights": f"random numbers in {str(how['dtype']).removeprefix('torch.')}",
        "parameters": sum(p.numel() for p in net.parameters()),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    return model, about


@torch.inference_mode()
def generate(model, prompts, max_tokens, streams):
    """Batches of `streams` prompts of one length, one batch after another."""
    answers, began = [], time.perf_counter()
    for begin in range(0, len(prompts), streams):
        asked = time.perf_counter() - began
        batch = prompts[begin : begin + streams]
        times = [known - began for known in decode(model, batch, max_tokens)]
        answers += [{"asked": asked, "times": times} for _ in batch]
    return answers


def decode(model, batch, max_tokens):
    """When each token of a batch was known on the host, by the clock."""
    net, step = model["net"], model["step"]
    tokens = torch.tensor(batch, device=model["device"])
    cache = make_cache(model, tokens.shape[0], tokens.shape[1] + max_tokens)
    times = []
    for number in range(max_tokens):
        # A prompt is as long as it likes: only the steps are compiled.
        run = step if number else net
        if model["static"] and number:
            torch.compiler.cudagraph_mark_step_begin()
        out = run(input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1)
        tokens = out.logits[:, -1:].argmax(-1)
        tokens.tolist()
        times.append(time.perf_counter())
    return times


def make_cache(model, batch, size):
    """An empty cache; a static one is kept, since graphs are recorded for its addresses."""
    if not model["static"]:
        return DynamicCache(config=model["net"].config)
    cache = model["caches"].get((batch, size))
    if cache is None:
        cache = StaticCache(config=model["net"].config, max_cache_len=size)
        model["caches"][batch, size] = cache
    cache.reset()
    return cache


if __name__ == "__main__":
    serve(load, generate=generate)

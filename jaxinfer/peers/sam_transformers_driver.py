"""Drives Hugging Face transformers' `Sam3Model`: random weights in the published shape.

What is timed is the model alone: normalised pictures and text features lie on the device, and
outputs stay there. Options: `variant` is "eager" or "compiled"; `mode`, of `torch.compile`
(reduce-overhead on a GPU, which records CUDA graphs); `dtype` (bfloat16); `device` (cuda if there
is one).
"""

import time

import torch  # pyright: ignore[reportMissingImports]
import transformers  # pyright: ignore[reportMissingImports]
from driver_lines import serve
from transformers import Sam3Config, Sam3Model  # pyright: ignore[reportMissingImports]

WARM_UP = 3
"""Runs before those that are told; the first of them compiles."""
WORDS = 4
"""Tokens of the prompt that count; it is padded to the model's context."""


def load(config, options):
    """Draw the weights on the device."""
    variant = options.get("variant", "eager")
    if variant not in ("eager", "compiled"):
        raise ValueError(f"variant is {variant!r}; give 'eager' or 'compiled'")
    device = options.get("device") or ("cuda" if torch.cuda.is_available() else "cpu")
    dtype = getattr(torch, options.get("dtype", "bfloat16"))
    with torch.device(device):
        net = Sam3Model._from_config(Sam3Config(**config), dtype=dtype).eval()
    run, mode = net, None
    if variant == "compiled":
        mode = options.get("mode") or ("reduce-overhead" if device == "cuda" else "default")
        run = torch.compile(net, mode=mode, dynamic=False)
    about = {
        "engine": "transformers",
        "variant": variant,
        "mode": mode,
        "weights": f"random numbers in {str(dtype).removeprefix('torch.')}",
        "parameters": sum(p.numel() for p in net.parameters()),
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }
    return {"net": net, "run": run, "device": device, "dtype": dtype}, about


@torch.inference_mode()
def segment(model, batch, repeats):
    """Batches of noise, each with one prompt a picture; seconds of each."""
    net, device, dtype = model["net"], model["device"], model["dtype"]
    size = net.config.vision_config.backbone_config.image_size
    pixels = 2 * torch.rand(batch, 3, size, size, device=device) - 1
    text = net.config.text_config
    ids = torch.randint(1, text.vocab_size, (batch, text.max_position_embeddings), device=device)
    mask = torch.arange(ids.shape[1], device=device).expand_as(ids) < WORDS
    features = net.get_text_features(input_ids=ids, attention_mask=mask.long())
    inputs = {
        "pixel_values": pixels.to(dtype),
        "text_embeds": features,
        "attention_mask": mask.long(),
    }
    times = []
    for _ in range(WARM_UP + repeats):
        wait(device)
        began = time.perf_counter()
        if device == "cuda":
            torch.compiler.cudagraph_mark_step_begin()
        model["run"](**inputs)
        wait(device)
        times.append(time.perf_counter() - began)
    return times[WARM_UP:]


def wait(device):
    """Until the device has done all that it was asked for."""
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    serve(load, segment=segment)

"""Make `qwen/`: a tiny random Qwen3.6 checkpoint and what transformers computes with it.

Run with torch 2.13 (CPU) and transformers 5.17; see README.md for the contents and the command.
Every parameter is drawn at random: a fresh initialisation (norms 0, dt_bias 1) hides mistakes.
"""

import copy
import json
import math
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import DynamicCache, Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration
from transformers.modeling_layers import MtpLayer
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
    Qwen2VLImageProcessorPil,
    smart_resize,
)
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import (
    Qwen3_5MoeDecoderLayer,
    Qwen3_5MoeRMSNorm,
)

HERE = Path(__file__).parent / "qwen"

VISION_START, VISION_END, IMAGE, VIDEO = 248, 249, 250, 251
TEXT_VOCAB = 240  # ids below this are plain text

TEXT_CONFIG = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "bos_token_id": 244,
    "dtype": "float32",
    "eos_token_id": 244,
    "full_attention_interval": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 4096,
    "model_type": "qwen3_5_moe_text",
    "moe_intermediate_size": 32,
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "pad_token_id": None,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 32,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 256,
}

VISION_CONFIG = {
    "deepstack_visual_indexes": [],
    "depth": 2,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 32,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "model_type": "qwen3_5_moe",
    "num_heads": 2,
    "num_position_embeddings": 36,
    "out_hidden_size": 64,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}

CONFIG = {
    "architectures": ["Qwen3_5MoeForConditionalGeneration"],
    "image_token_id": IMAGE,
    "model_type": "qwen3_5_moe",
    "text_config": TEXT_CONFIG,
    "tie_word_embeddings": False,
    "transformers_version": "4.57.1",
    "video_token_id": VIDEO,
    "vision_config": VISION_CONFIG,
    "vision_end_token_id": VISION_END,
    "vision_start_token_id": VISION_START,
}

MTP_NAMES = {  # MtpLayer's name -> published name
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "eh_proj": "fc",
    "mtp_block": "layers.0",
    "post_norm": "norm",
}

Cases = dict[str, Tensor]


def random_parameter(name: str, shape: torch.Size, rng: torch.Generator) -> Tensor:
    """A random value of a size at which every part of the model matters to the output."""
    noise = torch.randn(shape, generator=rng)
    if name.endswith("A_log"):  # some heads remember for long, some do not
        return torch.empty(shape).uniform_(math.log(0.02), math.log(2.0), generator=rng)
    if name.endswith("dt_bias"):
        return -1.0 + noise
    if name.endswith("conv1d.weight"):
        return 0.6 * noise
    if name.endswith("embed_tokens.weight"):
        return noise
    if name.endswith(("mlp.gate.weight", "shared_expert_gate.weight", "pos_embed.weight")):
        return 0.3 * noise
    if name.endswith("bias"):
        return 0.2 * noise
    if noise.ndim == 1:  # a norm: the plain ones lie around 1, all others around 0
        plain = "linear_attn.norm" in name or "visual" in name
        return plain + 0.3 * noise
    fan_in = noise[0].numel() if "patch_embed" in name else shape[-1]
    return 1.5 * noise / math.sqrt(fan_in)


def randomise(module: nn.Module, prefix: str, rng: torch.Generator) -> None:
    """Overwrite every parameter of the module, in the order of its names."""
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            parameter.copy_(random_parameter(prefix + name, parameter.shape, rng))


def build() -> tuple[Qwen3_5MoeForConditionalGeneration, MtpLayer]:
    """Write the checkpoint and return the model read back from it, with its MTP block."""
    HERE.mkdir(parents=True, exist_ok=True)
    (HERE / "config.json").write_text(json.dumps(CONFIG, indent=4, sort_keys=True))
    rng = torch.Generator().manual_seed(36)
    source = Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(**copy.deepcopy(CONFIG)))
    randomise(source, "", rng)

    mtp_config = copy.deepcopy(source.config.text_config)
    mtp_config.layer_types = ["full_attention"]
    mtp_config._attn_implementation = "eager"
    mtp_config._experts_implementation = "eager"
    mtp = MtpLayer(mtp_config, Qwen3_5MoeDecoderLayer, Qwen3_5MoeRMSNorm, layer_idx=0).eval()
    randomise(mtp, "mtp.", rng)

    tensors = dict(source.state_dict())
    for name, tensor in mtp.state_dict().items():
        head, rest = name.split(".", 1)
        tensors[f"mtp.{MTP_NAMES[head]}.{rest}"] = tensor
    tensors = {name: tensor.contiguous() for name, tensor in sorted(tensors.items())}
    assert all(tensor.dtype == torch.float32 and tensor.std() > 0 for tensor in tensors.values())
    save_file(tensors, HERE / "model.safetensors", metadata={"format": "pt"})

    model = Qwen3_5MoeForConditionalGeneration.from_pretrained(
        HERE, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, tensors[name]), name
    return model, mtp


def text_ids(length: int, seed: int) -> Tensor:
    """Random ids of plain text, [1, length]."""
    return torch.randint(0, TEXT_VOCAB, (1, length), generator=torch.Generator().manual_seed(seed))


def forward(
    model: Qwen3_5MoeForConditionalGeneration, input_ids: Tensor, **inputs: object
) -> Tensor:
    """Logits [T, V] of one sequence."""
    return model(input_ids=input_ids, **inputs).logits[0]


def traced(model: Qwen3_5MoeForConditionalGeneration, input_ids: Tensor, **inputs: object) -> Cases:
    """Logits, the residual stream after every layer, and the stream after the final norm."""
    text, seen = model.model.language_model, {}
    hooks = [
        module.register_forward_hook(lambda _m, _i, out, name=name: seen.__setitem__(name, out[0]))
        for name, module in [
            *((f"hidden.{i}", layer) for i, layer in enumerate(text.layers)),
            ("final", text.norm),
        ]
    ]
    seen["logits"] = forward(model, input_ids, **inputs)
    for hook in hooks:
        hook.remove()
    return seen


def cached_steps(
    model: Qwen3_5MoeForConditionalGeneration, cache: DynamicCache, ids: Tensor, sizes: list[int]
) -> Tensor:
    """Feed the ids in pieces of the given sizes through the cache; logits of all positions."""
    pieces = torch.split(ids, sizes, dim=1)
    return torch.cat(
        [forward(model, piece, past_key_values=cache, use_cache=True) for piece in pieces]
    )


def cache_state(cache: DynamicCache, prefix: str) -> Cases:
    """What the cache holds now: recurrent states and windows, or rotated keys and raw values.

    Copies of the states, which the cache goes on to change in place.
    """
    out = {}
    for i, layer in enumerate(cache.layers):
        if TEXT_CONFIG["layer_types"][i] == "linear_attention":
            out[f"{prefix}.recurrent.{i}"] = layer.recurrent_states[0][0].clone()
            out[f"{prefix}.conv.{i}"] = layer.conv_states[0][0].clone()
        else:
            out[f"{prefix}.key.{i}"], out[f"{prefix}.value.{i}"] = layer.keys[0], layer.values[0]
    return out


def text_cases(model: Qwen3_5MoeForConditionalGeneration) -> Cases:
    """Prefill, decode, chunked prefill and three-row positions."""
    cases: Cases = {}
    for length in (5, 64, 71, 130, 200):
        ids = text_ids(length, seed=length)
        found = traced(model, ids) if length == 71 else {"logits": forward(model, ids)}
        cases |= {f"prefill_{length}.input_ids": ids[0]} | {
            f"prefill_{length}.{k}": v for k, v in found.items()
        }

    prompt, following = text_ids(71, seed=71), text_ids(6, seed=6)
    cache = DynamicCache(config=model.config.text_config)
    cached_steps(model, cache, prompt, [71])
    cases |= cache_state(cache, "decode_71.state_before")
    cases["decode_71.input_ids"] = following[0]
    cases["decode_71.logits"] = cached_steps(model, cache, following, [1] * 6)
    cases |= cache_state(cache, "decode_71.state_after")

    cache = DynamicCache(config=model.config.text_config)
    cases["chunked_130.sizes"] = torch.tensor([64, 64, 2])
    cases["chunked_130.logits"] = cached_steps(model, cache, text_ids(130, seed=130), [64, 64, 2])

    positions = torch.randint(0, 4096, (3, 71), generator=torch.Generator().manual_seed(3))
    cases["mrope_71.input_ids"], cases["mrope_71.position_ids"] = prompt[0], positions
    cases["mrope_71.logits"] = forward(model, prompt, position_ids=positions[:, None])
    return cases


def mtp_cases(model: Qwen3_5MoeForConditionalGeneration, mtp: MtpLayer, final: Tensor) -> Cases:
    """Drafts at positions 0..69 from (h_i, t_{i+1}), then a second draft chained to the last."""
    text, tokens = model.model.language_model, text_ids(71, seed=71)[0, 1:]

    def run(hidden: Tensor, following: Tensor) -> Tensor:
        embeds, length = text.embed_tokens(following)[None], len(following)
        positions = torch.arange(length).view(1, 1, -1).expand(3, 1, -1)
        causal = torch.full((length, length), -torch.inf).triu(1)[None, None]
        rope = text.rotary_emb(embeds, positions)
        return mtp(
            embeds,
            hidden[None],
            position_embeddings=rope,
            attention_mask=causal,
            position_ids=positions[0],
            past_key_values=None,
        )[0]

    hidden = run(final[:70], tokens)
    logits = model.lm_head(hidden)
    draft = logits[-1:].argmax(-1)
    chained = run(torch.cat([final[:70], hidden[-1:]]), torch.cat([tokens, draft]))
    torch.testing.assert_close(chained[:70], hidden)
    return {
        "mtp_70.input_hidden": final[:70],
        "mtp_70.input_ids": tokens,
        "mtp_70.hidden": hidden,
        "mtp_70.logits": logits,
        "mtp_70.second.input_ids": draft,
        "mtp_70.second.hidden": chained[70:],
        "mtp_70.second.logits": model.lm_head(chained[70:]),
    }


def vision_cases(model: Qwen3_5MoeForConditionalGeneration) -> Cases:
    """The tower on two images of different grids in one call, and on a video of two frames."""
    cases: Cases = {}
    rng = torch.Generator().manual_seed(4)
    for name, grid in {
        "vision_images": [[1, 4, 6], [1, 8, 4]],
        "vision_video": [[2, 4, 4]],
    }.items():
        grid_thw = torch.tensor(grid)
        pixels = torch.randn((int(grid_thw.prod(-1).sum()), 3 * 2 * 4 * 4), generator=rng).clamp(
            -1, 1
        )
        out = model.model.visual(pixels, grid_thw=grid_thw, return_dict=True)
        cases |= {
            f"{name}.pixel_values": pixels,
            f"{name}.grid_thw": grid_thw,
            f"{name}.hidden": out.last_hidden_state,
            f"{name}.features": out.pooler_output,
        }
    return cases


def multimodal_cases(model: Qwen3_5MoeForConditionalGeneration, vision: Cases) -> Cases:
    """Two images inside text, then three tokens decoded one at a time behind them."""
    pixels, grid = vision["vision_images.pixel_values"], vision["vision_images.grid_thw"]
    counts = (grid.prod(-1) // 4).tolist()
    spans = [[VISION_START, *[IMAGE] * count, VISION_END] for count in counts]
    text = [text_ids(length, seed=100 + length)[0].tolist() for length in (5, 4, 40)]
    ids = torch.tensor([text[0] + spans[0] + text[1] + spans[1] + text[2]])
    types = (ids == IMAGE).int()
    positions, delta = model.model.get_rope_index(ids, types, image_grid_thw=grid)
    following = text_ids(3, seed=103)
    cache = DynamicCache(config=model.config.text_config)
    logits = forward(
        model,
        ids,
        pixel_values=pixels,
        image_grid_thw=grid,
        mm_token_type_ids=types,
        past_key_values=cache,
        use_cache=True,
    )
    cases = {
        "multimodal.input_ids": ids[0],
        "multimodal.mm_token_type_ids": types[0],
        "multimodal.pixel_values": pixels.clone(),
        "multimodal.image_grid_thw": grid.clone(),
        "multimodal.position_ids": positions[:, 0],
        "multimodal.rope_delta": delta[0, 0],
        "multimodal.logits": logits,
        "multimodal.decode.input_ids": following[0],
        "multimodal.decode.logits": cached_steps(model, cache, following, [1] * 3),
    }
    whole = torch.cat(
        [positions[:, 0], (torch.arange(3) + ids.shape[1] + delta[0, 0]).expand(3, 3)], dim=1
    )
    again = forward(
        model,
        torch.cat([ids, following], 1),
        pixel_values=pixels,
        image_grid_thw=grid,
        position_ids=whole[:, None],
    )
    torch.testing.assert_close(again[-3:], cases["multimodal.decode.logits"], rtol=0, atol=1e-4)
    model.model.rope_deltas = (
        None  # transformers keeps the delta on the model; text calls must not see it
    )
    return cases


def picture(height: int, width: int, seed: int) -> np.ndarray:
    """A gradient with random noise on it, uint8 [height, width, 3]."""
    noise = np.random.default_rng(seed).integers(-60, 61, (height, width, 3))
    rows, columns = np.linspace(0, 255, height)[:, None], np.linspace(0, 255, width)[None]
    gradient = np.stack(np.broadcast_arrays(rows, columns, 255 - (rows + columns) / 2), axis=-1)
    return np.clip(gradient + noise, 0, 255).astype(np.uint8)


def image_cases() -> Cases:
    """Preprocessing with real 16-pixel patches (PIL processor), and a table of target sizes."""
    cases: Cases = {}
    size = {"shortest_edge": 2048, "longest_edge": 4096}
    cases["image.size"] = torch.tensor([size["shortest_edge"], size["longest_edge"]])
    processor = Qwen2VLImageProcessorPil(
        patch_size=16,
        temporal_patch_size=2,
        merge_size=2,
        size=size,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    for i, (height, width) in enumerate([(37, 53), (21, 11), (32, 64), (103, 61)]):
        image = picture(height, width, seed=i)
        out = processor(image, return_tensors="pt")
        cases |= {
            f"image.{i}.pixels": torch.from_numpy(image),
            f"image.{i}.pixel_values": out["pixel_values"],
            f"image.{i}.grid_thw": out["image_grid_thw"],
        }

    rng = np.random.default_rng(40)
    sizes = [
        (1, 1),
        (1, 200),
        (200, 1),
        (16, 16),
        (48, 48),
        (256, 256),
        (255, 257),
        (80, 240),
        (1008, 1040),
        (1080, 1920),
        (4096, 4096),
        (4095, 4097),
        (4112, 4112),
        (8192, 8192),
        (100, 20000),
        (20000, 100),
        (3024, 4032),
        (272, 240),
    ]
    while len(sizes) < 40:
        height, width = (int(x) for x in np.exp(rng.uniform(np.log(8), np.log(9000), 2)))
        if max(height, width) <= 200 * min(height, width):
            sizes.append((height, width))
    targets = [
        smart_resize(h, w, factor=32, min_pixels=65536, max_pixels=16777216) for h, w in sizes
    ]
    cases["resize.from"], cases["resize.to"] = torch.tensor(sizes), torch.tensor(targets)
    return cases


def watch_routers(modules: list[nn.Module]) -> list[float]:
    """A list that fills with gaps in router logits between the last expert in and the first out."""
    gaps: list[float] = []

    def look(_module: nn.Module, _inputs: object, out: tuple[Tensor, ...]) -> None:
        top = out[0].topk(3, dim=-1).values
        gaps.append(float((top[..., 1] - top[..., 2]).min()))

    for module in modules:
        module.mlp.gate.register_forward_hook(look)
    return gaps


@torch.no_grad()
def main() -> None:
    """Write everything and print what was written."""
    torch.manual_seed(0)
    model, mtp = build()
    gaps = watch_routers([*model.model.language_model.layers, mtp.mtp_block])
    cases = text_cases(model)
    cases |= mtp_cases(model, mtp, cases["prefill_71.final"])
    vision = vision_cases(model)
    cases |= vision | multimodal_cases(model, vision) | image_cases()
    cases = {name: tensor.contiguous().clone() for name, tensor in cases.items()}
    assert all(torch.isfinite(tensor).all() for tensor in cases.values())
    save_file(cases, HERE / "cases.safetensors")
    for path in HERE.iterdir():
        path.chmod(0o644)
    for name, tensor in cases.items():
        print(f"{name:36} {str(tensor.dtype).removeprefix('torch.'):8} {list(tensor.shape)}")
    print("largest |logit|", float(cases["prefill_200.logits"].abs().max()))
    print(
        "chunked against whole",
        float((cases["chunked_130.logits"] - cases["prefill_130.logits"]).abs().max()),
    )
    print("narrowest router choice", min(gaps))


if __name__ == "__main__":
    main()

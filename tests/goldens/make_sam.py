"""Make `sam/`: a tiny random SAM 3 image model and what transformers computes with it.

Run with torch 2.13 (CPU), torchvision and transformers 5.17; see README.md for the contents and the
command. Every parameter is drawn at random, of a size at which it matters, and rounded to bfloat16,
in which the file keeps it. The model leaves the geometry encoder out of prompts without boxes,
against the original: such a prompt is given one box that counts as padding (label -10).
"""

import copy
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchvision.ops import roi_align
from transformers import Sam3Config, Sam3Model

HERE = Path(__file__).parent / "sam"
PADDING = -10
CONTEXT = 8
EVERY = 13
"""Of a long array every so-manieth value is kept, counted through all axes."""
LONG = 8192

DETR = {"hidden_size": 32, "num_attention_heads": 4}
LAYERS = {**DETR, "intermediate_size": 64}

CONFIG: dict[str, Any] = {
    "architectures": ["Sam3Model"],
    "model_type": "sam3",
    "vision_config": {
        "model_type": "sam3_vision_model",
        "fpn_hidden_size": 32,
        "backbone_feature_sizes": [[48, 48], [24, 24], [12, 12]],
        "scale_factors": [4.0, 2.0, 1.0, 0.5],
        "backbone_config": {
            "model_type": "sam3_vit_model",
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 4,
            "num_attention_heads": 3,
            "num_channels": 3,
            "image_size": 48,
            "patch_size": 4,
            "window_size": 4,
            "global_attn_indexes": [1, 3],
            "pretrain_image_size": 24,
            "hidden_act": "gelu",
            "layer_norm_eps": 1e-5,
            "rope_parameters": {"rope_type": "axial", "rope_theta": 10000.0},
        },
    },
    "text_config": {
        "model_type": "clip_text_model",
        "vocab_size": 100,
        "hidden_size": 40,
        "intermediate_size": 56,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "max_position_embeddings": CONTEXT,
        "projection_dim": 16,
        "hidden_act": "gelu",
        "bos_token_id": 98,
        "eos_token_id": 99,
        "pad_token_id": 0,
    },
    "geometry_encoder_config": {**LAYERS, "num_layers": 2, "roi_size": 7},
    "detr_encoder_config": {**LAYERS, "num_layers": 2},
    "detr_decoder_config": {**LAYERS, "num_layers": 3, "num_queries": 10},
    "mask_decoder_config": {**DETR, "num_upsampling_stages": 3},
}

TRUNK, TEXT = "backbone.vision_backbone.trunk", "backbone.language_backbone.encoder"
NAMES = [  # of transformers -> of the original, one after the other
    (r"vision_encoder\.backbone\.embeddings\.position_embeddings", f"{TRUNK}.pos_embed"),
    (
        r"vision_encoder\.backbone\.embeddings\.patch_embeddings\.projection",
        f"{TRUNK}.patch_embed.proj",
    ),
    (r"vision_encoder\.backbone\.layer_norm", f"{TRUNK}.ln_pre"),
    (r"vision_encoder\.backbone\.layers", f"{TRUNK}.blocks"),
    (r"(blocks\.\d+)\.layer_norm", r"\1.norm"),
    (r"(blocks\.\d+)\.attention\.(.)_proj", r"\1.attn.\2"),
    (r"(blocks\.\d+)\.attn\.o\.", r"\1.attn.proj."),
    (r"vision_encoder\.neck\.fpn_layers", "backbone.vision_backbone.convs"),
    (r"convs\.0\.scale_layers\.0", "convs.0.dconv_2x2_0"),
    (r"convs\.0\.scale_layers\.2", "convs.0.dconv_2x2_1"),
    (r"convs\.1\.scale_layers\.0", "convs.1.dconv_2x2"),
    (r"(convs\.\d)\.proj1", r"\1.conv_1x1"),
    (r"(convs\.\d)\.proj2", r"\1.conv_3x3"),
    (r"text_encoder\.text_model\.embeddings\.token_embedding", f"{TEXT}.token_embedding"),
    (
        r"text_encoder\.text_model\.embeddings\.position_embedding.weight",
        f"{TEXT}.positional_embedding",
    ),
    (r"text_encoder\.text_model\.final_layer_norm", f"{TEXT}.ln_final"),
    (r"text_encoder\.text_model\.encoder\.layers", f"{TEXT}.transformer.resblocks"),
    (r"(resblocks\.\d+)\.self_attn", r"\1.attn"),
    (r"(resblocks\.\d+)\.layer_norm", r"\1.ln_"),
    (r"(resblocks\.\d+)\.mlp\.fc1", r"\1.mlp.c_fc"),
    (r"(resblocks\.\d+)\.mlp\.fc2", r"\1.mlp.c_proj"),
    (r"^text_projection", "backbone.language_backbone.resizer"),
    (r"geometry_encoder\.layers", "geometry_encoder.encode"),
    (r"geometry_encoder\.vision_layer_norm", "geometry_encoder.img_pre_norm"),
    (r"geometry_encoder\.prompt_layer_norm", "geometry_encoder.norm"),
    (r"geometry_encoder\.output_layer_norm", "geometry_encoder.encode_norm"),
    (r"detr_encoder", "transformer.encoder"),
    (r"((?:encode|encoder\.layers)\.\d+)\.cross_attn", r"\1.cross_attn_image"),
    (r"((?:encode|encoder\.layers)\.\d+)\.layer_norm", r"\1.norm"),
    (r"detr_decoder", "transformer.decoder"),
    (r"text_cross_attn_layer_norm", "catext_norm"),
    (r"vision_cross_attn_layer_norm", "norm1"),
    (r"self_attn_layer_norm", "norm2"),
    (r"mlp_layer_norm", "norm3"),
    (r"text_cross_attn", "ca_text"),
    (r"vision_cross_attn", "cross_attn"),
    (r"decoder\.output_layer_norm", "decoder.norm"),
    (r"decoder\.presence_layer_norm", "decoder.presence_token_out_norm"),
    (r"decoder\.box_head\.", "decoder.bbox_embed."),
    (r"decoder\.presence_head\.", "decoder.presence_token_head."),
    (r"decoder\.box_rpb_embed", "decoder.boxRPB_embed"),
    (r"((?:encode|layers)\.\d+)\.mlp\.fc", r"\1.linear"),
    (r"mask_decoder\.mask_embedder", "segmentation_head.mask_predictor.mask_embed"),
    (r"mask_decoder\.instance_projection", "segmentation_head.instance_seg_head"),
    (r"mask_decoder\.prompt_cross_attn_norm", "segmentation_head.cross_attn_norm"),
    (r"mask_decoder\.prompt_cross_attn", "segmentation_head.cross_attend_prompt"),
    (r"mask_decoder\.", "segmentation_head."),
    (r"dot_product_scoring\.text_mlp_out_norm", "dot_prod_scoring.prompt_mlp.out_norm"),
    (r"dot_product_scoring\.text_mlp", "dot_prod_scoring.prompt_mlp"),
    (r"dot_product_scoring\.text_proj", "dot_prod_scoring.prompt_proj"),
    (r"dot_product_scoring\.query_proj", "dot_prod_scoring.hs_proj"),
    (r"\.o_proj", ".out_proj"),
]
UNUSED = re.compile(
    r"convs\.3|text_encoder\.text_projection|conv_layers\.2|pixel_decoder\.norms\.2|semantic_proj"
)


def original(name: str) -> str:
    """The original's name of a parameter."""
    for pattern, replacement in NAMES:
        name = re.sub(pattern, replacement, name)
    # Perceptrons count their layers from 1 here, from 0 there.
    return re.sub(r"\.layer(\d)\.", lambda m: f".layers.{int(m[1]) - 1}.", name)


def weights(model: Sam3Model) -> dict[str, np.ndarray]:
    """Parameters under the original's names and in its packing, as the bits of bfloat16."""
    found = {
        original(k): v for k, v in model.state_dict().items() if not UNUSED.search(original(k))
    }
    table = found[f"{TRUNK}.pos_embed"]
    found[f"{TRUNK}.pos_embed"] = torch.cat([torch.zeros_like(table[:, :1]), table], 1)
    packed: dict[str, Tensor] = {}
    for name, tensor in found.items():
        match = re.fullmatch(r"(.+\.)([qkv])(_proj)?\.(\w+)", name)
        if match is None:
            packed[name] = tensor
        elif match[2] == "q":
            root, _, suffix, kind = match.groups(default="")
            parts = [found[f"{root}{part}{suffix}.{kind}"] for part in "qkv"]
            packed[f"{root}in_proj_{kind}" if suffix else f"{root}qkv.{kind}"] = torch.cat(parts)
    assert all(torch.equal(t, t.bfloat16().float()) for t in packed.values())
    return {name: t.bfloat16().view(torch.uint16).numpy() for name, t in packed.items()}


def randomise(model: Sam3Model) -> None:
    """Overwrite every parameter, in the order of names, by one that bfloat16 can hold."""
    rng = torch.Generator().manual_seed(31)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(parameter.shape, generator=rng)
            if "reference_points" in name:
                value = noise
            elif "embed.weight" in name or "embedding" in name or "presence_token" in name:
                value = 0.4 * noise
            elif name.endswith("bias"):
                value = 0.1 * noise
            elif noise.ndim == 1:
                value = 1 + 0.2 * noise
            else:
                inputs = noise.shape[0] if "scale_layers" in name else noise[0].numel()
                value = 1.3 * noise / math.sqrt(inputs)
            parameter.copy_(value.bfloat16())


def build(act: str) -> Sam3Model:
    """The model with the given activation in its trunk."""
    config = copy.deepcopy(CONFIG)
    config["vision_config"]["backbone_config"]["hidden_act"] = act
    model = Sam3Model(Sam3Config(**config)).float().eval()
    randomise(model)
    return model


def prompts() -> dict[str, Tensor]:
    """Four prompts about two pictures: words, boxes alike and unlike, both, and padding of each."""
    ids = torch.zeros(4, CONTEXT, dtype=torch.int64)
    for row, words in zip(ids, ([5, 17], [31, 8, 64, 2, 71], [17], [44, 45, 46]), strict=True):
        row[: len(words) + 2] = torch.tensor([98, *words, 99])
    boxes = torch.tensor(
        [
            [[0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5]],
            [[0.31, 0.42, 0.22, 0.37], [0.7, 0.6, 0.55, 0.9], [0.2, 0.9, 0.1, 0.2]],
            [[0.5, 0.5, 1.0, 1.0], [0.95, 0.04, 0.3, 0.2], [0.5, 0.5, 0.5, 0.5]],
            [[0.12, 0.11, 0.03, 0.01], [0.5, 0.5, 0.5, 0.5], [0.5, 0.5, 0.5, 0.5]],
        ]
    )
    x = PADDING
    labels = torch.tensor([[x, x, x], [1, 0, 1], [0, 1, x], [1, x, x]])
    return {"image": torch.tensor([0, 1, 0, 1]), "ids": ids, "boxes": boxes, "labels": labels}


def pictures() -> Tensor:
    """Two pictures of gradients and noise, `[2, 48, 48, 3]` uint8."""
    rng = torch.Generator().manual_seed(7)
    ramp = torch.linspace(0, 180, 48)
    smooth = torch.stack(
        [ramp[:, None].expand(48, 48), ramp.flip(0).expand(48, 48), (ramp[:, None] + ramp) / 2], -1
    )
    noise = torch.randint(0, 76, (2, 48, 48, 3), generator=rng)
    return (torch.stack([smooth, smooth.flip(0, 2)]) + noise).to(torch.uint8)


def run(model: Sam3Model, pixels: Tensor, asked: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Every part's output, channels last."""
    vision = model.get_vision_features((pixels.permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5)
    yield "trunk", vision.last_hidden_state
    for name, level in zip(("x4", "x2", "x1"), vision.fpn_hidden_states, strict=False):
        yield name, level.permute(0, 2, 3, 1)

    image = asked["image"]
    for name in ("fpn_hidden_states", "fpn_position_encoding"):
        vision[name] = tuple(level[image] for level in vision[name])
    mask = asked["ids"] != 0
    text = model.get_text_features(input_ids=asked["ids"], attention_mask=mask.long())
    yield "text", text.pooler_output * mask[..., None]

    seen: dict[str, Any] = {}
    for name in ("geometry_encoder", "detr_encoder", "detr_decoder"):
        module = getattr(model, name)
        module.register_forward_hook(lambda _m, _i, out, name=name: seen.__setitem__(name, out))
    labels = asked["labels"]
    for name, chosen in (("words", torch.full_like(labels, PADDING)), ("mixed", labels)):
        out = model(
            vision_embeds=vision,
            text_embeds=text,
            attention_mask=mask.long(),
            input_boxes=asked["boxes"],
            input_boxes_labels=chosen,
        )
        valid = seen["geometry_encoder"].attention_mask
        yield f"{name}.geometry", seen["geometry_encoder"].last_hidden_state * valid[..., None]
        yield f"{name}.memory", seen["detr_encoder"].last_hidden_state
        yield f"{name}.hidden", seen["detr_decoder"].intermediate_hidden_states[-1]
        yield f"{name}.logits", out.pred_logits
        yield f"{name}.presence", out.presence_logits[:, 0]
        corners = out.pred_boxes
        yield (
            f"{name}.boxes",
            torch.cat(
                [(corners[..., :2] + corners[..., 2:]) / 2, corners[..., 2:] - corners[..., :2]], -1
            ),
        )
        yield f"{name}.masks", out.pred_masks


def pooling() -> dict[str, Tensor]:
    """RoIAlign of a map of 40 x 40 cells: whole, beyond the edges, less than a cell, long."""
    rng = torch.Generator().manual_seed(11)
    features = torch.randn(2, 40, 40, generator=rng)
    boxes = torch.tensor(
        [
            [0.5, 0.5, 1.0, 1.0],
            [0.97, 0.02, 0.3, 0.25],
            [0.03, 0.5, 0.5, 0.9],
            [0.333, 0.777, 0.01, 0.004],
            [0.5, 0.61, 0.93, 0.03],
            [0.0, 1.0, 0.1, 0.1],
            [0.25, 0.25, 0.175, 0.35],
        ]
    )
    corners = torch.cat([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], 1)
    pooled = roi_align(features[None], [corners * 40], 7)
    return {
        "pool.features": features.permute(1, 2, 0),
        "pool.boxes": boxes,
        "pool.pooled": pooled.permute(0, 2, 3, 1),
    }


def kept(array: np.ndarray) -> np.ndarray:
    """All of a short array, some of a long one."""
    return array.reshape(-1)[::EVERY] if array.size > LONG else array


@torch.no_grad()
def main() -> None:
    """Write everything and print what was written."""
    HERE.mkdir(exist_ok=True)
    (HERE / "config.json").write_text(json.dumps(CONFIG, indent=2) + "\n")
    pixels, asked = pictures(), prompts()
    inputs = {"pixels": pixels, **asked, **pooling()}
    arrays = {name: value.numpy() for name, value in inputs.items()}
    outputs = {}
    for act, kind in (("gelu", "erf"), ("gelu_pytorch_tanh", "tanh")):
        model = build(act)
        outputs[kind] = {name: out.numpy() for name, out in run(model, pixels, asked)}
        arrays |= {f"{kind}.{name}": kept(out) for name, out in outputs[kind].items()}
    for name, out in outputs["erf"].items():
        assert np.isfinite(out).all()
        gap = np.linalg.norm(out - outputs["tanh"][name]) / np.linalg.norm(out)
        print(f"{name:16} {list(out.shape)!s:18} std {out.std():.3f}  erf to tanh {gap:.1e}")
    np.savez_compressed(HERE / "weights.npz", **weights(model))
    np.savez_compressed(HERE / "cases.npz", **arrays)
    for path in HERE.iterdir():
        path.chmod(0o644)
        print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main()

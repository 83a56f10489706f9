"""Make `sam_clicks.npz`: a tiny random click head and what transformers computes with it.

Run with torch 2.13 (CPU) and transformers 5.17; see README.md. Every parameter is drawn at random,
since a fresh initialisation (norms 1, biases 0) hides mistakes, and has few enough bits to
compress well. Weights are stored under the names of Meta's `sam3.pt` (the prefix `detector.` of the
neck left out).
"""

import re
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import Sam3TrackerConfig, Sam3TrackerModel

HERE = Path(__file__).parent

WIDTH, IMAGE, PATCH, GRID = 32, 84, 14, 6
CONFIG = {
    "vision_config": {
        "model_type": "sam3_vision_model",
        "backbone_config": {
            "model_type": "sam3_vit_model",
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": IMAGE,
            "patch_size": PATCH,
            "window_size": 3,
            "global_attn_indexes": [0],
            "pretrain_image_size": 42,
        },
        "fpn_hidden_size": WIDTH,
        "backbone_feature_sizes": [[4 * GRID] * 2, [2 * GRID] * 2, [GRID] * 2],
        "scale_factors": [4.0, 2.0, 1.0],
    },
    "prompt_encoder_config": {"hidden_size": WIDTH, "image_size": IMAGE, "patch_size": PATCH},
    "mask_decoder_config": {
        "hidden_size": WIDTH,
        "mlp_dim": 64,
        "num_attention_heads": 4,
        "iou_head_hidden_dim": WIDTH,
    },
}

# Of transformers, to Meta's; the first that matches counts.
NAMES = [
    (r"prompt_encoder\.shared_embedding\.positional_embedding",
     r"sam_prompt_encoder.pe_layer.positional_encoding_gaussian_matrix"),
    (r"prompt_encoder\.mask_embed\.conv(\d)", lambda m: _down(3 * int(m[1]) - 3)),
    (r"prompt_encoder\.mask_embed\.layer_norm(\d)", lambda m: _down(3 * int(m[1]) - 2)),
    (r"prompt_encoder\.", r"sam_prompt_encoder."),
    (r"mask_decoder\.upscale_conv1", r"sam_mask_decoder.output_upscaling.0"),
    (r"mask_decoder\.upscale_layer_norm", r"sam_mask_decoder.output_upscaling.1"),
    (r"mask_decoder\.upscale_conv2", r"sam_mask_decoder.output_upscaling.3"),
    (r"mask_decoder\.", r"sam_mask_decoder."),
    (r"no_memory_embedding", r"no_mem_embed"),
]  # fmt: skip
INSIDE = [
    (r"\.o_proj\.", ".out_proj."),
    (r"\.layer_norm(\d)\.", r".norm\1."),
    (r"\.layer_norm_final_attn\.", ".norm_final_attn."),
    (r"\.mlp\.proj_in\.", ".mlp.lin1."),
    (r"\.mlp\.proj_out\.", ".mlp.lin2."),
    (r"(mlps\.\d|head)\.layers\.0\.", r"\1.layers.1."),
    (r"(mlps\.\d|head)\.proj_in\.", r"\1.layers.0."),
    (r"(mlps\.\d|head)\.proj_out\.", r"\1.layers.2."),
]
NECK = {
    "0.scale_layers.0": "0.dconv_2x2_0",
    "0.scale_layers.2": "0.dconv_2x2_1",
    "1.scale_layers.0": "1.dconv_2x2",
    **{f"{i}.proj1": f"{i}.conv_1x1" for i in range(3)},
    **{f"{i}.proj2": f"{i}.conv_3x3" for i in range(3)},
}


def _down(index: int) -> str:
    return f"sam_prompt_encoder.mask_downscaling.{index}"


def published(name: str) -> str | None:
    """The name in Meta's file, None for the trunk and for what that file has once."""
    if match := re.fullmatch(r"vision_encoder\.neck\.fpn_layers\.(.*)\.(weight|bias)", name):
        return f"backbone.vision_backbone.sam2_convs.{NECK[match[1]]}.{match[2]}"
    for pattern, replacement in NAMES:
        if re.match(pattern, name):
            name = re.sub("^" + pattern, replacement, name)
            break
    else:
        return None
    for pattern, replacement in INSIDE:
        name, done = re.subn(pattern, replacement, name)
        if done:
            break
    return f"tracker.{name}"


def random_parameter(name: str, tensor: Tensor, rng: torch.Generator) -> Tensor:
    """Random values in bfloat16's precision."""
    noise = torch.randn(tensor.shape, generator=rng)
    if tensor.ndim == 1:
        is_norm = "norm" in name and name.endswith("weight")
        value = 1 + 0.1 * noise if is_norm else 0.05 * noise
    elif re.search(r"embed|token\.|tokens\.", name) and "mask_embed.conv" not in name:
        value = noise if "positional" in name else 0.5 * noise
    elif re.search(r"upscale_conv|scale_layers", name):  # [in, out, 2, 2]
        value = noise / tensor.shape[0] ** 0.5
    else:
        value = noise / tensor[0].numel() ** 0.5
    if "mlps.0.proj_out" in name:  # so that some first candidates are stable, and some are not
        value = 16 * value
    return value.to(torch.bfloat16).float()


def randomise(model: Sam3TrackerModel) -> dict[str, np.ndarray]:
    """Give all parameters random values; those of the click head, under Meta's names."""
    rng, weights = torch.Generator().manual_seed(0), {}
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    with torch.no_grad():
        for name, tensor in named.items():
            if "rotary" in name or "shared_image_embedding" in name:
                continue
            tensor.copy_(random_parameter(name, tensor, rng))
            if meta := published(name):
                weights[meta] = tensor.numpy().copy()
        model.shared_image_embedding.positional_embedding.copy_(
            model.prompt_encoder.shared_embedding.positional_embedding
        )
    points = weights.pop("tracker.sam_prompt_encoder.point_embed.weight")
    for i, row in enumerate(points):
        weights[f"tracker.sam_prompt_encoder.point_embeddings.{i}.weight"] = row[None]
    return weights


def cases() -> dict[str, dict[str, Tensor]]:
    """Prompts for two pictures, in pixels of the model: K objects a picture, N points each."""
    rng = torch.Generator().manual_seed(1)

    def pixels(*shape: int) -> Tensor:
        return (IMAGE * torch.rand(shape, generator=rng)).round()

    corners = pixels(2, 2, 2, 2).sort(2).values
    points = pixels(2, 2, 2, 2)
    labels = torch.tensor([[[1, 0], [0, 1]], [[1, 1], [0, 0]]])
    masks = 4 * torch.randn((2, 1, 4 * GRID, 4 * GRID), generator=rng).to(torch.bfloat16).float()
    return {
        "click": {"input_points": pixels(2, 6, 1, 2), "input_labels": torch.ones(2, 6, 1).int()},
        "points": {"input_points": points, "input_labels": labels},
        "not_points": {"input_points": points, "input_labels": labels.where(labels > 0, -1)},
        "box": {"input_boxes": corners.reshape(2, 2, 4)},
        "box_and_points": {
            "input_points": points,
            "input_labels": labels,
            "input_boxes": corners.reshape(2, 2, 4),
        },
        "mask": {"input_masks": masks},
        "mask_and_click": {
            "input_masks": masks,
            "input_points": pixels(2, 1, 1, 2),
            "input_labels": torch.ones(2, 1, 1).int(),
        },
    }


@torch.no_grad()
def main() -> None:
    model = Sam3TrackerModel(Sam3TrackerConfig(**CONFIG)).eval()
    arrays = randomise(model)

    seen = {}
    model.vision_encoder.backbone.register_forward_hook(
        lambda module, inputs, output: seen.update(trunk=output.last_hidden_state)
    )
    pictures = torch.randn((2, 3, IMAGE, IMAGE), generator=torch.Generator().manual_seed(2))
    # What the trunk gives is the input here: the test begins behind it.
    s0, s1, x1 = model.get_image_embeddings(pictures)
    arrays["trunk"] = seen["trunk"].reshape(2, GRID, GRID, -1).numpy()
    for name, map_ in {"s0": s0, "s1": s1, "x1": x1}.items():
        arrays[name] = map_.permute(0, 2, 3, 1).numpy()

    for name, prompt in cases().items():
        for key, value in prompt.items():
            arrays[f"{name}.{key}"] = value.numpy()
        outputs = {
            kind: model(image_embeddings=[s0, s1, x1], multimask_output=kind == "many", **prompt)
            for kind in ("many", "one")
        }
        for kind, output in outputs.items():
            arrays[f"{name}.{kind}.masks"] = output.pred_masks.numpy()
            arrays[f"{name}.{kind}.iou"] = output.iou_scores.numpy()
        arrays[f"{name}.present"] = outputs["one"].object_score_logits[..., 0].numpy()
        fell_back = (outputs["one"].iou_scores == outputs["many"].iou_scores).any(-1)
        print(f"{name}: {int(fell_back.sum())} of {fell_back.numel()} fell back,",
              f"masks {outputs['many'].pred_masks.std():.2f}")  # fmt: skip
    np.savez_compressed(HERE / "sam_clicks.npz", **arrays)


if __name__ == "__main__":
    main()

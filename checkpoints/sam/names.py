"""The names of tensors: Meta's, as `jaxinfer.sam.params` has them, and those of transformers."""

import re
from collections.abc import Iterator, Mapping

from jaxinfer.sam.leaves import Leaf

TRACKER = "tracker."

META_PREFIXES: Mapping[str, str] = {
    "detector.": "",
    "sam3_model.": "",
    "tracker.": TRACKER,
    "sam2_predictor.": TRACKER,
}
"""Prefixes of Meta's files, released ones and those that training writes; what they become."""

TRANSFORMERS_PREFIXES: Mapping[str, str] = {"detector_model.": "", "": ""}
"""Prefixes of `Sam3VideoModel` and `Sam3Model`."""

TRANSFORMERS_TRACKER = ("tracker_model.", "tracker_neck.")
"""Prefixes of what `Sam3VideoModel` has beside the image model."""

Rules = tuple[tuple[str, str], ...]

_PACKED: Rules = (("in_proj_", "{}_proj."),)
_ATTENTION: Rules = (*_PACKED, ("out_proj", "o_proj"))
_MLP: Rules = (
    (r"\.layers\.0\.", ".layer1."),
    (r"\.layers\.1\.", ".layer2."),
    (r"\.layers\.2\.", ".layer3."),
)
_CROSS_LAYER: Rules = (
    *_ATTENTION,
    ("cross_attn_image", "cross_attn"),
    (r"\.linear(\d)", r".mlp.fc\1"),
    (r"\.norm(\d)", r".layer_norm\1"),
)

_SECTIONS: tuple[tuple[str, str, Rules], ...] = (
    (
        "backbone.vision_backbone.trunk.",
        "vision_encoder.backbone.",
        (
            ("pos_embed", "embeddings.position_embeddings"),
            (r"patch_embed\.proj", "embeddings.patch_embeddings.projection"),
            ("ln_pre", "layer_norm"),
            ("blocks", "layers"),
            (r"\.norm", ".layer_norm"),
            (r"attn\.qkv", "attention.{}_proj"),
            (r"attn\.proj", "attention.o_proj"),
        ),
    ),
    (
        "backbone.vision_backbone.convs.",
        "vision_encoder.neck.fpn_layers.",
        (
            ("dconv_2x2_0", "scale_layers.0"),
            ("dconv_2x2_1", "scale_layers.2"),
            ("dconv_2x2", "scale_layers.0"),
            ("conv_1x1", "proj1"),
            ("conv_3x3", "proj2"),
        ),
    ),
    (
        "backbone.language_backbone.encoder.",
        "text_encoder.",
        (
            ("^token_embedding", "text_model.embeddings.token_embedding"),
            ("^positional_embedding", "text_model.embeddings.position_embedding.weight"),
            (r"^transformer\.resblocks", "text_model.encoder.layers"),
            ("^ln_final", "text_model.final_layer_norm"),
            ("^text_projection", "text_projection.weight"),
            (r"\.attn", ".self_attn"),
            *_PACKED,
            ("ln_", "layer_norm"),
            ("c_fc", "fc1"),
            ("c_proj", "fc2"),
        ),
    ),
    ("backbone.language_backbone.resizer.", "text_projection.", ()),
    (
        "geometry_encoder.",
        "geometry_encoder.",
        (
            *_CROSS_LAYER,
            (r"^encode\.", "layers."),
            ("^img_pre_norm", "vision_layer_norm"),
            (r"^norm\.", "prompt_layer_norm."),
            ("^encode_norm", "output_layer_norm"),
        ),
    ),
    ("transformer.encoder.", "detr_encoder.", _CROSS_LAYER),
    (
        "transformer.decoder.",
        "detr_decoder.",
        (
            *_ATTENTION,
            *_MLP,
            (r"\.cross_attn\.", ".vision_cross_attn."),
            ("ca_text", "text_cross_attn"),
            # Out of order in Meta's code: the second norm follows the first attention.
            (r"\.norm1", ".vision_cross_attn_layer_norm"),
            (r"\.norm2", ".self_attn_layer_norm"),
            (r"\.norm3", ".mlp_layer_norm"),
            (r"\.catext_norm", ".text_cross_attn_layer_norm"),
            (r"\.linear(\d)", r".mlp.fc\1"),
            (r"^norm\.", "output_layer_norm."),
            ("^bbox_embed", "box_head"),
            ("^boxRPB", "box_rpb"),
            ("^presence_token_head", "presence_head"),
            ("^presence_token_out_norm", "presence_layer_norm"),
        ),
    ),
    (
        "segmentation_head.",
        "mask_decoder.",
        (
            *_ATTENTION,
            (r"mask_predictor\.mask_embed", "mask_embedder"),
            ("^instance_seg_head", "instance_projection"),
            ("^semantic_seg_head", "semantic_projection"),
            ("^cross_attend_prompt", "prompt_cross_attn"),
            ("^cross_attn_norm", "prompt_cross_attn_norm"),
        ),
    ),
    (
        "dot_prod_scoring.",
        "dot_product_scoring.",
        (
            *_MLP,
            ("prompt_mlp", "text_mlp"),
            (r"\.out_norm", "_out_norm"),
            ("prompt_proj", "text_proj"),
            ("hs_proj", "query_proj"),
        ),
    ),
)
"""Parts of the model: Meta's prefix, that of transformers, and how the rest of a name changes
(regular expressions, one after another)."""


def in_transformers(leaf: Leaf) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors of `Sam3Model` that together are one of Meta's.

    They are its parts along the first axis: query, key and value where Meta packs them, else one.
    The position table has no slot for the class token, and CLIP's projection is transposed.
    """
    for prefix, replacement, rules in _SECTIONS:
        if leaf.name.startswith(prefix):
            name = leaf.name.removeprefix(prefix)
            for pattern, new in rules:
                name = re.sub(pattern, new, name)
            first, *rest = leaf.shape
            if "{}" in name:
                for part in "qkv":
                    yield replacement + name.format(part), (first // 3, *rest)
            elif leaf.layout == "table":
                yield replacement + name, (first, rest[0] - 1, *rest[1:])
            elif name == "text_projection.weight":
                yield replacement + name, leaf.shape[::-1]
            else:
                yield replacement + name, leaf.shape

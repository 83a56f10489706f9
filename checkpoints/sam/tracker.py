"""The tensors of Meta's video trackers, which hold the click heads too.

A line of a table: name, shape and, if it is a module with a bias, the bias's length. A module has
`.weight` and `.bias`; a line without bias is one tensor. Braces stand for several names.
"""

import re
from collections.abc import Iterator

_PROMPT_ENCODER = """
pe_layer.positional_encoding_gaussian_matrix 2x128
point_embeddings.{0,1,2,3}.weight 1x256
not_a_point_embed.weight 1x256
mask_downscaling.0 4x1x2x2 4
mask_downscaling.1 4 4
mask_downscaling.3 16x4x2x2 16
mask_downscaling.4 16 16
mask_downscaling.6 256x16x1x1 256
no_mask_embed.weight 1x256
"""

_TWO_WAY = """
transformer.layers.{0,1}.self_attn.{q,k,v,out}_proj 256x256 256
transformer.layers.{0,1}.cross_attn_{token_to_image,image_to_token}.{q,k,v}_proj 128x256 128
transformer.layers.{0,1}.cross_attn_{token_to_image,image_to_token}.out_proj 256x128 256
transformer.layers.{0,1}.norm{1,2,3,4} 256 256
transformer.layers.{0,1}.mlp.lin1 2048x256 2048
transformer.layers.{0,1}.mlp.lin2 256x2048 256
transformer.final_attn_token_to_image.{q,k,v}_proj 128x256 128
transformer.final_attn_token_to_image.out_proj 256x128 256
transformer.norm_final_attn 256 256
output_upscaling.0 256x64x2x2 64
output_upscaling.1 64 64
output_upscaling.3 64x32x2x2 32
conv_s0 32x256x1x1 32
conv_s1 64x256x1x1 64
iou_prediction_head.layers.{0,1} 256x256 256
pred_obj_score_head.layers.{0,1} 256x256 256
pred_obj_score_head.layers.2 1x256 1
"""

_ONE_OBJECT = (
    _TWO_WAY
    + """
iou_token.weight 1x256
mask_tokens.weight 4x256
obj_score_token.weight 1x256
output_hypernetworks_mlps.{0,1,2,3}.layers.{0,1} 256x256 256
output_hypernetworks_mlps.{0,1,2,3}.layers.2 32x256 32
iou_prediction_head.layers.2 4x256 4
"""
)

_SIXTEEN_OBJECTS = (
    _TWO_WAY
    + """
iou_token.weight 16x256
mask_tokens.weight 48x256
obj_score_token.weight 16x256
output_hypernetworks_mlps.{0,1,2}.layers.{0,1} 256x256 256
output_hypernetworks_mlps.{0,1,2}.layers.2 32x256 32
iou_prediction_head.layers.2 3x256 3
"""
)

_FUSER = """
maskmem_backbone.pix_feat_proj 256x256x1x1 256
maskmem_backbone.fuser.layers.{0,1}.gamma 256
maskmem_backbone.fuser.layers.{0,1}.dwconv 256x1x7x7 256
maskmem_backbone.fuser.layers.{0,1}.norm 256 256
maskmem_backbone.fuser.layers.{0,1}.pwconv1 1024x256 1024
maskmem_backbone.fuser.layers.{0,1}.pwconv2 256x1024 256
transformer.encoder.layers.{0,1,2,3}.linear1 2048x256 2048
transformer.encoder.layers.{0,1,2,3}.linear2 256x2048 256
transformer.encoder.layers.{0,1,2,3}.norm{1,2,3} 256 256
transformer.encoder.norm 256 256
obj_ptr_proj.layers.{0,1,2} 256x256 256
"""

_MEMORY_3 = (
    _FUSER
    + """
maskmem_tpos_enc 7x1x1x64
no_mem_embed 1x1x256
no_mem_pos_enc 1x1x256
no_obj_ptr 1x256
no_obj_embed_spatial 1x64
mask_downsample 1x1x4x4 1
transformer.encoder.layers.{0,1,2,3}.self_attn.{q,k,v,out}_proj 256x256 256
transformer.encoder.layers.{0,1,2,3}.cross_attn_image.{q,out}_proj 256x256 256
transformer.encoder.layers.{0,1,2,3}.cross_attn_image.{k,v}_proj 256x64 256
maskmem_backbone.mask_downsampler.encoder.0 4x1x3x3 4
maskmem_backbone.mask_downsampler.encoder.1 4 4
maskmem_backbone.mask_downsampler.encoder.3 16x4x3x3 16
maskmem_backbone.mask_downsampler.encoder.4 16 16
maskmem_backbone.mask_downsampler.encoder.6 64x16x3x3 64
maskmem_backbone.mask_downsampler.encoder.7 64 64
maskmem_backbone.mask_downsampler.encoder.9 256x64x3x3 256
maskmem_backbone.mask_downsampler.encoder.10 256 256
maskmem_backbone.mask_downsampler.encoder.12 256x256x1x1 256
maskmem_backbone.out_proj 64x256x1x1 64
obj_ptr_tpos_proj 64x256 64
"""
)

_MEMORY_31 = (
    _FUSER
    + """
maskmem_tpos_enc 7x1x1x256
interactivity_no_mem_embed 1x1x256
{no_obj_embed_spatial,output_valid_embed,output_invalid_embed} 16x256
interactive_mask_downsample 1x1x4x4 1
transformer.encoder.layers.{0,1,2,3}.{self,cross}_attn_{q,k,v,out}_proj 256x256 256
transformer.encoder.layers.{0,1,2,3}.image_cross_attn_{q,k}_proj 256x256 256
maskmem_backbone.mask_downsampler.encoder.0 16x32x3x3 16
maskmem_backbone.mask_downsampler.encoder.1 16 16
maskmem_backbone.mask_downsampler.encoder.3 64x16x3x3 64
maskmem_backbone.mask_downsampler.encoder.4 64 64
maskmem_backbone.mask_downsampler.encoder.6 256x64x3x3 256
maskmem_backbone.mask_downsampler.encoder.7 256 256
maskmem_backbone.mask_downsampler.encoder.9 1024x256x3x3 1024
maskmem_backbone.mask_downsampler.encoder.10 1024 1024
maskmem_backbone.mask_downsampler.encoder.12 256x1024x1x1 256
no_obj_ptr_linear 256x256 256
image_pe_layer.positional_encoding_gaussian_matrix 2x128
interactive_obj_ptr_proj.layers.{0,1,2} 256x256 256
obj_ptr_tpos_proj 256x256 256
"""
)


def tracker(version: str) -> dict[str, tuple[int, ...]]:
    """Names (with `tracker.`) and shapes of the tracker's tensors; `version`: "3" or "3.1"."""
    if version == "3":
        root = "tracker."
        parts = {"": _MEMORY_3, "sam_prompt_encoder.": _PROMPT_ENCODER}
        parts["sam_mask_decoder."] = _ONE_OBJECT
    else:
        root = "tracker.model."
        parts = {"": _MEMORY_31, "interactive_sam_prompt_encoder.": _PROMPT_ENCODER}
        parts["interactive_sam_mask_decoder."] = _ONE_OBJECT
        parts["sam_mask_decoder."] = _SIXTEEN_OBJECTS
    return {
        root + prefix + name: shape
        for prefix, table in parts.items()
        for name, shape in _tensors(table)
    }


def _tensors(table: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    for line in table.split("\n"):
        match line.split():
            case [pattern, shape]:
                for name in _expand(pattern):
                    yield name, _shape(shape)
            case [pattern, shape, bias]:
                for name in _expand(pattern):
                    yield f"{name}.weight", _shape(shape)
                    yield f"{name}.bias", _shape(bias)


def _shape(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split("x")))


def _expand(pattern: str) -> Iterator[str]:
    """`a{b,c}` gives `ab` and `ac`; several braces give all combinations."""
    braces = re.search(r"\{(.*?)\}", pattern)
    if braces is None:
        yield pattern
        return
    for choice in braces[1].split(","):
        yield from _expand(pattern[: braces.start()] + choice + pattern[braces.end() :])

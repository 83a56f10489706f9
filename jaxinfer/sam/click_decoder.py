"""The mask decoder of the click head: a two-way transformer between prompt tokens and the picture,
then upscaling to mask logits."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.sam import leaves
from jaxinfer.sam.config import Config
from jaxinfer.sam.layers import attend, double, feed_forward, gelu, layer_norm, linear, perceptron
from jaxinfer.sam.params import Linear, Norm
from jaxinfer.tree import tree

LAYERS = 2
MASKS = 4
MAP_NORM_EPS = 1e-6

Perceptron = tuple[Linear, Linear, Linear]


@tree
class SplitAttention:
    """Attention whose inner width may be half of the outer one."""

    query: Linear
    key: Linear
    value: Linear
    output: Linear


@tree
class TwoWayLayer:
    """A post-norm layer, in the order of computation."""

    self_attention: SplitAttention
    self_norm: Norm
    token_to_image: SplitAttention
    token_norm: Norm
    linear1: Linear
    linear2: Linear
    mlp_norm: Norm
    image_to_token: SplitAttention
    image_norm: Norm


@tree
class MaskDecoder:
    """The decoder.

    `object_token`, `iou_token`: `[1, D]`; `mask_tokens`: `[4, D]`. `conv_s0` and `conv_s1` act on
    the picture's features alone. `mask_heads`: a perceptron for each mask token.
    """

    object_token: Any
    iou_token: Any
    mask_tokens: Any
    layers: tuple[TwoWayLayer, ...]
    final_attention: SplitAttention
    final_norm: Norm
    conv_s0: Linear
    conv_s1: Linear
    up1: Linear
    up_norm: Norm
    up2: Linear
    mask_heads: tuple[Perceptron, ...]
    iou_head: Perceptron
    object_head: Perceptron


def structure(cfg: Config, root: str) -> MaskDecoder:
    """The tree of `Leaf`; Meta's names begin with `root`."""
    d, transformer = cfg.width, f"{root}.transformer"
    return MaskDecoder(
        object_token=leaves.table(f"{root}.obj_score_token.weight", 1, d),
        iou_token=leaves.table(f"{root}.iou_token.weight", 1, d),
        mask_tokens=leaves.table(f"{root}.mask_tokens.weight", MASKS, d),
        layers=tuple(_layer(f"{transformer}.layers.{i}", cfg) for i in range(LAYERS)),
        final_attention=_attention(f"{transformer}.final_attn_token_to_image", d, d // 2),
        final_norm=leaves.norm(f"{transformer}.norm_final_attn", d),
        conv_s0=leaves.conv(f"{root}.conv_s0", d // 8, d, 1),
        conv_s1=leaves.conv(f"{root}.conv_s1", d // 4, d, 1),
        up1=leaves.conv(f"{root}.output_upscaling.0", d // 4, d, 2, "transposed"),
        up_norm=leaves.norm(f"{root}.output_upscaling.1", d // 4),
        up2=leaves.conv(f"{root}.output_upscaling.3", d // 8, d // 4, 2, "transposed"),
        mask_heads=tuple(
            _perceptron(f"{root}.output_hypernetworks_mlps.{i}", d, d // 8) for i in range(MASKS)
        ),
        iou_head=_perceptron(f"{root}.iou_prediction_head", d, MASKS),
        object_head=_perceptron(f"{root}.pred_obj_score_head", d, 1),
    )


def _layer(name: str, cfg: Config) -> TwoWayLayer:
    d, inner = cfg.width, cfg.intermediate_size
    return TwoWayLayer(
        self_attention=_attention(f"{name}.self_attn", d, d),
        self_norm=leaves.norm(f"{name}.norm1", d),
        token_to_image=_attention(f"{name}.cross_attn_token_to_image", d, d // 2),
        token_norm=leaves.norm(f"{name}.norm2", d),
        linear1=leaves.linear(f"{name}.mlp.lin1", inner, d),
        linear2=leaves.linear(f"{name}.mlp.lin2", d, inner),
        mlp_norm=leaves.norm(f"{name}.norm3", d),
        image_to_token=_attention(f"{name}.cross_attn_image_to_token", d, d // 2),
        image_norm=leaves.norm(f"{name}.norm4", d),
    )


def _attention(name: str, width: int, inner: int) -> SplitAttention:
    return SplitAttention(
        query=leaves.linear(f"{name}.q_proj", inner, width),
        key=leaves.linear(f"{name}.k_proj", inner, width),
        value=leaves.linear(f"{name}.v_proj", inner, width),
        output=leaves.linear(f"{name}.out_proj", width, inner),
    )


def _perceptron(name: str, width: int, out: int) -> Perceptron:
    return (
        leaves.linear(f"{name}.layers.0", width, width),
        leaves.linear(f"{name}.layers.1", width, width),
        leaves.linear(f"{name}.layers.2", out, width),
    )


def decode(
    params: MaskDecoder,
    cfg: Config,
    image: jax.Array,
    positions: jax.Array,
    s1: jax.Array,
    s0: jax.Array,
    prompt: jax.Array,
    seen: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Mask logits `[P, 4, 4g, 4g]`, IoU `[P, 4]` as the head gives it and the logit of there being
    an object `[P]`, all float32.

    Args:
        image: the picture's features with the mask prompt added, `[P, g, g, D]`.
        positions: of its cells, `[g, g, D]`.
        s1: finer features, `[P, 2g, 2g, D/4]`.
        s0: the finest, `[P, 4g, 4g, D/8]`.
        prompt: tokens of points and box corners, `[P, N, D]`.
        seen: bool `[P, N]`, False at tokens that are only padding.
    """
    learnt = jnp.concatenate([params.object_token, params.iou_token, params.mask_tokens])
    count = len(prompt)
    tokens = jnp.concatenate([jnp.broadcast_to(learnt, (count, *learnt.shape)), prompt], axis=1)
    seen = jnp.pad(seen, ((0, 0), (len(learnt), 0)), constant_values=True)
    tokens, image = _transformer(params, cfg, tokens, image, positions, seen)

    x = layer_norm(double(image, params.up1) + s1, params.up_norm, MAP_NORM_EPS)
    x = gelu(double(gelu(x), params.up2) + s0)
    filters = jnp.stack(
        [perceptron(tokens[:, 2 + i], head) for i, head in enumerate(params.mask_heads)], axis=1
    )
    masks = jnp.einsum("pmd,phwd->pmhw", filters, x, preferred_element_type=jnp.float32)
    iou = perceptron(tokens[:, 1], params.iou_head).astype(jnp.float32)
    present = perceptron(tokens[:, 0], params.object_head).astype(jnp.float32)
    return masks, iou, present[:, 0]


def _transformer(
    params: MaskDecoder,
    cfg: Config,
    tokens: jax.Array,
    image: jax.Array,
    positions: jax.Array,
    seen: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Tokens `[P, N, D]` and the picture `[P, g, g, D]`, each having looked at the other."""
    shape, heads, d = image.shape, cfg.num_heads, cfg.width
    start = tokens
    image, positions = image.reshape(len(image), -1, d), positions.reshape(-1, d)
    for i, layer in enumerate(params.layers):
        if i == 0:  # the tokens are their own positions still, and are replaced
            tokens = _attend(layer.self_attention, tokens, tokens, tokens, heads, seen)
        else:
            placed = tokens + start
            tokens += _attend(layer.self_attention, placed, placed, tokens, heads, seen)
        tokens = layer_norm(tokens, layer.self_norm)
        tokens += _attend(layer.token_to_image, tokens + start, image + positions, image, heads)
        tokens = layer_norm(tokens, layer.token_norm)
        tokens += feed_forward(tokens, layer.linear1, layer.linear2)
        tokens = layer_norm(tokens, layer.mlp_norm)
        image += _attend(
            layer.image_to_token, image + positions, tokens + start, tokens, heads, seen
        )
        image = layer_norm(image, layer.image_norm)
    tokens += _attend(params.final_attention, tokens + start, image + positions, image, heads)
    return layer_norm(tokens, params.final_norm), image.reshape(shape)


def _attend(
    p: SplitAttention,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    heads: int,
    seen: jax.Array | None = None,
) -> jax.Array:
    out = attend(linear(query, p.query), linear(key, p.key), linear(value, p.value), heads, seen)
    return linear(out, p.output)

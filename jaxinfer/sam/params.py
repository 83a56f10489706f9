"""The parameter tree of SAM 3 and 3.1: one description from which all else about weights follows.

`structure(cfg)` returns a `Params` whose leaves are `Leaf`: the tensor of Meta's file that a
parameter is made of, and how it is laid out here. From it come random initialisation (`init`), the
shapes (`shapes`), and the reader's checks in `checkpoints.sam`.

Matrices are `[N, K]` (`y = x Wᵀ`), as in the files. Convolutions lie `[height, width, in, out]`;
the transposed ones, whose 2 x 2 windows do not overlap, and the patch projection are matrices.
"""

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jaxinfer.sam.config import Config
from jaxinfer.tree import tree

Layout = Literal["plain", "patch", "conv", "transposed", "table"]
Init = Literal["matrix", "ones", "zeros", "table"]


@dataclass(frozen=True)
class Leaf:
    """One parameter.

    Attributes:
        name: its tensor in Meta's `sam3.pt`, without the prefix `detector.` (for the click head,
            with `tracker.`).
        shape: as the file has it.
        layout: how it is laid out here.
            "plain": as in the file.
            "patch": `[out, in, h, w]` becomes `[out, h w in]`.
            "conv": `[out, in, h, w]` becomes `[h, w, in, out]`.
            "transposed": `[in, out, h, w]` becomes `[h w out, in]`.
            "table": `[1, 1 + n, d]`, the class token's slot in front, becomes `[n, d]`.
        init: how random initialisation draws it: "matrix" (normal, 1/fan-in), "table" (normal,
            0.3), "ones" (norms) or "zeros" (biases), both with noise so that no error hides.
    """

    name: str
    shape: tuple[int, ...]
    layout: Layout = "plain"
    init: Init = "matrix"

    @property
    def arranged(self) -> tuple[int, ...]:
        """Its shape in the engine."""
        match self.layout:
            case "plain":
                return self.shape
            case "patch":
                out, inputs, height, width = self.shape
                return out, height * width * inputs
            case "conv":
                out, inputs, height, width = self.shape
                return height, width, inputs, out
            case "transposed":
                inputs, out, height, width = self.shape
                return height * width * out, inputs
            case "table":
                return self.shape[1] - 1, self.shape[2]

    def arrange(self, stored: np.ndarray) -> np.ndarray:
        """The parameter, from the tensor as the file has it."""
        match self.layout:
            case "plain":
                return stored
            case "patch":
                return stored.transpose(0, 2, 3, 1).reshape(self.arranged)
            case "conv":
                return stored.transpose(2, 3, 1, 0)
            case "transposed":
                return stored.transpose(2, 3, 1, 0).reshape(self.arranged)
            case "table":
                return stored[0, 1:]

    def restore(self, arranged: np.ndarray) -> np.ndarray:
        """The tensor as the file has it, from the parameter; the class token's slot is zero."""
        match self.layout:
            case "plain":
                return arranged
            case "patch":
                out, inputs, height, width = self.shape
                return arranged.reshape(out, height, width, inputs).transpose(0, 3, 1, 2)
            case "conv":
                return arranged.transpose(3, 2, 0, 1)
            case "transposed":
                inputs, out, height, width = self.shape
                return arranged.reshape(height, width, out, inputs).transpose(3, 2, 0, 1)
            case "table":
                return np.pad(arranged, ((1, 0), (0, 0)))[None]


@tree
class Linear:
    """`weight`: `[N, K]` (or a convolution's); `bias`: `[N]`, None for the patch projection."""

    weight: Any
    bias: Any


@tree
class Norm:
    """Of a layer norm or group norm, both `[D]`."""

    weight: Any
    bias: Any


@tree
class Attention:
    """`in_proj`: query, key and value on one another, `[3 D, D]`; `out_proj`: `[D, D]`."""

    in_proj: Linear
    out_proj: Linear


@tree
class Block:
    """A pre-norm layer of the trunk or the text encoder."""

    norm1: Norm
    attention: Attention
    norm2: Norm
    fc1: Linear
    fc2: Linear


@tree
class Trunk:
    """The vision transformer; `positions`: `[table², D]`."""

    patch: Linear
    positions: Any
    norm: Norm
    blocks: tuple[Block, ...]


@tree
class Neck:
    """One branch of the neck: feature maps of four, two and one times the grid."""

    x4_up1: Linear
    x4_up2: Linear
    x4_conv1: Linear
    x4_conv3: Linear
    x2_up: Linear
    x2_conv1: Linear
    x2_conv3: Linear
    x1_conv1: Linear
    x1_conv3: Linear


@tree
class Text:
    """The text encoder; `tokens`: `[vocabulary, D]`, `positions`: `[context, D]`."""

    tokens: Any
    positions: Any
    blocks: tuple[Block, ...]
    norm: Norm
    resizer: Linear


@tree
class CrossLayer:
    """A pre-norm layer of the geometry encoder or the DETR encoder.

    `cross_attention` sees the picture in the first, the prompt in the second.
    """

    norm1: Norm
    self_attention: Attention
    norm2: Norm
    cross_attention: Attention
    norm3: Norm
    linear1: Linear
    linear2: Linear


@tree
class Geometry:
    """Boxes and the class token; `labels`: `[2, D]` (negative, positive), `cls`: `[1, D]`."""

    labels: Any
    cls: Any
    box_direct: Linear
    box_pool: Linear
    box_positions: Linear
    image_norm: Norm
    final: Linear
    norm: Norm
    layers: tuple[CrossLayer, ...]
    output_norm: Norm


@tree
class DecoderLayer:
    """A post-norm layer of the DETR decoder, in the order of computation."""

    self_attention: Attention
    self_norm: Norm
    text_attention: Attention
    text_norm: Norm
    image_attention: Attention
    image_norm: Norm
    linear1: Linear
    linear2: Linear
    mlp_norm: Norm


@tree
class Decoder:
    """The DETR decoder.

    `queries`: `[Q, D]`; `references`: `[Q, 4]`, logits of cx, cy, w, h; `presence_token`: `[1, D]`.
    """

    queries: Any
    references: Any
    presence_token: Any
    layers: tuple[DecoderLayer, ...]
    norm: Norm
    box_head: tuple[Linear, Linear, Linear]
    reference_head: tuple[Linear, Linear]
    bias_x: tuple[Linear, Linear]
    bias_y: tuple[Linear, Linear]
    presence_norm: Norm
    presence_head: tuple[Linear, Linear, Linear]


@tree
class Masks:
    """The mask head."""

    prompt_norm: Norm
    prompt_attention: Attention
    convs: tuple[Linear, Linear]
    norms: tuple[Norm, Norm]
    instance: Linear
    embed: tuple[Linear, Linear, Linear]


@tree
class Scoring:
    """How well a query fits the prompt."""

    prompt1: Linear
    prompt2: Linear
    prompt_norm: Norm
    prompt_proj: Linear
    query_proj: Linear


@tree
class Params:
    """The whole image model. `clicks` is None, or the click head's (`jaxinfer.sam.clicks`)."""

    trunk: Trunk
    neck: Neck
    text: Text
    geometry: Geometry
    encoder: tuple[CrossLayer, ...]
    decoder: Decoder
    masks: Masks
    scoring: Scoring
    clicks: Any = None


def linear(name: str, rows: int, cols: int) -> Linear:
    """A matrix and its bias."""
    return Linear(Leaf(f"{name}.weight", (rows, cols)), Leaf(f"{name}.bias", (rows,), init="zeros"))


def conv(name: str, out: int, inputs: int, side: int, layout: Layout = "conv") -> Linear:
    """A convolution and its bias; one of side 1 is a matrix."""
    layout = "patch" if side == 1 else layout
    shape = (inputs, out) if layout == "transposed" else (out, inputs)
    return Linear(
        Leaf(f"{name}.weight", (*shape, side, side), layout),
        Leaf(f"{name}.bias", (out,), init="zeros"),
    )


def norm(name: str, width: int) -> Norm:
    """A norm."""
    return Norm(
        Leaf(f"{name}.weight", (width,), init="ones"), Leaf(f"{name}.bias", (width,), init="zeros")
    )


def table(name: str, *shape: int) -> Leaf:
    """A learnt table."""
    return Leaf(name, shape, init="table")


def attention(name: str, width: int) -> Attention:
    """Packed projections as `torch.nn.MultiheadAttention` names them."""
    return Attention(
        Linear(
            Leaf(f"{name}.in_proj_weight", (3 * width, width)),
            Leaf(f"{name}.in_proj_bias", (3 * width,), init="zeros"),
        ),
        linear(f"{name}.out_proj", width, width),
    )


def structure(cfg: Config) -> Params:
    """The tree of `Leaf` for a model of this shape, without the click head."""
    return Params(
        trunk=_trunk(cfg),
        neck=neck(cfg, "backbone.vision_backbone.convs"),
        text=_text(cfg),
        geometry=_geometry(cfg),
        encoder=tuple(
            _cross_layer(f"transformer.encoder.layers.{i}", cfg) for i in range(cfg.encoder_layers)
        ),
        decoder=_decoder(cfg),
        masks=_masks(cfg),
        scoring=_scoring(cfg),
    )


def _trunk(cfg: Config) -> Trunk:
    trunk, root = cfg.trunk, "backbone.vision_backbone.trunk"
    d, side = trunk.hidden_size, trunk.patch_size

    def block(name: str) -> Block:
        return Block(
            norm1=norm(f"{name}.norm1", d),
            attention=Attention(
                linear(f"{name}.attn.qkv", 3 * d, d), linear(f"{name}.attn.proj", d, d)
            ),
            norm2=norm(f"{name}.norm2", d),
            fc1=linear(f"{name}.mlp.fc1", trunk.intermediate_size, d),
            fc2=linear(f"{name}.mlp.fc2", d, trunk.intermediate_size),
        )

    return Trunk(
        patch=Linear(Leaf(f"{root}.patch_embed.proj.weight", (d, 3, side, side), "patch"), None),
        positions=Leaf(f"{root}.pos_embed", (1, 1 + trunk.table**2, d), "table", "table"),
        norm=norm(f"{root}.ln_pre", d),
        blocks=tuple(block(f"{root}.blocks.{i}") for i in range(trunk.num_layers)),
    )


def neck(cfg: Config, root: str) -> Neck:
    """A branch of the neck; Meta's names begin with `root`."""
    d, width = cfg.trunk.hidden_size, cfg.width
    return Neck(
        x4_up1=conv(f"{root}.0.dconv_2x2_0", d // 2, d, 2, "transposed"),
        x4_up2=conv(f"{root}.0.dconv_2x2_1", d // 4, d // 2, 2, "transposed"),
        x4_conv1=conv(f"{root}.0.conv_1x1", width, d // 4, 1),
        x4_conv3=conv(f"{root}.0.conv_3x3", width, width, 3),
        x2_up=conv(f"{root}.1.dconv_2x2", d // 2, d, 2, "transposed"),
        x2_conv1=conv(f"{root}.1.conv_1x1", width, d // 2, 1),
        x2_conv3=conv(f"{root}.1.conv_3x3", width, width, 3),
        x1_conv1=conv(f"{root}.2.conv_1x1", width, d, 1),
        x1_conv3=conv(f"{root}.2.conv_3x3", width, width, 3),
    )


def _text(cfg: Config) -> Text:
    text, root = cfg.text, "backbone.language_backbone.encoder"
    d = text.hidden_size

    def block(name: str) -> Block:
        return Block(
            norm1=norm(f"{name}.ln_1", d),
            attention=attention(f"{name}.attn", d),
            norm2=norm(f"{name}.ln_2", d),
            fc1=linear(f"{name}.mlp.c_fc", text.intermediate_size, d),
            fc2=linear(f"{name}.mlp.c_proj", d, text.intermediate_size),
        )

    return Text(
        tokens=table(f"{root}.token_embedding.weight", text.vocab_size, d),
        positions=table(f"{root}.positional_embedding", text.context, d),
        blocks=tuple(block(f"{root}.transformer.resblocks.{i}") for i in range(text.num_layers)),
        norm=norm(f"{root}.ln_final", d),
        resizer=linear("backbone.language_backbone.resizer", cfg.width, d),
    )


def _cross_layer(name: str, cfg: Config) -> CrossLayer:
    d, inner = cfg.width, cfg.intermediate_size
    return CrossLayer(
        norm1=norm(f"{name}.norm1", d),
        self_attention=attention(f"{name}.self_attn", d),
        norm2=norm(f"{name}.norm2", d),
        cross_attention=attention(f"{name}.cross_attn_image", d),
        norm3=norm(f"{name}.norm3", d),
        linear1=linear(f"{name}.linear1", inner, d),
        linear2=linear(f"{name}.linear2", d, inner),
    )


def _geometry(cfg: Config) -> Geometry:
    root, d = "geometry_encoder", cfg.width
    return Geometry(
        labels=table(f"{root}.label_embed.weight", 2, d),
        cls=table(f"{root}.cls_embed.weight", 1, d),
        box_direct=linear(f"{root}.boxes_direct_project", d, 4),
        box_pool=conv(f"{root}.boxes_pool_project", d, d, 7, "patch"),
        box_positions=linear(f"{root}.boxes_pos_enc_project", d, d + 2),
        image_norm=norm(f"{root}.img_pre_norm", d),
        final=linear(f"{root}.final_proj", d, d),
        norm=norm(f"{root}.norm", d),
        layers=tuple(_cross_layer(f"{root}.encode.{i}", cfg) for i in range(cfg.geometry_layers)),
        output_norm=norm(f"{root}.encode_norm", d),
    )


def _decoder(cfg: Config) -> Decoder:
    root, d, inner = "transformer.decoder", cfg.width, cfg.intermediate_size

    def layer(name: str) -> DecoderLayer:
        return DecoderLayer(
            self_attention=attention(f"{name}.self_attn", d),
            self_norm=norm(f"{name}.norm2", d),
            text_attention=attention(f"{name}.ca_text", d),
            text_norm=norm(f"{name}.catext_norm", d),
            image_attention=attention(f"{name}.cross_attn", d),
            image_norm=norm(f"{name}.norm1", d),
            linear1=linear(f"{name}.linear1", inner, d),
            linear2=linear(f"{name}.linear2", d, inner),
            mlp_norm=norm(f"{name}.norm3", d),
        )

    def bias(axis: str) -> tuple[Linear, Linear]:
        name = f"{root}.boxRPB_embed_{axis}.layers"
        return linear(f"{name}.0", d, 2), linear(f"{name}.1", cfg.num_heads, d)

    return Decoder(
        queries=table(f"{root}.query_embed.weight", cfg.num_queries, d),
        references=table(f"{root}.reference_points.weight", cfg.num_queries, 4),
        presence_token=table(f"{root}.presence_token.weight", 1, d),
        layers=tuple(layer(f"{root}.layers.{i}") for i in range(cfg.decoder_layers)),
        norm=norm(f"{root}.norm", d),
        box_head=_three(f"{root}.bbox_embed.layers", d, 4),
        reference_head=(
            linear(f"{root}.ref_point_head.layers.0", d, 2 * d),
            linear(f"{root}.ref_point_head.layers.1", d, d),
        ),
        bias_x=bias("x"),
        bias_y=bias("y"),
        presence_norm=norm(f"{root}.presence_token_out_norm", d),
        presence_head=_three(f"{root}.presence_token_head.layers", d, 1),
    )


def _masks(cfg: Config) -> Masks:
    root, d = "segmentation_head", cfg.width
    pixels = f"{root}.pixel_decoder"
    return Masks(
        prompt_norm=norm(f"{root}.cross_attn_norm", d),
        prompt_attention=attention(f"{root}.cross_attend_prompt", d),
        convs=(conv(f"{pixels}.conv_layers.0", d, d, 3), conv(f"{pixels}.conv_layers.1", d, d, 3)),
        norms=(norm(f"{pixels}.norms.0", d), norm(f"{pixels}.norms.1", d)),
        instance=conv(f"{root}.instance_seg_head", d, d, 1),
        embed=_three(f"{root}.mask_predictor.mask_embed.layers", d, d),
    )


def _scoring(cfg: Config) -> Scoring:
    root, d, inner = "dot_prod_scoring", cfg.width, cfg.intermediate_size
    return Scoring(
        prompt1=linear(f"{root}.prompt_mlp.layers.0", inner, d),
        prompt2=linear(f"{root}.prompt_mlp.layers.1", d, inner),
        prompt_norm=norm(f"{root}.prompt_mlp.out_norm", d),
        prompt_proj=linear(f"{root}.prompt_proj", d, d),
        query_proj=linear(f"{root}.hs_proj", d, d),
    )


def _three(name: str, width: int, out: int) -> tuple[Linear, Linear, Linear]:
    """A perceptron of three layers."""
    return (
        linear(f"{name}.0", width, width),
        linear(f"{name}.1", width, width),
        linear(f"{name}.2", out, width),
    )


def shapes(leaves: Any, dtype: jnp.dtype = jnp.float32) -> Any:
    """The tree of `jax.ShapeDtypeStruct` for a tree of `Leaf`."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.arranged, dtype), leaves)


def init(leaves: Any, key: jax.Array, dtype: jnp.dtype = jnp.float32) -> Any:
    """Random parameters for a tree of `Leaf`; nothing is zero or one, so that no error hides."""
    found, treedef = jax.tree.flatten(leaves)
    keys = jax.random.split(key, len(found))
    return treedef.unflatten(
        [_draw(leaf, key, dtype) for leaf, key in zip(found, keys, strict=True)]
    )


def _draw(leaf: Leaf, key: jax.Array, dtype: jnp.dtype) -> jax.Array:
    noise = jax.random.normal(key, leaf.arranged, dtype)
    match leaf.init:
        case "matrix":
            fan_in = math.prod(leaf.arranged[:-1] if leaf.layout == "conv" else leaf.arranged[-1:])
            return noise / math.sqrt(fan_in)
        case "table":
            return 0.3 * noise
        case "ones":
            return 1 + 0.1 * noise
        case "zeros":
            return 0.05 * noise

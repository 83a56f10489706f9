"""The parameter trees of SAM 3 and 3.1; `jaxinfer.sam.structure` says what they are made of.

Matrices are `[N, K]` (`y = x Wᵀ`), as in the files. Convolutions lie `[height, width, in, out]`;
the transposed ones, whose 2 x 2 windows do not overlap, and the patch projection are matrices.
"""

from typing import Any

from jaxinfer.tree import tree


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
    """`in_proj`: query, key and value on one another, `[3 D, D]`, or several matrices (`prepared`);
    `out_proj`: `[D, D]`."""

    in_proj: Any
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

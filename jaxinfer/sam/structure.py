"""What a model of some shape is made of: its parameter tree with a `Leaf` for each array."""

from jaxinfer.sam.config import Config
from jaxinfer.sam.leaves import Leaf, attention, conv, linear, norm, table
from jaxinfer.sam.params import (
    Attention,
    Block,
    CrossLayer,
    Decoder,
    DecoderLayer,
    Geometry,
    Linear,
    Masks,
    Neck,
    Params,
    Scoring,
    Text,
    Trunk,
)


def structure(cfg: Config) -> Params:
    """The tree of `Leaf` for a model of this shape, without the click head's."""
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

"""The parameter tree: one description from which everything else about the weights follows.

`structure(cfg)` returns a `Params` whose leaves say what each parameter is (`Matrix`, `Vector`) and
which tensors of a checkpoint it is made of. From it come random initialisation (`init`), the shapes
in any mix of formats (`shapes`), the loader's checks and the size accounting in `checkpoints`.

Layers of a kind are stacked along a leading axis, because a compiled step pays host time for every
leaf it is given.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxinfer.qwen.config import Config, VisionConfig
from jaxinfer.tree import tree
from pallas_kernels import Dense, Fp8, Nvfp4, PerLayer

TEXT = "model.language_model."
VISUAL = "model.visual."


@dataclass(frozen=True)
class Matrix:
    """A weight `[L?, E?, N, K]` that a checkpoint may store in any format.

    Attributes:
        names: modules of the published checkpoint that lie on one another along N, with `{layer}`
            and `{expert}` left open.
        rows: output features of all of them together (N); each has `rows / len(names)`.
        cols: input features (K).
        layers: model layer numbers along the stack; empty if the weight is not stacked.
        experts: number of experts, 0 for a weight that is not an expert's.
        fused: name of the tensor that holds all experts (`[E, N, K]`, no `.weight` suffix) in
            checkpoints that fuse them.
    """

    names: tuple[str, ...]
    rows: int
    cols: int
    layers: tuple[int, ...] = ()
    experts: int = 0
    fused: str = ""

    @property
    def stack(self) -> tuple[int, ...]:
        """Leading axes of the stored array."""
        layers = (len(self.layers),) if self.layers else ()
        return layers + ((self.experts,) if self.experts else ())

    @property
    def module(self) -> str:
        """The module as quantisers list it: one name for all experts and fused parts."""
        return self.fused or self.names[0]


@dataclass(frozen=True)
class Vector:
    """A parameter that is never quantised: norms, biases, the convolution, embeddings.

    Attributes:
        name: tensor of the published checkpoint, `{layer}` left open.
        shape: its shape in the engine; the file's may have axes of length one more.
        layers: model layer numbers along the stack; empty if not stacked.
        init: how random initialisation draws it: "normal" (0.02), "zeros", "ones", "decay" (log of
            a uniform draw from [1, 16]) or "dt" (inverse softplus of a log-uniform step).
        float32: kept in float32 whatever the model's type.
    """

    name: str
    shape: tuple[int, ...]
    layers: tuple[int, ...] = ()
    init: str = "zeros"
    float32: bool = False

    @property
    def stack(self) -> tuple[int, ...]:
        """Leading axes of the stored array."""
        return (len(self.layers),) if self.layers else ()


@tree
class GatedDelta:
    """Gated DeltaNet mixers and the norms in front of them, stacked over their layers."""

    norm: Any
    in_proj_qkv: Any
    in_proj_z: Any
    in_proj_b: Any
    in_proj_a: Any
    conv1d: Any
    A_log: Any
    dt_bias: Any
    o_norm: Any
    out_proj: Any


@tree
class Attention:
    """Gated full-attention mixers and the norms in front of them, stacked over their layers."""

    norm: Any
    q_proj: Any
    k_proj: Any
    v_proj: Any
    q_norm: Any
    k_norm: Any
    o_proj: Any


@tree
class Moe:
    """Router, experts, shared expert and the norms in front of them, stacked over all layers."""

    norm: Any
    router: Any
    gate_up: Any
    down: Any
    shared_gate_up: Any
    shared_down: Any
    shared_gate: Any


@tree
class Mtp:
    """The multi-token-prediction head: one attention layer between two projections."""

    pre_fc_norm_embedding: Any
    pre_fc_norm_hidden: Any
    fc: Any
    attention: Attention
    moe: Moe
    norm: Any


@tree
class VisionBlocks:
    """Vision transformer blocks, stacked."""

    norm1_weight: Any
    norm1_bias: Any
    qkv: Any
    qkv_bias: Any
    proj: Any
    proj_bias: Any
    norm2_weight: Any
    norm2_bias: Any
    fc1: Any
    fc1_bias: Any
    fc2: Any
    fc2_bias: Any


@tree
class Vision:
    """The vision tower: patch embedding, blocks, and the merger to the text model's width."""

    patch_embed: Any
    patch_embed_bias: Any
    pos_embed: Any
    blocks: VisionBlocks
    merger_norm_weight: Any
    merger_norm_bias: Any
    merger_fc1: Any
    merger_fc1_bias: Any
    merger_fc2: Any
    merger_fc2_bias: Any


@tree
class Params:
    """All parameters. `mtp` and `vision` are None in checkpoints without them."""

    embed_tokens: Any
    gdn: GatedDelta
    attention: Attention
    moe: Moe
    norm: Any
    lm_head: Any
    mtp: Mtp | None
    vision: Vision | None


def structure(cfg: Config) -> Params:
    """What each parameter is: a `Params` with `Matrix` and `Vector` leaves."""
    D = cfg.hidden_size
    every = tuple(range(cfg.num_layers))
    layer = TEXT + "layers.{layer}."
    return Params(
        embed_tokens=Vector(TEXT + "embed_tokens.weight", (cfg.vocab_size, D), init="normal"),
        gdn=_gated_delta(cfg, layer, cfg.gdn_layers),
        attention=_attention(cfg, layer, cfg.attention_layers),
        moe=_moe(cfg, layer, every),
        norm=Vector(TEXT + "norm.weight", (D,)),
        lm_head=Matrix(("lm_head",), cfg.vocab_size, D),
        mtp=_mtp(cfg) if cfg.mtp_layers else None,
        vision=_vision(cfg.vision) if cfg.vision else None,
    )


def _gated_delta(cfg: Config, prefix: str, layers: tuple[int, ...]) -> GatedDelta:
    D, Hv = cfg.hidden_size, cfg.linear_num_value_heads
    mixer = prefix + "linear_attn."
    return GatedDelta(
        norm=Vector(prefix + "input_layernorm.weight", (D,), layers),
        in_proj_qkv=Matrix((mixer + "in_proj_qkv",), cfg.conv_dim, D, layers),
        in_proj_z=Matrix((mixer + "in_proj_z",), cfg.value_dim, D, layers),
        in_proj_b=Matrix((mixer + "in_proj_b",), Hv, D, layers),
        in_proj_a=Matrix((mixer + "in_proj_a",), Hv, D, layers),
        conv1d=Vector(
            mixer + "conv1d.weight", (cfg.conv_dim, cfg.linear_conv_kernel_dim), layers, "normal"
        ),
        A_log=Vector(mixer + "A_log", (Hv,), layers, "decay", float32=True),
        dt_bias=Vector(mixer + "dt_bias", (Hv,), layers, "dt", float32=True),
        o_norm=Vector(mixer + "norm.weight", (cfg.linear_value_head_dim,), layers, "ones"),
        out_proj=Matrix((mixer + "out_proj",), D, cfg.value_dim, layers),
    )


def _attention(cfg: Config, prefix: str, layers: tuple[int, ...]) -> Attention:
    D, d = cfg.hidden_size, cfg.head_dim
    q, kv = cfg.num_attention_heads * d, cfg.num_key_value_heads * d
    mixer = prefix + "self_attn."
    return Attention(
        norm=Vector(prefix + "input_layernorm.weight", (D,), layers),
        q_proj=Matrix((mixer + "q_proj",), 2 * q, D, layers),
        k_proj=Matrix((mixer + "k_proj",), kv, D, layers),
        v_proj=Matrix((mixer + "v_proj",), kv, D, layers),
        q_norm=Vector(mixer + "q_norm.weight", (d,), layers),
        k_norm=Vector(mixer + "k_norm.weight", (d,), layers),
        o_proj=Matrix((mixer + "o_proj",), D, q, layers),
    )


def _moe(cfg: Config, prefix: str, layers: tuple[int, ...]) -> Moe:
    D, E = cfg.hidden_size, cfg.num_experts
    inner, shared = cfg.moe_intermediate_size, cfg.shared_expert_intermediate_size
    mlp = prefix + "mlp."
    expert, one = mlp + "experts.{expert}.", mlp + "shared_expert."
    return Moe(
        norm=Vector(prefix + "post_attention_layernorm.weight", (D,), layers),
        router=Matrix((mlp + "gate",), E, D, layers),
        gate_up=Matrix(
            (expert + "gate_proj", expert + "up_proj"),
            2 * inner,
            D,
            layers,
            E,
            fused=mlp + "experts.gate_up_proj",
        ),
        down=Matrix((expert + "down_proj",), D, inner, layers, E, fused=mlp + "experts.down_proj"),
        shared_gate_up=Matrix((one + "gate_proj", one + "up_proj"), 2 * shared, D, layers),
        shared_down=Matrix((one + "down_proj",), D, shared, layers),
        shared_gate=Matrix((mlp + "shared_expert_gate",), 1, D, layers),
    )


def _mtp(cfg: Config) -> Mtp:
    D = cfg.hidden_size
    layer = "mtp.layers.{layer}."
    return Mtp(
        pre_fc_norm_embedding=Vector("mtp.pre_fc_norm_embedding.weight", (D,)),
        pre_fc_norm_hidden=Vector("mtp.pre_fc_norm_hidden.weight", (D,)),
        fc=Matrix(("mtp.fc",), D, 2 * D),
        attention=_attention(cfg, layer, (0,)),
        moe=_moe(cfg, layer, (0,)),
        norm=Vector("mtp.norm.weight", (D,)),
    )


def _vision(cfg: VisionConfig) -> Vision:
    D, inner, layers = cfg.hidden_size, cfg.intermediate_size, tuple(range(cfg.depth))
    block = VISUAL + "blocks.{layer}."

    def bias(name: str, width: int) -> Vector:
        return Vector(block + name + ".bias", (width,), layers)

    def scale(name: str) -> Vector:
        return Vector(block + name + ".weight", (D,), layers, "ones")

    def matrix(name: str, rows: int, cols: int) -> Matrix:
        return Matrix((block + name,), rows, cols, layers)

    return Vision(
        patch_embed=Matrix((VISUAL + "patch_embed.proj",), D, cfg.patch_dim),
        patch_embed_bias=Vector(VISUAL + "patch_embed.proj.bias", (D,)),
        pos_embed=Vector(
            VISUAL + "pos_embed.weight", (cfg.num_position_embeddings, D), init="normal"
        ),
        blocks=VisionBlocks(
            norm1_weight=scale("norm1"),
            norm1_bias=bias("norm1", D),
            qkv=matrix("attn.qkv", 3 * D, D),
            qkv_bias=bias("attn.qkv", 3 * D),
            proj=matrix("attn.proj", D, D),
            proj_bias=bias("attn.proj", D),
            norm2_weight=scale("norm2"),
            norm2_bias=bias("norm2", D),
            fc1=matrix("mlp.linear_fc1", inner, D),
            fc1_bias=bias("mlp.linear_fc1", inner),
            fc2=matrix("mlp.linear_fc2", D, inner),
            fc2_bias=bias("mlp.linear_fc2", D),
        ),
        merger_norm_weight=Vector(VISUAL + "merger.norm.weight", (D,), init="ones"),
        merger_norm_bias=Vector(VISUAL + "merger.norm.bias", (D,)),
        merger_fc1=Matrix((VISUAL + "merger.linear_fc1",), cfg.merged_dim, cfg.merged_dim),
        merger_fc1_bias=Vector(VISUAL + "merger.linear_fc1.bias", (cfg.merged_dim,)),
        merger_fc2=Matrix((VISUAL + "merger.linear_fc2",), cfg.out_hidden_size, cfg.merged_dim),
        merger_fc2_bias=Vector(VISUAL + "merger.linear_fc2.bias", (cfg.out_hidden_size,)),
    )


# --- formats, shapes, random values -------------------------------------------------------------

Format = str
"""One of "dense", "nvfp4", "fp8" (W8A16), "fp8_static" (W8A8), and the FP8 pair with a scale for
each output row: "fp8_channel", "fp8_channel_static"."""

FormatOf = Callable[[Matrix, int | None], Format]
"""The format of a matrix in a model layer (None for a matrix that is not stacked)."""


def nvidia_mix(matrix: Matrix, layer: int | None) -> Format:
    """The formats of nvidia/Qwen3.6-35B-A3B-NVFP4."""
    name = matrix.module
    if name.startswith(("mtp.", VISUAL)):
        return "dense"
    if "experts." in name or "shared_expert." in name or name == "lm_head":
        return "nvfp4"
    if "self_attn." in name or name.endswith(("in_proj_qkv", "in_proj_z", "out_proj")):
        return "fp8_static"
    return "dense"


def all_dense(matrix: Matrix, layer: int | None) -> Format:
    """Every matrix in the model's own type."""
    return "dense"


def shapes(cfg: Config, format_of: FormatOf = all_dense) -> Params:
    """The tree of `jax.ShapeDtypeStruct` in weight types that a checkpoint fills."""
    return _map(structure(cfg), lambda leaf: leaf_shapes(leaf, cfg.dtype, format_of))


def leaf_shapes(leaf: Matrix | Vector, dtype: str, format_of: FormatOf) -> Any:
    """The arrays of one parameter, as shapes: an array for a Vector, a weight for a Matrix."""
    if isinstance(leaf, Vector):
        kind = jnp.float32 if leaf.float32 else jnp.dtype(dtype)
        return jax.ShapeDtypeStruct((*leaf.stack, *leaf.shape), kind)
    if not leaf.layers:
        return _weight_shapes(leaf, leaf.stack, format_of(leaf, None), dtype)
    formats = [format_of(leaf, layer) for layer in leaf.layers]
    kinds = list(dict.fromkeys(formats))
    groups = tuple(
        _weight_shapes(leaf, (formats.count(kind), *leaf.stack[1:]), kind, dtype) for kind in kinds
    )
    if len(groups) == 1:
        return groups[0]
    where = tuple(
        (kinds.index(kind), formats[:position].count(kind)) for position, kind in enumerate(formats)
    )
    return PerLayer(groups, where)


def _weight_shapes(leaf: Matrix, stack: tuple[int, ...], kind: Format, dtype: str) -> Any:
    full, parts = (*stack, leaf.rows, leaf.cols), (*stack, len(leaf.names))
    S: Any = jax.ShapeDtypeStruct
    match kind:
        case "dense":
            return Dense(S(full, jnp.dtype(dtype)))
        case "fp8" | "fp8_static" | "fp8_channel" | "fp8_channel_static":
            scales = full[:-1] if "channel" in kind else parts
            inputs = S(stack, jnp.float32) if "static" in kind else None
            return Fp8(S(full, jnp.float8_e4m3fn), S(scales, jnp.float32), inputs)
        case "nvfp4":
            return Nvfp4(
                S((*full[:-1], leaf.cols // 2), jnp.uint8),
                S((*full[:-1], leaf.cols // 16), jnp.float8_e4m3fn),
                S(parts, jnp.float32),
            )
    raise ValueError(f"unknown weight format {kind!r}")


def init(cfg: Config, key: jax.Array, format_of: FormatOf = all_dense) -> Params:
    """Random parameters in any mix of formats, each array drawn on the device by its own call.

    Matrices have standard deviation 0.02 whatever their format.
    """
    tree = structure(cfg)
    count = len(jax.tree.leaves(tree, is_leaf=_is_leaf))
    keys = iter(jax.random.split(key, count))
    return _map(tree, lambda leaf: _init_leaf(leaf, cfg.dtype, format_of, next(keys)))


def _init_leaf(leaf: Matrix | Vector, dtype: str, format_of: FormatOf, key: jax.Array) -> Any:
    target = leaf_shapes(leaf, dtype, format_of)
    if isinstance(leaf, Vector):
        return _draw_vector(leaf.init, target.shape, target.dtype.name, key)
    groups = target.groups if isinstance(target, PerLayer) else (target,)
    drawn = tuple(
        _draw_weight(group, k)
        for group, k in zip(groups, jax.random.split(key, len(groups)), strict=True)
    )
    return PerLayer(drawn, target.where) if isinstance(target, PerLayer) else drawn[0]


@partial(jax.jit, static_argnums=(0, 1, 2))
def _draw_vector(how: str, shape: tuple[int, ...], dtype: str, key: jax.Array) -> jax.Array:
    match how:
        case "zeros":
            value = jnp.zeros(shape)
        case "ones":
            value = jnp.ones(shape)
        case "normal":
            return 0.02 * jax.random.normal(key, shape, dtype)
        case "decay":
            value = jnp.log(jax.random.uniform(key, shape, minval=1.0, maxval=16.0))
        case "dt":
            log_step = jax.random.uniform(key, shape, minval=math.log(1e-3), maxval=math.log(1e-1))
            step = jnp.exp(log_step)
            value = step + jnp.log(-jnp.expm1(-step))
        case _:
            raise ValueError(f"unknown initialiser {how!r}")
    return value.astype(dtype)


def _draw_weight(target: Any, key: jax.Array) -> Any:
    """Random stored bits, never a dequantised copy: full-size weights must fit beside nothing."""
    match target:
        case Dense(w):
            return Dense(_normal_rows(w.shape, w.dtype.name, 0.02, key))
        case Fp8(q, scale, input_scale):
            inputs = None if input_scale is None else jnp.full(input_scale.shape, 0.02)
            bits = _normal_rows(q.shape, "float8_e4m3fn", 100.0, key)
            return Fp8(bits, jnp.full(scale.shape, 2e-4), inputs)
        case Nvfp4(q, block_scale, scale):
            codes = _random_bytes(q.shape, key)
            # Codes drawn evenly have standard deviation 2.91; block scales of 64 then make 0.02.
            blocks = jnp.full(block_scale.shape, 64.0, jnp.float8_e4m3fn)
            return Nvfp4(codes, blocks, jnp.full(scale.shape, 0.02 / (64 * 2.91)))
    raise TypeError(f"no random draw for {type(target).__name__}")


@partial(jax.jit, static_argnums=(0, 1, 2))
def _normal_rows(shape: tuple[int, ...], dtype: str, scale: float, key: jax.Array) -> jax.Array:
    """Normal numbers, drawn slice by slice so that the wide temporary stays small."""
    if len(shape) <= 2:
        return (scale * jax.random.normal(key, shape, jnp.bfloat16)).astype(dtype)
    keys = jax.random.split(key, shape[0])
    return jax.lax.map(lambda k: _normal_rows(shape[1:], dtype, scale, k), keys)


@partial(jax.jit, static_argnums=0)
def _random_bytes(shape: tuple[int, ...], key: jax.Array) -> jax.Array:
    if len(shape) <= 2:
        return jax.random.bits(key, shape, jnp.uint8)
    return jax.lax.map(lambda k: _random_bytes(shape[1:], k), jax.random.split(key, shape[0]))


def leaves(tree: Params) -> list[tuple[str, Any]]:
    """(dotted path, leaf) of a structure, in tree order."""
    found = jax.tree_util.tree_leaves_with_path(tree, is_leaf=_is_leaf)
    return [(".".join(k.name for k in path), leaf) for path, leaf in found]


def _is_leaf(node: Any) -> bool:
    return isinstance(node, Matrix | Vector)


def _map(tree: Params, fn: Callable[[Any], Any]) -> Params:
    return jax.tree.map(fn, tree, is_leaf=_is_leaf)

"""Gated DeltaNet for prompts, 64 tokens at once.

With `c` the running sum of the log decay `g` within a piece and `D_ij = exp(c_i − c_j)` for
`i ≥ j`, per value head:

    A = strictly lower part of β K Kᵀ ∘ D
    V' = (I + A)⁻¹ β (V − e^c K S)
    O = e^c Q S + (Q Kᵀ ∘ D) V'
    S ← e^{c_last} S + (e^{c_last − c} K)ᵀ V'

(Yang et al., "Gated Delta Networks: Improving Mamba2 with Delta Rule", 2024, section 3.3.) See
`delta_step` for q, k, v, g and β, and for what becomes of `O`.

Four kernels: the convolution; what does not need the state, for all pieces and heads at once; the
state, piece after piece, and the convolution's last inputs; the output norm. The state keeps
float32's bits on the tensor cores: a float32 matrix is a sum of three bfloat16 ones, and q and k
are one each but for a factor a row, which is set aside. Models of other types than bfloat16 are
multiplied in float32.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl, as_data, triton_call
from pallas_kernels.delta_plain import CHUNK, Chunks, Places, continues, reference
from pallas_kernels.delta_settle import gated
from pallas_kernels.delta_step import L2_EPS, Dims, gates, traced
from pallas_kernels.normed import Form, form_type, formed, store
from pallas_kernels.triangular import BLOCK

# How many bfloat16 parts stand for the float32 matrices that one kernel hands to the next: all that
# there are for what changes the state, two where the result is rounded to bfloat16 soon.
_SOLVE_PARTS, _SCORES_PARTS = 3, 2

_GOES_ON, _ZEROS, _NOWHERE = -1, -2, -3


def delta_chunks(
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    z: jax.Array,
    conv_weight: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    o_norm: jax.Array,
    layer: int,
    conv: jax.Array,
    recurrent: jax.Array,
    places: Places,
    *,
    scratch: int,
    eps: float,
    impl: Impl,
    form: Form | None = None,
    tile_v: int = 32,
    tile_c: int = 128,
    warps: tuple[int, int, int, int] = (4, 4, 4, 8),
    stages: int = 2,
) -> Chunks:
    """Run pieces of 64 tokens.

    Those of one sequence stand together and in order; only the last one with tokens may be short.
    No sequence may go on from an entry that another one writes in this call.

    Args:
        x: `[P, 64, C]` inputs of the convolution.
        a: `[P, 64, Hv]` decay before its gate.
        b: `[P, 64, Hv]` write strength before its gate.
        z: `[P, 64, Hv·dv]` output gate.
        conv_weight: `[Lg, C, W]`; the last tap multiplies the current token.
        A_log: `[Lg, Hv]`.
        dt_bias: `[Lg, Hv]`.
        o_norm: `[Lg, dv]`.
        layer: index into the stacks and pools.
        conv: `[Lg, R, W-1, C]` inputs of the convolution before what comes next; donate it.
        recurrent: `[Lg, R, Hv, dk, dv]` float32; donate it.
        places: where the pieces belong.
        scratch: the entry that nobody reads.
        eps: of the output norm.
        impl: how to run it.
        form: in which the output projection wants `y`; None for as it is.
        tile_v: columns of the state a program of the third kernel.
        tile_c: channels a program of the convolution; it must divide their number.
        warps: warps a program of each kernel.
        stages: pieces whose loads the third kernel keeps in flight.
    """
    weights = (conv_weight, A_log, dt_bias, o_norm)
    if impl == "plain":
        done = reference(
            x, a, b, z, *weights, layer, conv, recurrent, places, scratch=scratch, eps=eps
        )
        return done if form is None else done._replace(y=formed(done.y, form))
    # The layer, and the number of pieces, which must be compiled alike for one and for many.
    index = as_data(layer, x.shape[0], form.index if form else 0)
    args = index, x, a, b, z, *weights, conv, recurrent, places, form and form.scale
    how: dict[str, Any] = {"kind": form and form.kind, "tiles": (tile_v, tile_c)}
    return _launch(*args, scratch=scratch, eps=eps, impl=impl, warps=warps, stages=stages, **how)


@partial(jax.jit, static_argnames=("scratch", "eps", "impl", "kind", "tiles", "warps", "stages"))
def _launch(
    index: jax.Array,
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    z: jax.Array,
    conv_weight: jax.Array,
    A_log: jax.Array,
    dt_bias: jax.Array,
    o_norm: jax.Array,
    conv: jax.Array,
    recurrent: jax.Array,
    places: Places,
    scales: jax.Array | None,
    *,
    scratch: int,
    eps: float,
    impl: Impl,
    kind: type | None,
    tiles: tuple[int, int],
    warps: tuple[int, int, int, int],
    stages: int,
) -> Chunks:
    dims, pieces, (tile_v, tile_c) = Dims.of(recurrent, x), x.shape[0], tiles
    form = None if kind is None else Form(kind, scales)
    goes_on = continues(places)
    ends = jnp.append(~goes_on[1:], True)
    held = jnp.where(places.start > 0, places.source, _ZEROS)
    # What piece p reads, where the state after it goes, and where a copy of that goes.
    entries = (
        jnp.where(goes_on, _GOES_ON, held),
        jnp.where(ends & (places.slot != scratch), places.slot, _NOWHERE),
        jnp.where(places.snapshot != scratch, places.snapshot, _NOWHERE),
    )
    mixed = triton_call(
        partial(_convolve, tile_c),
        *(index, x, conv_weight, conv, entries[0]),
        grid=(x.shape[-1] // tile_c, pieces),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        impl=impl,
        name="delta_convolve",
        warps=warps[0],
    )
    matrix = jax.ShapeDtypeStruct((pieces, dims.Hv, CHUNK, CHUNK), jnp.float32)
    if x.dtype == jnp.bfloat16:
        matrix = matrix.update(dtype=jnp.bfloat16)
        solve, scores = [matrix] * _SOLVE_PARTS, [matrix] * _SCORES_PARTS
    else:
        solve, scores = [matrix], [matrix]
    prepared = triton_call(
        partial(_prepare, dims, impl, len(solve)),
        *(index, mixed, a, b, A_log, dt_bias, places.valid),
        grid=(dims.Hv, pieces),
        out_shape=(
            *solve,
            *scores,
            jax.ShapeDtypeStruct((pieces, dims.Hv, 4, CHUNK), jnp.float32),
        ),
        impl=impl,
        name="delta_prepare",
        warps=warps[1],
    )
    tile_v = min(tile_v, dims.dv)
    o, recurrent, conv = triton_call(
        partial(_advance, dims, impl, len(solve), tile_v),
        *(index, recurrent, conv, x, mixed, *prepared, *entries, places.valid),
        grid=(dims.dv // tile_v, dims.Hv),
        out_shape=(
            jax.ShapeDtypeStruct(z.shape, jnp.float32),
            jax.ShapeDtypeStruct(recurrent.shape, recurrent.dtype),
            jax.ShapeDtypeStruct(conv.shape, conv.dtype),
        ),
        impl=impl,
        name="delta_advance",
        warps=warps[2],
        stages=stages,
        aliases={1: 1, 2: 2},
    )
    return Chunks(_gate(index, o, z, o_norm, eps, form, impl, warps[3]), recurrent, conv)


def _gate(
    index: jax.Array,
    o: jax.Array,
    z: jax.Array,
    o_norm: jax.Array,
    eps: float,
    form: Form | None,
    impl: Impl,
    warps: int,
) -> jax.Array:
    """The output norm: a program is a row."""
    args, tree = jax.tree.flatten((index, o, z, o_norm, form and form.scale))

    def body(*refs: Any) -> None:
        index, o, z, o_norm, scales = jax.tree.unflatten(tree, refs[:-1])
        lead, v = (pl.program_id(0), pl.program_id(1)), jnp.arange(o_norm.shape[-1])[None]
        k = jnp.arange(o.shape[-1] // v.size)[:, None] * v.size + v
        scale = plt.load(o_norm.at[index[0], v])
        y = gated(plt.load(o.at[*lead, k]), plt.load(z.at[*lead, k]), scale, eps)
        store(refs[-1], lead, k, y, form, scales, index[2])

    return triton_call(
        body,
        *args,
        grid=o.shape[:2],
        out_shape=jax.ShapeDtypeStruct(z.shape, form_type(form, z.dtype)),
        impl=impl,
        name="delta_gate",
        warps=warps,
    )


def _convolve(tile: int, *refs: Any) -> None:
    index, x, conv_weight, conv, source, out = refs
    piece, before = pl.program_id(1), conv.shape[2]
    layer, entry = index[0], plt.load(source.at[piece])
    columns = pl.program_id(0) * tile + jnp.arange(tile)
    step = jnp.arange(CHUNK)
    y = jnp.zeros((CHUNK, tile), jnp.float32)
    for i in range(before + 1):
        at = step - before + i
        inside = ((at >= 0) | (entry == _GOES_ON))[:, None]
        row = jnp.maximum(piece * CHUNK + at, 0)[:, None]
        rows = plt.load(x.at[row // CHUNK, row % CHUNK, columns[None]], mask=inside, other=0.0)
        if i < before:
            kept = jnp.clip(at + before, 0, before - 1)[:, None]
            mask = ~inside & (entry >= 0)
            place = layer, jnp.maximum(entry, 0), kept, columns[None]
            rows = jnp.where(mask, plt.load(conv.at[place], mask=mask, other=0.0), rows)
        tap = plt.load(conv_weight.at[layer, columns, traced(i)]).astype(jnp.float32)
        y += rows.astype(jnp.float32) * tap[None]
    place = piece, slice(None), pl.ds(pl.program_id(0) * tile, tile)
    plt.store(out.at[place], jax.nn.silu(y).astype(out.dtype))


def _parts(a: jax.Array, count: int, dtype: jnp.dtype) -> list[jax.Array]:
    """What adds up to `a`, the largest first; beside bfloat16 in that type, otherwise `a` alone."""
    if dtype != jnp.bfloat16:
        return [a.astype(jnp.float32)]
    parts = []
    for _ in range(count - 1):
        # Cut off rather than rounded: that takes one cheap instruction.
        bits = lax.bitcast_convert_type(a, jnp.uint32) & jnp.uint32(0xFFFF0000)
        top = lax.bitcast_convert_type(bits, jnp.float32)
        parts.append(top.astype(jnp.bfloat16))
        a = a - top
    return [*parts, a.astype(jnp.bfloat16)]


def _product(a: list[jax.Array], b: list[jax.Array], impl: Impl) -> jax.Array:
    """The product of two matrices given in parts, up to what the longer of them leaves out."""
    exact = lax.DotAlgorithmPreset.TF32_TF32_F32_X3 if impl == "kernel" else lax.Precision.HIGHEST
    # Small ones first, so that they are not lost.
    pairs = [(i, j) for i in range(len(a)) for j in range(len(b)) if i + j < max(len(a), len(b))]
    terms = [
        jnp.dot(
            a[i],
            b[j],
            precision=None if a[i].dtype == jnp.bfloat16 else exact,
            preferred_element_type=jnp.float32,
        )
        for i, j in sorted(pairs, key=sum, reverse=True)
    ]
    return sum(terms[1:], start=terms[0])


def _prepare(dims: Dims, impl: Impl, split: int, *refs: Any) -> None:
    (index, mixed, a, b, A_log, dt_bias, valid), refs = refs[:7], refs[7:]
    *matrices, decays_out = refs
    solve_out, scores_out = matrices[:split], matrices[split:]
    head, piece = pl.program_id(0), pl.program_id(1)
    layer, step = index[0], jnp.arange(CHUNK)
    of_q, of_k, _ = dims.channels(head)
    raw = plt.load(a.at[piece, :, head]), plt.load(b.at[piece, :, head])
    gate = gates(*raw, plt.load(A_log.at[layer, head]), plt.load(dt_bias.at[layer, head]))
    # A token with g = 0 and beta = 0 leaves the state as it is.
    real = step < plt.load(valid.at[piece])
    g, beta = (jnp.where(real, value, 0.0) for value in gate)
    lower = step[:, None] >= step[None]
    total, last = jnp.sum(jnp.where(lower, g[None], 0.0), axis=1), jnp.sum(g)
    # Masked before exp: above the diagonal the exponent is positive and may overflow.
    decay = jnp.exp(jnp.where(lower, total[:, None] - total[None], -jnp.inf))

    def rows(part: pl.Slice) -> tuple[jax.Array, jax.Array]:
        """`[64, dk]`, and one over the length of each."""
        raw = plt.load(mixed.at[piece, :, part])
        wide = raw.astype(jnp.float32)
        factor = lax.rsqrt(jnp.sum(wide * wide, axis=1) + L2_EPS)
        return _parts(raw, 1, raw.dtype)[0], factor

    def keep(refs: list[Any], matrix: jax.Array) -> None:
        for ref, part in zip(refs, _parts(matrix, len(refs), mixed.dtype), strict=True):
            plt.store(ref.at[piece, head], part)

    k, unit_k = rows(of_k)
    among = _product([k], [k.T], impl) * decay * (beta * unit_k)[:, None] * unit_k[None]
    among = jnp.where(step[:, None] > step[None], among, 0.0)
    keep(solve_out, _invert(among, mixed.dtype, impl) * beta[None])
    q, unit_q = rows(of_q)
    unit_q = unit_q * dims.dk**-0.5
    keep(scores_out, _product([q], [k.T], impl) * decay * unit_q[:, None] * unit_k[None])
    decays = (
        jnp.exp(total) * unit_k,
        jnp.exp(last - total) * unit_k,
        jnp.exp(total) * unit_q,
        jnp.full(CHUNK, jnp.exp(last)),
    )
    for i, values in enumerate(decays):
        plt.store(decays_out.at[piece, head, traced(i)], values)


def _invert(a: jax.Array, dtype: jnp.dtype, impl: Impl) -> jax.Array:
    """`(I + a)⁻¹` for strictly lower `a [64, 64]`: blocks of 16 row by row, then pairs of blocks.

    Two blocks become one by `[X 0; −Y A X  Y]`, in which no power of `a` occurs.
    """
    count = CHUNK // BLOCK
    outer, inner = jnp.arange(count), jnp.arange(BLOCK)
    own = outer[:, None, None, None] == outer[None, None, :, None]
    blocks = jnp.sum(jnp.where(own, a.reshape(count, BLOCK, count, BLOCK), 0.0), axis=2)

    def row(i: jax.Array, inverse: jax.Array) -> jax.Array:
        # Rows from i on are still zero, so the whole product is the sum over those before.
        here = (inner == i)[None, :, None]
        factors = jnp.sum(jnp.where(here, blocks, 0.0), axis=1)
        known = jnp.sum(factors[:, :, None] * inverse, axis=1)
        unit = jnp.where(inner == i, 1.0, 0.0)[None]
        return jnp.where(here, (unit - known)[:, None, :], inverse)

    small = lax.fori_loop(0, BLOCK, row, jnp.zeros((count, BLOCK, BLOCK), jnp.float32))
    inverse = jnp.where(own, small[:, :, None, :], 0.0).reshape(CHUNK, CHUNK)
    step = jnp.arange(CHUNK)
    for size in (BLOCK, 2 * BLOCK):
        pair, half = step // (2 * size), step // size
        left = (pair[:, None] == pair[None]) & (half[:, None] > half[None])
        parts = _parts(inverse, 3, dtype)
        below = _product(_parts(jnp.where(left, a, 0.0), 3, dtype), parts, impl)
        inverse = inverse - _product(parts, _parts(below, 3, dtype), impl)
    return inverse


def _advance(dims: Dims, impl: Impl, split: int, tile_v: int, *refs: Any) -> None:
    (index, recurrent, conv, x, mixed), refs = refs[:5], refs[5:]
    *matrices, decays, source, slots, snapshots, valid, o_out, recurrent_out, conv_out = refs
    solve_in, scores_in = matrices[:split], matrices[split:]
    tile, head = pl.program_id(0), pl.program_id(1)
    layer, dtype = index[0], mixed.dtype
    kinds = [traced(i) for i in range(4)]
    columns = pl.ds(tile * tile_v, tile_v)
    channels = dims.channels(head, tile * tile_v, tile_v)
    # Each program also keeps some of the convolution's channels.
    share = -(-conv.shape[3] // (dims.Hv * dims.dv // tile_v))
    within = jnp.arange(pl.next_power_of_2(share))[None]
    channel = (tile * dims.Hv + head) * share + within
    mine = (within < share) & (channel < conv.shape[3])

    def window(first: jax.Array, tokens: jax.Array) -> tuple[Any, jax.Array, jax.Array]:
        """Steps, inputs and mask of those before what follows so many tokens since a piece."""
        before = conv.shape[2]
        step = jnp.arange(pl.next_power_of_2(before))[:, None]
        at, there = tokens - before + step, mine & (step < before)
        row, held = first * CHUNK + jnp.maximum(at, 0), plt.load(source.at[first])
        place = row // CHUNK, row % CHUNK, channel
        new = plt.load(x.at[place], mask=there & (at >= 0), other=0.0)
        place = layer, jnp.maximum(held, 0), jnp.clip(at + before, 0, before - 1), channel
        old = plt.load(conv.at[place], mask=there & (at < 0) & (held >= 0), other=0.0)
        return step, jnp.where(at >= 0, new, old), there

    def piece(p: jax.Array, carry: tuple) -> tuple:
        state, first, tokens = carry
        entry = plt.load(source.at[p])
        first = jnp.where(entry == _GOES_ON, first, p)
        tokens = jnp.where(entry == _GOES_ON, tokens, 0) + plt.load(valid.at[p])

        def begin(_: jax.Array) -> jax.Array:
            mask = jnp.full(state.shape, entry >= 0)
            place = layer, jnp.maximum(entry, 0), head, slice(None), columns
            return plt.load(recurrent.at[place], mask=mask, other=0.0)

        state = lax.cond(entry == _GOES_ON, lambda state: state, begin, state)
        q, k, v = (plt.load(mixed.at[p, :, part]) for part in channels)
        (q,), (k,) = _parts(q, 1, dtype), _parts(k, 1, dtype)
        solve, scores = ([plt.load(r.at[p, head]) for r in refs] for refs in (solve_in, scores_in))
        read, write, query = (plt.load(decays.at[p, head, i])[:, None] for i in kinds[:3])
        last = plt.load(decays.at[p, head, kinds[3], kinds[0]])

        parts = _parts(state, 3, dtype)
        wanted = v.astype(jnp.float32) - read * _product([k], parts, impl)
        fresh = _product(solve, _parts(wanted, 3, dtype), impl)
        o = query * _product([q], parts[:2], impl)
        o += _product(scores, _parts(fresh, 2, dtype), impl)
        place = pl.ds(head * dims.dv + tile * tile_v, tile_v)
        plt.store(o_out.at[p, :, place], o)
        state = last * state + _product([k.T], _parts(write * fresh, 3, dtype), impl)

        for entries in (slots, snapshots):
            goal = plt.load(entries.at[p])

            @pl.when(goal >= 0)
            def _(goal: jax.Array = goal) -> None:
                plt.store(recurrent_out.at[layer, goal, head, :, columns], state)
                step, inputs, there = window(first, tokens)
                plt.store(conv_out.at[layer, goal, step, channel], inputs, mask=there)

        return state, first, tokens

    start = jnp.zeros((dims.dk, tile_v), jnp.float32), traced(0), traced(0)
    lax.fori_loop(0, index[1], piece, start)

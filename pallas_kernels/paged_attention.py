"""Gated attention of a few tokens a sequence over its pages of keys and values.

With queries and keys normed and rotated (see `rotary_cache`), query head `h` reading key head
`h // (H / Hkv)`, for the token at index `i`, its own key among those it sees:

    p = softmax over j ≤ i of (q_h · k_j / sqrt(d))
    y_h = cast(Σ_j cast(p_j) v_j) · cast(sigmoid(gate_h))

A sequence is cut into at most `runs` runs of whole pages, as long as its token's index demands and
no longer: each is attended to by itself with the running maximum of a streamed softmax (Milakov and
Gimelshein, 2018), page by page, and the runs are added up afterwards (Dao et al., Flash-Decoding,
2023). Where a run begins depends on the token's index alone, so that neither the size of the table
nor what else is computed in the call can show in its bits. Weights are rounded to the type of the
queries before they meet the values, and are therefore not yet divided by their sum.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.backend import Impl, as_data, triton_call
from pallas_kernels.normed import Form, form_type, formed, store
from pallas_kernels.rotary_cache import rotary_cache

LOG2_E = 1.4426950408889634


def paged_attention(
    q_gate: jax.Array,
    k: jax.Array,
    v: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    q_norm: jax.Array,
    k_norm: jax.Array,
    layer: int,
    pool_layer: int,
    k_pages: jax.Array,
    v_pages: jax.Array,
    table: jax.Array,
    start: jax.Array,
    valid: jax.Array,
    *,
    eps: float,
    impl: Impl,
    form: Form | None = None,
    tile: int = 16,
    runs: int = 64,
    least: int = 2,
    programs: int | None = None,
    warps: int = 4,
    stages: int = 3,
    columns: int = 64,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Write keys and values of `T` tokens of each sequence, and attend to all up to each token.

    Args:
        q_gate: `[b, T, H·2·d]`, query and gate side by side within each head.
        k: `[b, T, Hkv·d]`.
        v: the same.
        cos: `[b, T, r]` float32.
        sin: the same.
        q_norm: `[La, d]`, zero-centred weights of all layers.
        k_norm: the same.
        layer: which of them.
        pool_layer: which layer of the pages.
        k_pages: `[L, N, page, Hkv, d]`, in the type of `k` or float8_e4m3fn.
        v_pages: the same.
        table: `[b, M]` int32, pages of each sequence.
        start: `[b]` int32, index of its first token in this call.
        valid: `[b]` int32, how many of its `T` tokens count.
        eps: of the norms.
        impl: see `Impl`.
        form: in which the output projection wants `y`; None for as it is.
        tile: rows of a matrix product, at least 16: tokens times heads of one key head. Tokens that
            do not fit read the keys once more. Like `runs`, it decides about bits.
        runs: the most runs into which a sequence is cut.
        least: pages of a run, at least: what is added up afterwards has to be written and read.
        programs: programs among which the runs of one sequence and key head are dealt out.
        warps: warps a program of the attention kernel.
        stages: pages in flight in it.
        columns: of a head, a program of the kernel that adds up.

    Returns:
        `y [b, T, H·d]` in the type of `q_gate` or in the form, zero for tokens past `valid` or the
        end of the table; `k_pages`, `v_pages`.
    """
    b, T = k.shape[:2]
    q, k_pages, v_pages = rotary_cache(
        q_gate,
        k,
        v,
        cos,
        sin,
        q_norm,
        k_norm,
        layer,
        pool_layer,
        k_pages,
        v_pages,
        table,
        start,
        valid,
        eps=eps,
        impl=impl,
    )
    page, Hkv, d = k_pages.shape[2:]
    H = q.shape[2]
    room = page * table.shape[1]
    if impl == "plain":
        count = _count(start, valid, T, room)
        y = attend(q, q_gate, pool_layer, k_pages, v_pages, table, start, count)
        counts = jnp.arange(T) < count[:, None]
        y = jnp.where(counts[..., None], y, 0)
        return y if form is None else formed(y, form), k_pages, v_pages

    tiles = pl.cdiv(T, tile // (H // Hkv))
    y = _launch(
        as_data(pool_layer, form.index if form else 0),
        q,
        q_gate,
        form.scale if form else None,
        *(k_pages, v_pages, table, start, valid),
        kind=form.kind if form else None,
        tile=tile,
        runs=runs,
        least=least,
        programs=programs or min(max(512 // (b * Hkv * tiles), 4), runs),
        warps=warps,
        stages=stages,
        columns=min(columns, d),
        impl=impl,
    )
    return y, k_pages, v_pages


@partial(
    jax.jit,
    static_argnames=(
        "kind",
        "tile",
        "runs",
        "least",
        "programs",
        "warps",
        "stages",
        "columns",
        "impl",
    ),
)
def _launch(
    index: jax.Array,
    q: jax.Array,
    q_gate: jax.Array,
    scales: jax.Array | None,
    k_pages: jax.Array,
    v_pages: jax.Array,
    table: jax.Array,
    start: jax.Array,
    valid: jax.Array,
    *,
    kind: type | None,
    tile: int,
    runs: int,
    least: int,
    programs: int,
    warps: int,
    stages: int,
    columns: int,
    impl: Impl,
) -> jax.Array:
    """`y` of `paged_attention` for queries `[b, T, H, d]`; `index` says which layer of the pages
    and which of the form's scales.
    """
    (b, T, H, d), (page, Hkv) = q.shape, k_pages.shape[2:4]
    rows, tiles, f32 = b * T, pl.cdiv(T, tile // (H // Hkv)), jnp.float32
    form = None if kind is None else Form(kind, scales)
    parts = triton_call(
        partial(_attend, T=T, tiles=tiles, tile=tile, runs=runs, least=least),
        index,
        q.reshape(rows, H, d),
        k_pages,
        v_pages,
        table,
        start,
        valid,
        grid=(tiles * programs, Hkv, b),
        out_shape=(
            jax.ShapeDtypeStruct((rows, H, runs), f32),
            jax.ShapeDtypeStruct((rows, H, runs), f32),
            jax.ShapeDtypeStruct((rows, H, runs, d), f32),
        ),
        impl=impl,
        name="paged_attention",
        warps=warps,
        stages=stages,
    )
    gates = q_gate.reshape(rows, H, 2 * d)
    flat, tree = jax.tree.flatten((index, scales, *parts, gates, start, valid))
    room = page * table.shape[1]
    how = {"T": T, "page": page, "room": room, "least": least, "columns": columns}
    add_up = partial(_add_up, **how, form=form)

    def body(*refs: Any) -> None:
        given: list[Any] = jax.tree.unflatten(tree, refs[:-1])
        add_up(*given, y=refs[-1])

    y = triton_call(
        body,
        *flat,
        grid=(d // columns, H, rows),
        out_shape=jax.ShapeDtypeStruct((rows, H * d), form_type(form, q.dtype)),
        impl=impl,
        name="paged_attention_sum",
    )
    return y.reshape(b, T, H * d)


def attend(
    q: jax.Array,
    q_gate: jax.Array,
    pool_layer: int,
    k_pages: jax.Array,
    v_pages: jax.Array,
    table: jax.Array,
    start: jax.Array,
    count: jax.Array,
) -> jax.Array:
    """The formula above: `[b, T, H·d]` for queries `[b, T, H, d]`, all keys at once.

    Of its `T` tokens the pages of sequence `s` hold `count[s]`.
    """
    b, T, H, d = q.shape
    Hkv = k_pages.shape[3]
    k, v = (a[pool_layer, table].astype(q.dtype).reshape(b, -1, Hkv, d) for a in (k_pages, v_pages))
    index = start[:, None] + jnp.arange(T)
    places = jnp.arange(k.shape[1])
    # What nobody has written may be anything, and nothing times infinity is not nothing.
    v = jnp.where((places < (start + count)[:, None])[..., None, None], v, 0)
    scores = jnp.einsum(
        "btghd,bsgd->btghs",
        q.reshape(b, T, Hkv, -1, d),
        k,
        preferred_element_type=jnp.float32,
    )
    seen = (places <= index[..., None])[:, :, None, None]
    scores = jnp.where(seen, scores * d**-0.5, -jnp.inf)
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    o = jnp.einsum(
        "btghs,bsgd->btghd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
    )
    o = (o / jnp.sum(weights, axis=-1, keepdims=True)).reshape(b, T, H, d)
    return gated(o, q_gate.reshape(b, T, H, 2 * d)[..., d:]).reshape(b, T, H * d)


def gated(o: jax.Array, gate: jax.Array) -> jax.Array:
    """`cast(o) · cast(sigmoid(gate))` for float32 `o`, in the type of the gate."""
    o, opening = (
        a.astype(gate.dtype).astype(jnp.float32)
        for a in (o, jax.nn.sigmoid(gate.astype(jnp.float32)))
    )
    return (o * opening).astype(gate.dtype)


def streamed(
    carry: Sequence[jax.Array],
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    seen: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One step of a streamed softmax, inside a kernel.

    Args:
        carry: maximum `[m]` of the scores so far in units of log2, sum `[m]` of the weights,
            and weighted sum of the values `[m, d]`; float32.
        q: `[m, d]`.
        k: `[n, d]`.
        v: `[n, d]`, zero where nobody sees it.
        seen: `[m, n]`, which keys count.
    """
    peak, total, o = carry
    exact = lax.Precision.HIGHEST if q.dtype == jnp.float32 else None
    scores = plt.dot(q, k, trans_b=True, precision=exact) * (q.shape[1] ** -0.5 * LOG2_E)
    scores = jnp.where(seen, scores, -jnp.inf)
    highest = jnp.maximum(peak, jnp.max(scores, axis=1))
    # Without a key so far there is no maximum to subtract.
    base = jnp.where(highest == -jnp.inf, 0.0, highest)
    weights, fade = jnp.exp2(scores - base[:, None]), jnp.exp2(peak - base)
    o = o * fade[:, None] + plt.dot(weights.astype(v.dtype), v, precision=exact)
    return highest, total * fade + jnp.sum(weights, axis=1), o


def _attend(
    index_in: Any,
    q: Any,
    k_pages: Any,
    v_pages: Any,
    table: Any,
    start: Any,
    valid: Any,
    peak_out: Any,
    total_out: Any,
    o_out: Any,
    *,
    T: int,
    tiles: int,
    tile: int,
    runs: int,
    least: int,
) -> None:
    """Program `(p, g, s)`: every so many runs of sequence `s` for some tokens' heads of one key."""
    p, g, s = (pl.program_id(axis) for axis in range(3))
    pool_layer = index_in[0]
    size, Hkv, d = k_pages.shape[2:]
    group = q.shape[1] // Hkv
    tokens = tile // group
    # Tiles of the same keys run next to each other, and find them in the cache.
    deal = lax.div(pl.num_programs(0), tiles)
    first_run, first_token = lax.div(p, tiles), lax.rem(p, tiles) * tokens
    begin = plt.load(start.at[s])
    count = _count(begin, plt.load(valid.at[s]), T, size * table.shape[1])

    rows = jnp.arange(tile)
    t = first_token + lax.div(rows, group)
    head = g * group + lax.rem(rows, group)
    row = s * T + t
    index = jnp.where(t < count, begin + t, -1)
    whole = jnp.arange(d)
    queries = plt.load(
        q.at[row[:, None], head[:, None], whole[None, :]], mask=(t < T)[:, None], other=0.0
    )
    lowest = begin + first_token
    last = begin + jnp.minimum(count, first_token + tokens) - 1
    last_page = lax.div(last, size)

    def attend_runs(turn: jax.Array, _: None) -> None:
        """All runs of this program, of the length that fits the lowest or the highest index."""
        span = _span(jnp.where(turn == 0, lowest, last), size, runs, least)
        live = jnp.minimum(lax.div(last_page, span) + 1, runs)

        def attend_run(lap: jax.Array, _: None) -> None:
            run = first_run + lap * deal

            def attend_page(number: jax.Array, carry: Any) -> Any:
                page, *carry = carry
                places = number * size + jnp.arange(size)
                k = plt.load(k_pages.at[pool_layer, page, :, g, :])
                v = plt.load(
                    v_pages.at[pool_layer, page, :, g, :],
                    mask=jnp.broadcast_to((places <= last)[:, None], (size, d)),
                    other=0.0,
                )
                seen = places[None, :] <= index[:, None]
                # A number ahead: looked up on the spot it would hold up the loads of its page.
                following = plt.load(table.at[s, jnp.minimum(number + 1, table.shape[1] - 1)])
                carry = streamed(carry, queries, k.astype(q.dtype), v.astype(q.dtype), seen)
                return following, *carry

            first = (
                plt.load(table.at[s, run * span]),
                jnp.full(tile, -jnp.inf, jnp.float32),
                jnp.zeros(tile, jnp.float32),
                jnp.zeros((tile, d), jnp.float32),
            )
            end = jnp.minimum((run + 1) * span, last_page + 1)
            _, peak, total, o = lax.fori_loop(run * span, end, attend_page, first)
            mine = (index >= 0) & (_span(index, size, runs, least) == span)
            plt.store(peak_out.at[row, head, run], peak, mask=mine)
            plt.store(total_out.at[row, head, run], total, mask=mine)
            to = o_out.at[row[:, None], head[:, None], run, whole[None, :]]
            plt.store(to, o, mask=jnp.broadcast_to(mine[:, None], o.shape))

        lax.fori_loop(0, lax.div(live - first_run + deal - 1, deal), attend_run, None)

    # The tokens of a call seldom differ in how their sequence is cut.
    turns = 1 + (_span(lowest, size, runs, least) != _span(last, size, runs, least)).astype(
        jnp.int32
    )
    lax.fori_loop(0, turns * (last >= lowest).astype(jnp.int32), attend_runs, None)


def _count(start: jax.Array, valid: jax.Array, T: int, room: int) -> jax.Array:
    """How many of a call's `T` tokens count, of a sequence for which its table has `room`."""
    return jnp.minimum(jnp.minimum(valid, T), room - start)


def _span(index: jax.Array, page: int, runs: int, least: int) -> jax.Array:
    """Pages of a run for the token at `index`: the fewest with which `runs` runs reach it."""
    return jnp.maximum(lax.div(index, page * runs) + 1, least)


def _add_up(
    index_in: Any,
    scales: Any,
    peaks: Any,
    totals: Any,
    parts: Any,
    q_gate: Any,
    start: Any,
    valid: Any,
    y: Any,
    *,
    T: int,
    page: int,
    room: int,
    least: int,
    columns: int,
    form: Form | None,
) -> None:
    """Program `(c, h, row)`: some columns of one head of a token, from all its runs."""
    c, h, row = (pl.program_id(axis) for axis in range(3))
    s, t = lax.div(row, T), lax.rem(row, T)
    runs, d = parts.shape[2:]
    begin = plt.load(start.at[s])
    index, count = begin + t, _count(begin, plt.load(valid.at[s]), T, room)
    live = jnp.where(
        t < count, lax.div(lax.div(index, page), _span(index, page, runs, least)) + 1, 0
    )
    counts = jnp.arange(runs) < live
    peak = plt.load(peaks.at[row, h, :], mask=counts, other=-jnp.inf)
    total = plt.load(totals.at[row, h, :], mask=counts, other=0.0)
    part = plt.load(
        parts.at[row, h, :, pl.ds(c * columns, columns)],
        mask=jnp.broadcast_to(counts[:, None], (runs, columns)),
        other=0.0,
    )
    gate = plt.load(q_gate.at[row, h, pl.ds(d + c * columns, columns)])
    weight = jnp.where(counts, jnp.exp2(peak - jnp.max(peak)), 0.0)
    o = jnp.sum(weight[:, None] * part, axis=0) / jnp.sum(weight * total)
    o = jnp.where(live > 0, o, 0.0)
    column = h * d + c * columns + jnp.arange(columns)
    store(y, (row,), column, gated(o, gate), form, scales, index_in[1])

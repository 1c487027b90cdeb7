"""The attention of `parted_attention` with keys in the order in which the tensor cores take them. On Hopper.

A warp has sixteen keys of each tile, with their values, in registers before the queries are there, and goes on to their
end without the other warps: what the warps found meets once, in shared memory. Up to eight queries are multiplied at
once, those of a source's beams or of heads that share keys, so that these are read once. A decoder's queries and its
new key are normalised and turned here (`Turning`), by every warp for itself. Scores come out of the tensor cores where
their weights go in again, and values are loaded where they are taken when transposed: threads exchange nothing but what
they add up.
Written in Gluon, Triton's lower language, which lets a kernel say how its numbers lie.
"""

from __future__ import annotations

from typing import Final

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from unspool.kernels.gpu.attention.output_parts import WARP_KEYS, PartedTiling, Parts, Turning
from unspool.kernels.gpu.attention.split_attention import UNIT
from unspool.kernels.gpu.gluon_launching import ask_for, let_next_start, wait_for_input
from unspool.kernels.gpu.launching import LINE_BYTES, launch, launch_options

MOST_QUERIES: Final = 8  # of one set of keys: half of the rows of one product of the tensor cores


@gluon.jit
def divide_keys(length, SPLITS: gl.constexpr, BLOCK: gl.constexpr):
    """As `parted_attention.divide_keys`, which Gluon can't call."""
    chunk = gl.maximum(gl.cdiv(gl.cdiv(length, SPLITS), BLOCK), 1) * BLOCK
    return chunk, gl.maximum(gl.cdiv(length, chunk), 1)


@gluon.constexpr_function
def _round_up(number):
    """The next power of two."""
    return 1 << (number - 1).bit_length()


@gluon.constexpr_function
def lay_values(warps, width):
    """How values (warps, 16, width) are loaded: by 16 bytes, where the tensor cores take them when transposed."""
    eighth = width // 8  # numbers of a thread
    numbers = [[0, 0, 1 << bit] for bit in range(eighth.bit_length() - 1)]
    lanes = [[0, 2, 0], [0, 4, 0], [0, 0, eighth], [0, 0, 2 * eighth], [0, 0, 4 * eighth]]
    warp_bases = [[1 << bit, 0, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([*numbers, [0, 1, 0], [0, 8, 0]], lanes, warp_bases, [], [warps, 16, width])


@gluon.jit
def load_keys(keys, place, number, end, WARPS: gl.constexpr, TILES: gl.constexpr, POSITION: gl.constexpr):
    """Keys from `place` on, in tiles: (warps, width, 16), or values (warps, 16, width)."""
    at = keys + place.to(gl.int64) * POSITION + number
    ks = ()
    for tile in gl.static_range(TILES):
        is_held = (place + tile * WARPS * 16 < end) & (number >= 0)
        ks = ks + (gl.load(at + tile * WARPS * 16 * POSITION, mask=is_held, other=0.0),)
    return ks


@gluon.jit
def transpose_values(vs, D: gl.constexpr, WARPS: gl.constexpr, TRANSPOSED: gl.constexpr):
    """Values as (warps, width, 16): a thread's numbers stay its own, and so are in another order."""
    transposed = ()
    for tile in gl.static_range(len(vs)):
        v = vs[tile].reshape([WARPS, 16, 8, D // 16, 2]).permute(0, 3, 4, 2, 1).reshape([WARPS, D, 16])
        transposed = transposed + (gl.convert_layout(v, TRANSPOSED),)
    return transposed


@gluon.jit
def find_read(taken, D: gl.constexpr):
    """Which number of a head stands in a place of what `transpose_values` made."""
    return taken % 8 * (D // 8) + taken // 16 * 2 + taken // 8 % 2


@gluon.constexpr_function
def lay_scores(warps):
    """How the first eight queries' scores (warps, 8, 16) come out of the tensor cores, and weights go in."""
    lanes = [[0, 0, 2], [0, 0, 4], [0, 1, 0], [0, 2, 0], [0, 4, 0]]
    warp_bases = [[1 << bit, 0, 0] for bit in range(warps.bit_length() - 1)]
    return gl.DistributedLinearLayout([[0, 0, 1], [0, 0, 8]], lanes, warp_bases, [], [warps, 8, 16])


@gluon.jit
def load_biases(
    BIASES, head, length, place, end, WARPS: gl.constexpr, TILES: gl.constexpr, DISTANCES: gl.constexpr
):  # fmt: skip
    """What is added to the scores of some tiles, and which of their keys there are: (warps, 1, 16) each."""
    biases, are_there = (), ()
    for tile in gl.static_range(TILES):
        at = place + tile * WARPS * 16
        bias = gl.full(at.shape, 0.0, gl.float32, at.type.layout)
        if DISTANCES > 0:
            back = gl.minimum(gl.maximum(length - at, 0), DISTANCES - 1)
            bias = gl.load(BIASES + head * DISTANCES + back, mask=at < end, other=0.0)
        biases = biases + (bias,)
        are_there = are_there + (at < end,)
    return biases, are_there


@gluon.jit
def score_keys(
    q, ks, biases, are_there, scale, WARPS: gl.constexpr, SUMS: gl.constexpr, SCORES: gl.constexpr
):  # fmt: skip
    """The scores of the first eight queries for some tiles' keys (warps, 8, 16), and the highest (warps, 8)."""
    scores = ()
    highest = gl.full([WARPS, 8, 16], float("-inf"), gl.float32, SCORES)
    for tile in gl.static_range(len(ks)):
        made = mma_v2(q, ks[tile], gl.zeros([WARPS, 16, 16], gl.float32, SUMS)).reshape([WARPS, 2, 8, 16])
        score, _ = gl.split(made.permute(0, 2, 3, 1))  # the other eight are of no query
        score = gl.convert_layout(score, SCORES) * scale + biases[tile]
        score = gl.where(are_there[tile], score, float("-inf"))
        scores = scores + (score,)
        highest = gl.maximum(highest, score)
    return scores, gl.max(highest, 2)


@gluon.jit
def read_values(
    scores, base, vs, read, dtype: gl.constexpr, WARPS: gl.constexpr, SCORES: gl.constexpr, WEIGHTS: gl.constexpr
):  # fmt: skip
    """What the scores' weights add to the values read (warps, width, 8), and the weights' sums (warps, 8)."""
    sums = gl.full([WARPS, 8, 16], 0.0, gl.float32, SCORES)
    for tile in gl.static_range(len(scores)):
        weights = gl.exp(scores[tile] - base[:, :, None])
        sums += weights
        weights = gl.convert_layout(weights.to(dtype).permute(0, 2, 1), WEIGHTS)
        read = mma_v2(vs[tile], weights, read)
    return read, gl.sum(sums, 2)


@gluon.jit
def join_warps(top_room, sum_room, read_room, score, value, HAS_ONE_MORE: gl.constexpr, RESULT: gl.constexpr):
    """What all warps have read, with one more key's score and value if there is one: the highest scores (1, 8), the
    weights' sums (1, 8), and what is read by them (width, 8)."""
    tops = top_room.load(gl.SliceLayout(1, RESULT))[:, None, :]
    sums = sum_room.load(gl.SliceLayout(1, RESULT))[:, None, :]
    peak = gl.max(tops, 0)
    if HAS_ONE_MORE:
        peak = gl.maximum(peak, score)
    base = gl.where(peak == float("-inf"), 0.0, peak)
    fades = gl.exp(tops - base[None, :, :])
    whole = gl.sum(sums * fades, 0)
    joined = gl.sum(read_room.load(RESULT) * fades, 0)
    if HAS_ONE_MORE:
        share = gl.exp(score - base)
        whole += share
        joined += value[:, None].to(gl.float32) * share
    return peak, whole, joined / gl.where(whole == 0.0, 1.0, whole)


@gluon.jit
def _split_pairs(x, AXIS: gl.constexpr):
    """The even and the odd numbers of heads (1, some, width), or (1, width, some) along axis 1."""
    if AXIS == 2:
        pairs = x.reshape([x.shape[0], x.shape[1], x.shape[2] // 2, 2])
    else:
        pairs = x.reshape([x.shape[0], x.shape[1] // 2, 2, x.shape[2]]).permute(0, 1, 3, 2)
    return gl.split(pairs)


@gluon.jit
def _join_pairs(one, two, AXIS: gl.constexpr):
    """What `_split_pairs` has split."""
    pairs = gl.join(one, two)
    if AXIS == 2:
        x = pairs.reshape([one.shape[0], one.shape[1], one.shape[2] * 2])
    else:
        x = pairs.permute(0, 1, 3, 2).reshape([one.shape[0], one.shape[1] * 2, one.shape[2]])
    return x


@gluon.jit
def _find_pairs(even, PAIRS: gl.constexpr, HALVED: gl.constexpr):
    """Which numbers of a head rope turns into the even ones and those behind them."""
    one, two = even, even + 1
    if HALVED:
        one, two = gl.where(even < 2 * PAIRS, even // 2, one), gl.where(even < 2 * PAIRS, even // 2 + PAIRS, two)
    return one, two


@gluon.jit
def _load_pairs(at, number, mask, PAIRS: gl.constexpr, HALVED: gl.constexpr, AXIS: gl.constexpr):
    """The numbers of heads that begin at `at` in pairs that rope turns; `number`: in the order after it."""
    if HALVED:
        first, second = _find_pairs(_split_pairs(number, AXIS)[0], PAIRS, HALVED)
        begin, is_there = _split_pairs(at, AXIS)[0], _split_pairs(mask, AXIS)[0]
        one, two = gl.load(begin + first, mask=is_there, other=0.0), gl.load(begin + second, mask=is_there, other=0.0)
    else:
        one, two = _split_pairs(gl.load(at + number, mask=mask, other=0.0), AXIS)
    return one.to(gl.float32), two.to(gl.float32)


@gluon.jit
def _lay_along(x, like, AXIS: gl.constexpr):
    """Numbers of pairs (width / 2,) along an axis of heads in pairs."""
    if AXIS == 2:
        laid = gl.convert_layout(x, gl.SliceLayout(0, gl.SliceLayout(1, like.type.layout)))[None, None, :]
    else:
        laid = gl.convert_layout(x, gl.SliceLayout(0, gl.SliceLayout(2, like.type.layout)))[None, :, None]
    return laid


@gluon.jit
def _turn(one, two, weights, cos, sin, eps, D: gl.constexpr, HAS_NORM: gl.constexpr, AXIS: gl.constexpr):
    """Heads after their norm of root mean squares and rope, in float32."""
    if HAS_NORM:
        root = gl.expand_dims(gl.rsqrt(gl.sum(one * one + two * two, AXIS) / D + eps), AXIS)
        one = one * root * _lay_along(weights[0], one, AXIS).to(gl.float32)
        two = two * root * _lay_along(weights[1], one, AXIS).to(gl.float32)
    cos, sin = _lay_along(cos, one, AXIS), _lay_along(sin, one, AXIS)
    return _join_pairs(one * cos - two * sin, one * sin + two * cos, AXIS)


@gluon.jit(do_not_specialize=["layer", "num_layers"])
def _attend_held(
    Q, BASE, TABLE, LENGTHS, BIASES, VALUES, STATS, TURNS, Q_NORM, K_NORM, eps, layer, num_layers, scale,
    R: gl.constexpr, G: gl.constexpr, HEADS: gl.constexpr, D: gl.constexpr, SPLITS: gl.constexpr, TILES: gl.constexpr,
    WARPS: gl.constexpr, UNIT: gl.constexpr, DISTANCES: gl.constexpr, PAIRS: gl.constexpr, HALVED: gl.constexpr,
    HAS_NORM: gl.constexpr, WRITES: gl.constexpr, LINE_BYTES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    KV_HEADS: gl.constexpr = HEADS // G
    QUERIES: gl.constexpr = R * G  # of a set of keys: several rows, or several heads of one
    gl.static_assert(R == 1 or G == 1)
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    TRANSPOSED: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    WEIGHTS: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    V: gl.constexpr = lay_values(WARPS, D)
    SCORES: gl.constexpr = lay_scores(WARPS)
    RESULT: gl.constexpr = gl.BlockedLayout([WARPS, 1, 1], [1, 4, 8], [1, WARPS, 1], [2, 1, 0])
    LINES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    POSITION: gl.constexpr = 2 * KV_HEADS * D  # numbers per position
    WIDTH: gl.constexpr = (HEADS + (2 * KV_HEADS if WRITES else 0)) * D  # of a row of the queries
    BLOCK: gl.constexpr = WARPS * 16 * TILES
    dtype: gl.constexpr = Q.dtype.element_ty
    head, split, own = gl.program_id(0), gl.program_id(1), gl.program_id(2)  # of keys; own: the set of them
    length = gl.load(LENGTHS + own).to(gl.int32)
    apart = gl.load(TABLE + num_layers) * POSITION
    keys = BASE + gl.load(TABLE + layer) * UNIT + own * apart + head * D
    chunk, used = divide_keys(length, SPLITS, BLOCK)
    begin = split * chunk
    end = gl.minimum(begin + chunk, length)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, B)))[:, None, None]
    place = begin + warp * 16 + gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, B)))[None, None, :]
    number = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :, None]
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, V)))[:, None, None]
    value_place = begin + warp * 16 + gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, V)))[None, :, None]
    column = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(1, V)))[None, None, :]
    ks = load_keys(keys, place, number, end, WARPS, TILES, POSITION)
    vs = load_keys(keys + KV_HEADS * D, value_place, column, end, WARPS, TILES, POSITION)
    LINE: gl.constexpr = LINE_BYTES * 8 // dtype.primitive_bitwidth  # numbers
    for start in range(begin + BLOCK, end, BLOCK):
        asked = start + gl.arange(0, _round_up(BLOCK), LINES)
        for line in gl.static_range(0, D, LINE):
            lines = keys + asked.to(gl.int64) * POSITION + line
            ask_for(lines, asked < end, PDL)
            ask_for(lines + KV_HEADS * D, asked < end, PDL)
    let_next_start(PDL)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, SCORES)))[:, None, None]
    scored = begin + warp * 16 + gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, SCORES)))[None, None, :]
    biases, are_there = load_biases(BIASES, head, length, scored, end, WARPS, TILES, DISTANCES)
    new_bias = 0.0
    if WRITES and DISTANCES > 0:
        new_bias = gl.load(BIASES + head * DISTANCES)
    query = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, A)))[None, :, None]
    along = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(1, A)))
    even, _ = gl.split(along.reshape([D // 2, 2]))
    q_weights, k_weights = (), ()
    if HAS_NORM:  # no kernel writes them
        if HALVED:
            one_at, two_at = _find_pairs(even, PAIRS, HALVED)
            q_weights = (gl.load(Q_NORM + one_at), gl.load(Q_NORM + two_at))
            k_weights = (gl.load(K_NORM + one_at), gl.load(K_NORM + two_at))
        else:
            q_weights = gl.split(gl.load(Q_NORM + along).reshape([D // 2, 2]))
            k_weights = gl.split(gl.load(K_NORM + along).reshape([D // 2, 2]))
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    top_room = gl.allocate_shared_memory(gl.float32, [WARPS, 8], FLAT)
    sum_room = gl.allocate_shared_memory(gl.float32, [WARPS, 8], FLAT)
    read_room = gl.allocate_shared_memory(gl.float32, [WARPS, D, 8], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    wait_for_input(PDL)

    if (length >= 0) & (split < used):
        q_row, q_head = own * R + query, head
        if G > 1:
            q_row, q_head = own + query * 0, head * G + query
        at = along[None, None, :]
        is_query = (query < QUERIES) & (at >= 0)
        q_at = Q + gl.where(query < QUERIES, q_row * WIDTH + q_head * D, 0)
        new_at = Q + own * WIDTH + (HEADS + head) * D
        k_new, v_new, q = ks[0], vs[0], ks[0]  # in case there is none
        if PAIRS > 0:  # all loads before the first use of one
            one, two = _load_pairs(q_at + at * 0, query * 0 + at, is_query, PAIRS, HALVED, 2)
            k_one, k_two = _load_pairs(new_at + number * 0, number, number >= 0, PAIRS, HALVED, 1)
            v_new = gl.load(new_at + KV_HEADS * D + column)
            turns = TURNS + own * 2 * PAIRS + even // 2
            cos = gl.load(turns, mask=even < 2 * PAIRS, other=1.0)
            sin = gl.load(turns + PAIRS, mask=even < 2 * PAIRS, other=0.0)
            q = _turn(one, two, q_weights, cos, sin, eps, D, HAS_NORM, 2).to(dtype)
            q = gl.convert_layout(q, A).broadcast_to([WARPS, 16, D])
            k_new = gl.convert_layout(_turn(k_one, k_two, k_weights, cos, sin, eps, D, HAS_NORM, 1).to(dtype), B)
        else:
            q = gl.load(q_at + at, mask=is_query, other=0.0).broadcast_to([WARPS, 16, D])
            if WRITES:
                k_new, v_new = gl.load(new_at + number), gl.load(new_at + KV_HEADS * D + column)
        seen_ks, seen_vs, seen_biases, seen_there = ks, vs, biases, are_there
        if WRITES:  # one more tile, all of the new key: the last split sees one of them, and writes it
            is_last = split == used - 1
            if is_last:
                into = keys + length.to(gl.int64) * POSITION
                gl.store(into + number, k_new)
                gl.store(into + KV_HEADS * D + column, v_new)
            seen_ks = ks + (k_new.broadcast_to([WARPS, D, 16]),)
            seen_vs = vs + (v_new.broadcast_to([WARPS, 16, D]),)
            seen_biases = biases + (gl.full(scored.shape, 0.0, gl.float32, scored.type.layout) + new_bias,)
            seen_there = are_there + ((scored == begin) & is_last,)
        scores, highest = score_keys(q, seen_ks, seen_biases, seen_there, scale, WARPS, SUMS, SCORES)
        base = gl.where(highest == float("-inf"), 0.0, highest)
        read = gl.zeros([WARPS, D, 8], gl.float32, SUMS)
        transposed = transpose_values(seen_vs, D, WARPS, TRANSPOSED)
        read, total = read_values(scores, base, transposed, read, dtype, WARPS, SCORES, WEIGHTS)
        for start in range(begin + BLOCK, end, BLOCK):
            later = start - begin
            k_others = load_keys(keys, place + later, number, end, WARPS, TILES, POSITION)
            v_others = load_keys(keys + KV_HEADS * D, value_place + later, column, end, WARPS, TILES, POSITION)
            others, are_others = load_biases(BIASES, head, length, scored + later, end, WARPS, TILES, DISTANCES)
            scores_others, higher = score_keys(q, k_others, others, are_others, scale, WARPS, SUMS, SCORES)
            higher = gl.maximum(highest, higher)
            base = gl.where(higher == float("-inf"), 0.0, higher)
            fade = gl.exp(highest - base)
            read *= gl.convert_layout(fade, gl.SliceLayout(1, SUMS))[:, None, :]
            others_transposed = transpose_values(v_others, D, WARPS, TRANSPOSED)
            read, more = read_values(scores_others, base, others_transposed, read, dtype, WARPS, SCORES, WEIGHTS)
            highest, total = higher, total * fade + more
        top_room.store(highest)
        sum_room.store(total)
        read_room.store(read)
        gl.thread_barrier()
        peak, whole, joined = join_warps(top_room, sum_room, read_room, 0.0, 0.0, False, RESULT)
        rd = find_read(gl.arange(0, D, gl.SliceLayout(1, gl.SliceLayout(0, RESULT))), D)[:, None]
        row = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(0, RESULT)))[None, :]
        part = ((own * R + row) * SPLITS + split) * HEADS + head
        stat = ((own * R + row) * 2 * SPLITS + split) * HEADS + head
        if G > 1:
            part = (own * SPLITS + split) * HEADS + head * G + row
            stat = (own * 2 * SPLITS + split) * HEADS + head * G + row
        is_out = (row < QUERIES) & (rd >= 0)
        gl.store(VALUES + part * D + rd, joined.to(VALUES.dtype.element_ty), mask=is_out)
        gl.store(STATS + stat, peak, mask=row < QUERIES)
        gl.store(STATS + stat + SPLITS * HEADS, whole, mask=row < QUERIES)


def attend_held(
    queries: torch.Tensor,
    base: torch.Tensor,
    table: torch.Tensor,
    biases: torch.Tensor | None,  # (heads, distances) float32
    parts: Parts,  # written
    layer: int,
    num_layers: int,
    scale: float,
    tiling: PartedTiling,
    *,
    kv_heads: int,
    writes: bool,
    turning: Turning | None = None,
) -> None:
    """As `parted_attention.PartedAttention`, whose arguments these are."""
    rows, splits, heads, width = parts.values.shape
    group = heads // kv_heads
    assert parts.rows_each * group <= MOST_QUERIES and not (writes and parts.rows_each > 1)
    assert writes or turning is None, "sources' keys are not turned"
    assert biases is None or group == 1, "biases are of heads with keys of their own"
    q_norm, k_norm = (None, None) if turning is None else (turning.q_norm, turning.k_norm)
    launch(
        _attend_held,
        (kv_heads, splits, rows // parts.rows_each),
        queries,
        base,
        table,
        parts.lengths,
        biases if biases is not None else parts.stats,
        parts.values,
        parts.stats,
        turning.turns if turning is not None else parts.stats,
        q_norm if q_norm is not None else queries,
        k_norm if k_norm is not None else queries,
        turning.eps if turning is not None else 0.0,
        layer,
        num_layers,
        scale,
        R=parts.rows_each,
        G=group,
        HEADS=heads,
        D=width,
        SPLITS=splits,
        TILES=tiling.block // (WARP_KEYS * tiling.warps),
        WARPS=tiling.warps,
        UNIT=UNIT,
        DISTANCES=biases.shape[1] if biases is not None else 0,
        PAIRS=turning.turns.shape[2] if turning is not None else 0,
        HALVED=turning is not None and turning.is_halved,
        HAS_NORM=q_norm is not None,
        WRITES=writes,
        LINE_BYTES=LINE_BYTES,
        num_warps=tiling.warps,
        **launch_options(),
    )

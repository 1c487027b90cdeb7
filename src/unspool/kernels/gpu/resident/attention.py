"""Attention of one token over a row's keys, or over its source's, by some programs a head."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from unspool.kernels.gpu.attention.held_attention import (
    find_read,
    join_warps,
    lay_scores,
    lay_values,
    load_keys,
    read_values,
    score_keys,
    transpose_values,
)
from unspool.kernels.gpu.gluon_launching import ask_for
from unspool.kernels.gpu.resident.tables import pick_long
from unspool.kernels.gpu.resident.vectors import count_all, count_each, count_kinds
from unspool.kernels.gpu.resident.words import (
    LINE,
    find_logarithm,
    put_weight,
    put_words,
    take_float,
    wait_for_parts,
    wait_for_words,
)


@gluon.jit
def find_keys(BASE, numbers, is_own, head, D: gl.constexpr, UNIT: gl.constexpr):
    """Where a head's keys of a layer begin: the row's own, or the source's."""
    return BASE + gl.where(is_own, pick_long(numbers, 18), pick_long(numbers, 20)) * UNIT + head * D


@gluon.jit
def ask_for_keys(keys, begin, end, H: gl.constexpr, BLOCK: gl.constexpr, WARPS: gl.constexpr):
    """Ask for keys and values of a head from `begin` to `end`."""
    LINES: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    place = gl.arange(0, 2 * BLOCK, LINES)
    for start in range(begin, end, BLOCK):
        asked = start + place // 2
        ask_for(keys + asked.to(gl.int64) * 2 * H + place % 2 * H, asked < end, True)


@gluon.jit
def load_first_keys(
    keys, begin, end, H: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr, TILES: gl.constexpr
):  # fmt: skip
    """The first tiles of keys and of values, as `attend` takes them."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    V: gl.constexpr = lay_values(WARPS, D)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, B)))[:, None, None]
    place = begin + warp * 16 + gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, B)))[None, None, :]
    number = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :, None]
    ks = load_keys(keys, place, number, end, WARPS, TILES, 2 * H)
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, V)))[:, None, None]
    value_place = begin + warp * 16 + gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, V)))[None, :, None]
    column = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(1, V)))[None, None, :]
    vs = load_keys(keys + H, value_place, column, end, WARPS, TILES, 2 * H)
    return ks, vs


@gluon.jit
def attend(
    given, keys, begin, end, is_last, scale, VALUES, WEIGHTS, tag, head, split, top_room, sum_room, read_room,
    H: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr, HAS_NEW: gl.constexpr, ks, vs,
):  # fmt: skip
    """Read some keys of a head by the query in shared memory, behind which its new key and value stand as
    `wait_for_asked` finds them: see `held_attention`. Leaves the split's part; the last one's has the new key too."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    TRANSPOSED: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    WEIGHTING: gl.constexpr = gl.DotOperandLayout(1, SUMS, 2)
    V: gl.constexpr = lay_values(WARPS, D)
    SCORES: gl.constexpr = lay_scores(WARPS)
    RESULT: gl.constexpr = gl.BlockedLayout([WARPS, 1, 1], [1, 4, 8], [1, WARPS, 1], [2, 1, 0])
    PAIRS: gl.constexpr = gl.BlockedLayout([D // 32], [32], [WARPS], [0])
    TAKEN: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, RESULT))
    TILES: gl.constexpr = len(ks)
    BLOCK: gl.constexpr = WARPS * 16
    dtype: gl.constexpr = given.dtype
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, B)))[:, None, None]
    place = begin + warp * 16 + gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, B)))[None, None, :]
    number = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(2, B)))[None, :, None]
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, V)))[:, None, None]
    value_place = begin + warp * 16 + gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, V)))[None, :, None]
    column = gl.arange(0, D, gl.SliceLayout(0, gl.SliceLayout(1, V)))[None, None, :]
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, SCORES)))[:, None, None]
    scored = begin + warp * 16 + gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(1, SCORES)))[None, None, :]
    q = given.slice(0, D, dim=0).load(gl.SliceLayout(0, gl.SliceLayout(1, A)))[None, None, :]
    q = q.broadcast_to([WARPS, 16, D])
    none = gl.full(scored.shape, 0.0, gl.float32, scored.type.layout)
    score, value = 0.0, none
    if HAS_NEW:
        made = given.slice(0, D, dim=0).load(PAIRS).to(gl.float32) * given.slice(D, D, dim=0).load(PAIRS).to(gl.float32)
        score = gl.where(is_last, gl.sum(made, 0) * scale, float("-inf"))
        value = given.slice(2 * D, D, dim=0).load(TAKEN)
    biases, are_there = (), ()
    for tile in gl.static_range(TILES):
        biases, are_there = biases + (none,), are_there + (scored + tile * BLOCK < end,)
    scores, highest = score_keys(q, ks, biases, are_there, scale, WARPS, SUMS, SCORES)
    base = gl.where(highest == float("-inf"), 0.0, highest)
    read = gl.zeros([WARPS, D, 8], gl.float32, SUMS)
    read, total = read_values(
        scores, base, transpose_values(vs, D, WARPS, TRANSPOSED), read, dtype, WARPS, SCORES, WEIGHTING
    )
    for start in range(begin + TILES * BLOCK, end, BLOCK):
        later = start - begin
        k_others = load_keys(keys, place + later, number, end, WARPS, 1, 2 * H)
        v_others = load_keys(keys + H, value_place + later, column, end, WARPS, 1, 2 * H)
        scores_others, higher = score_keys(q, k_others, (none,), (scored + later < end,), scale, WARPS, SUMS, SCORES)
        higher = gl.maximum(highest, higher)
        base = gl.where(higher == float("-inf"), 0.0, higher)
        fade = gl.exp(highest - base)
        read *= gl.convert_layout(fade, gl.SliceLayout(1, SUMS))[:, None, :]
        others_transposed = transpose_values(v_others, D, WARPS, TRANSPOSED)
        read, more = read_values(scores_others, base, others_transposed, read, dtype, WARPS, SCORES, WEIGHTING)
        highest, total = higher, total * fade + more
    top_room.store(highest)
    sum_room.store(total)
    read_room.store(read)
    gl.thread_barrier()
    peak, whole, joined = join_warps(top_room, sum_room, read_room, score, value, HAS_NEW, RESULT)
    rd = find_read(gl.arange(0, D, TAKEN), D)[:, None]
    row = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(0, RESULT)))[None, :]
    put_words(VALUES + split * H + head * D + rd + row * 0, joined, tag, (row == 0) & (rd >= 0))
    put_weight(WEIGHTS + (split * (H // D) + head) * LINE + row * 0, peak + find_logarithm(whole), tag, row == 0)


@gluon.jit
def wait_for_asked(WORDS, head, word, tag, H: gl.constexpr, D: gl.constexpr):
    """A head's query, its new key and its new value, in the order in which `attend` takes them."""
    which, place = gl.minimum(word // D, 2), word % D
    place = gl.where(which == 2, find_read(place, D), place)
    return wait_for_words(WORDS + which * H + head * D + place, tag + word * 0)


@gluon.jit
def write_new(found, word, keys, length, is_last, H: gl.constexpr, D: gl.constexpr):
    """Write a head's new key and value, as `wait_for_asked` has found them, behind its others."""
    which, place = word // D, word % D
    place = gl.where(which == 2, H + find_read(place, D), place)
    gl.store(keys + length.to(gl.int64) * 2 * H + place, found, mask=is_last & (which > 0) & (which < 3))


@gluon.jit
def wait_for_output(
    VALUES, WEIGHTS, tag, used, thread, H: gl.constexpr, D: gl.constexpr, SPLITS: gl.constexpr
):  # fmt: skip
    """A thread's numbers of an attention's output, from its parts' words and the logarithms of their weights."""
    COUNT: gl.constexpr = count_all(H)
    KINDS: gl.constexpr = count_kinds(H)
    found = wait_for_parts(VALUES, WEIGHTS, tag, used, thread, H, D, SPLITS)
    read = ()
    for kind in gl.static_range(KINDS):
        peak = found[SPLITS * COUNT + kind].to(gl.float32, bitcast=True)
        for split in gl.static_range(1, SPLITS):
            peak = gl.maximum(peak, found[SPLITS * COUNT + KINDS * split + kind].to(gl.float32, bitcast=True))
        peak = gl.where(peak == float("-inf"), 0.0, peak)
        whole, shares = peak * 0.0, ()
        for split in gl.static_range(SPLITS):
            weight = found[SPLITS * COUNT + KINDS * split + kind].to(gl.float32, bitcast=True)
            shares = shares + (gl.exp(weight - peak),)
            whole += shares[split]
        whole = gl.where(whole == 0.0, 1.0, whole)
        for number in gl.static_range(count_each(H, kind)):
            sums = peak * 0.0
            for split in gl.static_range(SPLITS):
                word = found[COUNT * split + count_each(H, 0) * kind + number]
                sums += take_float(word).to(gl.float32) * shares[split]
            read = read + ((sums / whole).to(gl.bfloat16),)
    return read


@gluon.jit
def age_words(
    VALUES, WEIGHTS, tag, head, split, is_idle, word, H: gl.constexpr, D: gl.constexpr, SPLITS: gl.constexpr
):  # fmt: skip
    """Give words of a part that is not used a tag of before: tags come again after 65,536 layers."""
    at = gl.where(word < D, VALUES + split * H + head * D + word, WEIGHTS + (split * (H // D) + head) * LINE + word - D)
    put_words(at, (word * 0).to(gl.float32), tag, (word < D + 2) & is_idle & (split < SPLITS) & (head < H // D))

"""Attention of one new token over few keys for each program, without tensor cores.

As `step_attention`, for one row of a model whose key heads serve few query heads. A program's keys are in registers
before its queries are there. Its threads have several keys each, of which a few neighbours share the numbers: scores,
softmax and sums stay inside warps until the parts of all threads are merged, once. In `step_attention` each step is
exchanged through shared memory, which takes longer than the few keys of a program take to multiply.
Keys and values are read as words of two numbers: a rotary pair.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.kernels.gpu.attention.clusters import announce, await_others, find_parts, find_there, join_parts, push
from unspool.kernels.gpu.attention.key_lookup import find_keys, find_new, find_room, find_row, wrap
from unspool.kernels.gpu.attention.split_attention import add_up, find_numbers
from unspool.kernels.gpu.launching import let_next_start, wait_for_input


@triton.jit
def _unpack(word, LIKE):
    """The two numbers of words."""
    dtype: tl.constexpr = LIKE.dtype.element_ty
    low = (word & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
    high = ((word >> 16) & 0xFFFF).to(tl.uint16).to(dtype, bitcast=True).to(tl.float32)
    return low, high


@triton.jit
def _pack(low, high):
    """Words of two numbers of 16 bits."""
    return low.to(tl.uint16, bitcast=True).to(tl.int32) | (high.to(tl.uint16, bitcast=True).to(tl.int32) << 16)


@triton.jit
def _load_keys(
    row, start, end, room, own, apart, listed, head, slot, rw,
    TIMES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr, POSITION: tl.constexpr, PAGE: tl.constexpr,
    IS_RING: tl.constexpr,
):  # fmt: skip
    """The keys and values of TIMES positions for each of ROWS slots."""
    ks, vs = (), ()
    for time in tl.static_range(TIMES):
        place = start + time * ROWS + slot
        keys_at = find_keys(
            row, wrap(place, room, IS_RING), place < end, own, apart, own, apart, 0, listed, POSITION, 0, PAGE
        )  # fmt: skip
        at = keys_at[:, None] + head * WIDTH + rw[None, :]
        is_there = (place < end)[:, None] & (rw < WIDTH)[None, :]
        ks = ks + (tl.load(at, mask=is_there, other=0),)
        vs = vs + (tl.load(at + POSITION // 2, mask=is_there, other=0),)
    return ks, vs


@triton.jit
def _load_weights(NORM, word, D: tl.constexpr, PAIRS: tl.constexpr, HALVED: tl.constexpr, IS_THERE: tl.constexpr):
    """The weights of a norm for pairs of numbers."""
    even, odd = word, word
    if IS_THERE:
        is_word = word < D // 2
        even = tl.load(NORM + find_numbers(2 * word, PAIRS, HALVED), mask=is_word, other=0.0).to(tl.float32)
        odd = tl.load(NORM + find_numbers(2 * word + 1, PAIRS, HALVED), mask=is_word, other=0.0).to(tl.float32)
    return even, odd


@triton.jit
def _load_pairs(QKV, PAIRED, at, word, D: tl.constexpr, PAIRS: tl.constexpr, HALVED: tl.constexpr):
    """A head's numbers as pairs, where a product left them: neighbours, or in two halves."""
    if HALVED:
        is_turned = word < PAIRS
        even = tl.load(QKV + at + word, mask=is_turned, other=0.0).to(tl.float32)
        odd = tl.load(QKV + at + PAIRS + word, mask=is_turned, other=0.0).to(tl.float32)
        if 2 * PAIRS < D:
            rest = tl.load(PAIRED + at // 2 + word, mask=(word >= PAIRS) & (word < D // 2), other=0)
            rest_even, rest_odd = _unpack(rest, QKV)
            even, odd = tl.where(is_turned, even, rest_even), tl.where(is_turned, odd, rest_odd)
    else:
        even, odd = _unpack(tl.load(PAIRED + at // 2 + word, mask=word < D // 2, other=0), QKV)
    return even, odd


@triton.jit
def _turn(
    even, odd, weights, cos, sin, eps, LIKE,
    D: tl.constexpr, PAIRS: tl.constexpr, HAS_NORM: tl.constexpr,
):  # fmt: skip
    """Queries or a key after norm and rope, rounded."""
    if HAS_NORM:
        root = tl.rsqrt(tl.sum(even * even + odd * odd, 1) / D + eps)[:, None]
        even, odd = even * root * weights[0], odd * root * weights[1]
    if PAIRS > 0:
        even, odd = even * cos - odd * sin, odd * cos + even * sin
    dtype: tl.constexpr = LIKE.dtype.element_ty
    return even.to(dtype), odd.to(dtype)


@triton.jit
def _score(even, odd, k_even, k_odd, place, slope, scale, softcap, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr):
    """The scores of a query for a key per slot: (slots,)."""
    score = tl.sum(even * k_even + odd * k_odd, 1) * scale
    if HAS_CAP:
        score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
    if HAS_SLOPES:
        score += slope * place.to(tl.float32)
    return score


@triton.jit
def _see_keys(
    ks, vs, queries, states, start, end, first, slot, slopes, scale, softcap, LIKE,
    G: tl.constexpr, TIMES: tl.constexpr, ROWS: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
):  # fmt: skip
    """Continue each slot's softmax over its keys, for every head."""
    seen = ()
    for g in tl.static_range(G):
        even, odd = queries[g]
        highest, total, read_even, read_odd = states[g]
        scores = ()
        higher = highest
        for time in tl.static_range(TIMES):
            place = start + time * ROWS + slot
            k_even, k_odd = _unpack(ks[time], LIKE)
            score = _score(even, odd, k_even, k_odd, place, slopes[g], scale, softcap, HAS_CAP, HAS_SLOPES)
            score = tl.where((place >= first) & (place < end), score, float("-inf"))
            scores = scores + (score,)
            higher = tl.maximum(higher, score)
        base = tl.where(higher == float("-inf"), 0.0, higher)
        fade = tl.exp(highest - base)
        total, read_even, read_odd = total * fade, read_even * fade[:, None], read_odd * fade[:, None]
        for time in tl.static_range(TIMES):
            weight = tl.exp(scores[time] - base)
            v_even, v_odd = _unpack(vs[time], LIKE)
            total += weight
            read_even += weight[:, None] * v_even
            read_odd += weight[:, None] * v_odd
        seen = seen + ((higher, total, read_even, read_odd),)
    return seen


@triton.jit
def _higher_two(a, b, a2, b2):
    return tl.maximum(a, a2), tl.maximum(b, b2)


@triton.jit
def _add_two(a, b, a2, b2):
    return a + a2, b + b2


@triton.jit
def _add_four(a, b, c, d, a2, b2, c2, d2):
    return a + a2, b + b2, c + c2, d + d2


@triton.jit
def _merge_slots(states, G: tl.constexpr):
    """What all slots have read of a head, its highest score and the sum of its weights: two heads at a time, because
    threads wait for each other each time."""
    merged = ()
    for g in tl.static_range(0, G, 2):
        top, total, even, odd = states[g]
        if g + 1 < G:
            top2, total2, even2, odd2 = states[g + 1]
            peak, peak2 = tl.reduce((top, top2), 0, _higher_two)
            fade, fade2 = tl.exp(top - peak), tl.exp(top2 - peak2)
            whole, whole2 = tl.reduce((total * fade, total2 * fade2), 0, _add_two)
            even, odd, even2, odd2 = tl.reduce(
                (even * fade[:, None], odd * fade[:, None], even2 * fade2[:, None], odd2 * fade2[:, None]),
                0,
                _add_four,
            )
            merged = merged + ((peak, whole, even, odd), (peak2, whole2, even2, odd2))
        else:
            peak = tl.max(top, 0)
            fade = tl.exp(top - peak)
            even, odd = tl.reduce((even * fade[:, None], odd * fade[:, None]), 0, _add_two)
            merged = merged + ((peak, tl.sum(total * fade, 0), even, odd),)
    return merged


@triton.jit
def _push_heads(
    merged, here, rank, rw, is_word,
    G: tl.constexpr, GJ: tl.constexpr, DP: tl.constexpr, CLUSTER: tl.constexpr,
):  # fmt: skip
    """As `clusters.push_part`."""
    EACH: tl.constexpr = DP // CLUSTER
    STATS: tl.constexpr = CLUSTER * GJ * 8
    for g in tl.static_range(G):
        highest, total, even, odd = merged[g]
        numbers = find_there(here + STATS + ((rank * GJ + g) * EACH + 2 * rw % EACH) * 4, 2 * rw // EACH)
        push(numbers, even, is_word)
        push(numbers + 4, odd, is_word)
        stats = find_there(here + (rank * GJ + g) * 8 + rw * 0, rw % CLUSTER)
        push(stats, tl.zeros_like(even) + highest, rw < CLUSTER)
        push(stats + 4, tl.zeros_like(even) + total, rw < CLUSTER)


@triton.jit
def _write_heads(merged, OUT, rw, is_word, SINKS, G: tl.constexpr, D: tl.constexpr, HAS_SINKS: tl.constexpr):
    """The output of heads whose keys one program has."""
    for g in tl.static_range(G):
        highest, total, even, odd = merged[g]
        if HAS_SINKS:
            total += tl.exp(tl.load(SINKS + g).to(tl.float32) - highest)
        tl.store(OUT + g * D + 2 * rw, (even / total).to(OUT.dtype.element_ty), mask=is_word)
        tl.store(OUT + g * D + 2 * rw + 1, (odd / total).to(OUT.dtype.element_ty), mask=is_word)


@triton.jit
def _write_parts(
    merged, PARTS, STATS, part, rw, is_word, G: tl.constexpr, DP: tl.constexpr
):  # fmt: skip
    """As `split_attention.put_together` does."""
    for g in tl.static_range(G):
        highest, total, even, odd = merged[g]
        tl.store(PARTS + (part + g) * DP + 2 * rw, even, mask=is_word)
        tl.store(PARTS + (part + g) * DP + 2 * rw + 1, odd, mask=is_word)
        tl.store(STATS + 2 * (part + g), highest)
        tl.store(STATS + 2 * (part + g) + 1, total)


@triton.jit(do_not_specialize=["layer", "num_layers", "window", "num_splits", "smallest_chunk"])
def attend_near(
    QKV, OUT, BASE, WORDS, PAIRED, TABLE, LENGTHS, TURNS, Q_NORM, K_NORM, SLOPES, SINKS,  # noqa: ARG001 - as all kernels
    PARTS, STATS, COUNTS,
    layer, num_layers, scale, softcap, eps, window, num_splits, smallest_chunk,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr, GJ: tl.constexpr, PAIRS: tl.constexpr, HALVED: tl.constexpr,
    TIMES: tl.constexpr, ROWS: tl.constexpr, UNIT: tl.constexpr, MOST_SPLITS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_SINKS: tl.constexpr, PAGE: tl.constexpr, IS_RING: tl.constexpr,
    CLUSTER: tl.constexpr, CLUSTER_KEYS: tl.constexpr, ROOM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if CLUSTER > 1:
        split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        announce(True)
    else:
        row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    POSITION: tl.constexpr = KV_HEADS * D  # words per position
    KEYS: tl.constexpr = TIMES * ROWS
    length = tl.load(LENGTHS + row)
    own, apart, _own, _apart, _shared, listed = find_row(
        WORDS, TABLE, LENGTHS, layer, num_layers, row, POSITION, UNIT // 2, 0, PAGE
    )  # fmt: skip
    room, apart = find_room(TABLE, apart, layer, num_layers, POSITION, IS_RING)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length + 1 - window, 0)
    num_keys = tl.maximum(length - first, 0)
    chunk = tl.maximum(tl.cdiv(tl.cdiv(num_keys, num_splits), ROWS) * ROWS, smallest_chunk)
    parts_at, is_joined = 0, False
    if CLUSTER > 1:
        few = tl.maximum(tl.cdiv(tl.cdiv(num_keys, CLUSTER), ROWS) * ROWS, ROWS)
        chunk = tl.where(num_keys <= CLUSTER * CLUSTER_KEYS, few, chunk)
    used = tl.maximum(tl.cdiv(num_keys, chunk), 1)
    if CLUSTER > 1:
        parts_at, is_joined = find_parts(ROOM), (length >= 0) & (used > 1) & (used <= CLUSTER)
    begin = first + split * chunk
    end = tl.minimum(begin + chunk, length)
    slot, rw = tl.arange(0, ROWS), tl.arange(0, DP // 2)
    ks, vs = _load_keys(
        row, begin, end, room, own, apart, listed, head, slot, rw, TIMES, ROWS, D // 2, POSITION, PAGE, IS_RING
    )  # fmt: skip
    # All slots have the queries, so that threads have what they need without exchanging it.
    word = rw[None, :] + slot[:, None] * 0
    is_word = word < D // 2
    q_weights = _load_weights(Q_NORM, word, D, PAIRS, HALVED, HAS_NORM)
    k_weights = _load_weights(K_NORM, word, D, PAIRS, HALVED, HAS_NORM)
    slopes = ()
    for g in tl.static_range(G):
        slope = 0.0
        if HAS_SLOPES:
            slope = tl.load(SLOPES + head * G + g)
        slopes = slopes + (slope,)
    let_next_start(PDL)
    wait_for_input(PDL)
    out = OUT + row.to(tl.int64) * (HEADS * D) + head * G * D
    if (length >= 0) & (split < used):
        # --- the queries and the new key: all loads before the first use of one
        given = row * ((HEADS + 2 * KV_HEADS) * D)
        loaded = ()
        for g in tl.static_range(G):
            loaded = loaded + (_load_pairs(QKV, PAIRED, given + (head * G + g) * D, word, D, PAIRS, HALVED),)
        k_even, k_odd = _load_pairs(QKV, PAIRED, given + (HEADS + head) * D, word, D, PAIRS, HALVED)
        v_new = tl.load(PAIRED + (given + (HEADS + KV_HEADS + head) * D) // 2 + word, mask=is_word, other=0)
        cos, sin = 1.0, 0.0
        if PAIRS > 0:
            cos = tl.load(TURNS + row * 2 * PAIRS + word, mask=word < PAIRS, other=1.0)
            sin = tl.load(TURNS + row * 2 * PAIRS + PAIRS + word, mask=word < PAIRS, other=0.0)
        k_even, k_odd = _turn(k_even, k_odd, k_weights, cos, sin, eps, QKV, D, PAIRS, HAS_NORM)
        # --- the new key, which the last part's first slot sees and writes
        is_new = (slot == 0) & (split == used - 1)
        is_written = is_new[:, None] & is_word
        v_even, v_odd = _unpack(v_new, QKV)
        queries, states = (), ()
        for g in tl.static_range(G):
            q_even, q_odd = _turn(loaded[g][0], loaded[g][1], q_weights, cos, sin, eps, QKV, D, PAIRS, HAS_NORM)
            query = (q_even.to(tl.float32), q_odd.to(tl.float32))
            score = _score(
                query[0], query[1], k_even.to(tl.float32), k_odd.to(tl.float32), length, slopes[g], scale, softcap,
                HAS_CAP, HAS_SLOPES,
            )  # fmt: skip
            queries = queries + (query,)
            highest = tl.where(is_new, score, float("-inf"))
            total = tl.where(is_new, 1.0, 0.0)
            state = (highest, total, tl.where(is_written, v_even, 0.0), tl.where(is_written, v_odd, 0.0))
            states = states + (state,)
        # --- the keys held
        states = _see_keys(
            ks, vs, queries, states, begin, end, first, slot, slopes, scale, softcap, QKV,
            G, TIMES, ROWS, HAS_CAP, HAS_SLOPES,
        )  # fmt: skip
        for start in tl.range(begin + KEYS, end, KEYS):
            ks, vs = _load_keys(
                row, start, end, room, own, apart, listed, head, slot, rw, TIMES, ROWS, D // 2, POSITION, PAGE, IS_RING
            )  # fmt: skip
            states = _see_keys(
                ks, vs, queries, states, start, end, first, slot, slopes, scale, softcap, QKV,
                G, TIMES, ROWS, HAS_CAP, HAS_SLOPES,
            )  # fmt: skip
        merged = _merge_slots(states, G)
        # --- combining the parts
        part = ((row * KV_HEADS + head) * num_splits + split) * GP
        if is_joined:
            if CLUSTER > 1:
                await_others()  # until all have begun
                _push_heads(merged, parts_at, split, rw, rw < D // 2, G, GJ, DP, CLUSTER)
                announce(False)
        elif used == 1:
            _write_heads(merged, out, rw, rw < D // 2, SINKS + head * G, G, D, HAS_SINKS)
        else:
            _write_parts(merged, PARTS, STATS, part, rw, rw < D // 2, G, DP)
            add_up(
                out, PARTS, STATS, COUNTS, row * KV_HEADS + head, used, num_splits,
                G, G, HEADS * D, D, GP, DP, GJ, MOST_SPLITS, SINKS + head * G, HAS_SINKS,
            )  # fmt: skip
        # Only now: who announces its part waits for what it has written elsewhere.
        into, _is_there = find_new(row, wrap(length, room, IS_RING), length >= 0, own, apart, 0, listed, POSITION, PAGE)
        into = into + head * (D // 2) + word
        tl.store(into, _pack(k_even, k_odd), mask=is_written)
        tl.store(into + POSITION // 2, v_new, mask=is_written)
    if CLUSTER > 1:  # noqa: SIM102 - the one is a constant, the other is not
        if is_joined & (split < CLUSTER):
            if split >= used:
                await_others()
                announce(False)
            await_others()
            join_parts(out, parts_at, split, used, G, G, HEADS * D, D, DP, GJ, CLUSTER, SINKS + head * G, HAS_SINKS)


def count_slots(warps: int, width: int) -> int:
    """How many keys a program's threads hold at a time, 16 bytes of one each: (keys, width) is all of them."""
    return warps * 256 // width

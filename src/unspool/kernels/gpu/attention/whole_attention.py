"""Attention of one new token over few keys, by programs that share a head's numbers instead of its keys.

Every program weighs all keys of a head and adds up its share of the values' numbers, so that no parts are to be put
together, which takes half of the time over few keys. The keys are in registers before the queries are there.
"""

from __future__ import annotations

import triton
import triton.language as tl

from unspool.kernels.gpu.attention.key_lookup import find_keys, wrap


@triton.jit
def load_whole(
    row, start, end, head, part, room, own, apart, listed,
    KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, SHARE: tl.constexpr, KEYS: tl.constexpr,
    PAGE: tl.constexpr, IS_RING: tl.constexpr,
):  # fmt: skip
    """Keys (KEYS, DP) from a position on, and a share (KEYS, SHARE) of the numbers of their values."""
    place, rd = start + tl.arange(0, KEYS), tl.arange(0, DP)
    rs = part * SHARE + tl.arange(0, SHARE)
    is_there = place < end
    keys_at = find_keys(
        row, wrap(place, room, IS_RING), is_there, own, apart, own, apart, 0, listed, 2 * KV_HEADS * D, 0, PAGE
    )  # fmt: skip
    at = keys_at[:, None] + head * D
    k = tl.load(at + rd[None, :], mask=is_there[:, None] & (rd < D)[None, :], other=0.0)
    v = tl.load(at + KV_HEADS * D + rs[None, :], mask=is_there[:, None] & (rs < D)[None, :], other=0.0)
    return k, v


@triton.jit
def _turn(
    x, x_pair, weight, swapped, cos, sin, eps, D: tl.constexpr, PAIRS: tl.constexpr, HAS_NORM: tl.constexpr
):  # fmt: skip
    """A head after its norm and its rotation."""
    x, x_pair = x.to(tl.float32), x_pair.to(tl.float32)
    if HAS_NORM:
        root = tl.rsqrt(tl.sum(x * x, 0) / D + eps)
        x = x * root * weight.to(tl.float32)
        x_pair = x_pair * root * swapped.to(tl.float32)
    if PAIRS > 0:
        x = x * cos + x_pair * sin
    return x


@triton.jit
def _score(q, k, place, is_key, slope, scale, softcap, HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr):
    """The scores of some keys; minus infinity for those that are not seen."""
    scores = tl.sum(k.to(tl.float32) * q[None, :], 1) * scale
    if HAS_CAP:
        scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
    if HAS_SLOPES:
        scores += slope * place.to(tl.float32)
    return tl.where(is_key, scores, float("-inf"))


@triton.jit
def attend_whole(
    QKV, OUT, TURNS, SLOPES, SINKS, into, k_first, v_first, k_second, v_second, q_weights, k_weights,
    first, length, window, head, part, scale, softcap, eps,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, G: tl.constexpr,
    PAIRS: tl.constexpr, HALVED: tl.constexpr, SHARE: tl.constexpr, KEYS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):  # fmt: skip
    """Write a share of the output of a key head's queries, and of the new key and value."""
    rd = tl.arange(0, DP)
    rs = part * SHARE + tl.arange(0, SHARE)
    is_number, is_mine, is_turned = rd < D, rs < D, rd < 2 * PAIRS
    given, pair = rd, rd ^ 1
    if HALVED:
        given = tl.where(is_turned, given % 2 * PAIRS + given // 2, given)
        pair = tl.where(is_turned, pair % 2 * PAIRS + pair // 2, pair)
    # All loads before the first use: what waits for one of them waits for all.
    cos, sin = rd.to(tl.float32), rd.to(tl.float32)
    key_at = QKV + (HEADS + head) * D
    k_new = tl.load(key_at + given, mask=is_number, other=0.0)
    v_new = tl.load(key_at + KV_HEADS * D + rs, mask=is_mine, other=0.0)
    k_pair = k_new
    if PAIRS > 0:
        k_pair = tl.load(key_at + pair, mask=is_turned, other=0.0)
        cos = tl.load(TURNS + rd // 2, mask=is_turned, other=1.0)
        sin = tl.load(TURNS + PAIRS + rd // 2, mask=is_turned, other=0.0)
        sin = tl.where(rd % 2 == 0, -sin, sin)
    queries, pairs = (), ()
    for g in tl.static_range(G):
        q = tl.load(QKV + (head * G + g) * D + given, mask=is_number, other=0.0)
        q_pair = q
        if PAIRS > 0:
            q_pair = tl.load(QKV + (head * G + g) * D + pair, mask=is_turned, other=0.0)
        queries, pairs = queries + (q,), pairs + (q_pair,)
    k_new = _turn(k_new, k_pair, k_weights[0], k_weights[1], cos, sin, eps, D, PAIRS, HAS_NORM)
    k_new = k_new.to(QKV.dtype.element_ty)
    place = first + tl.arange(0, KEYS)
    is_first, is_second = place < length, place + KEYS < length
    if HAS_WINDOW:
        is_first = is_first & (place > length - window)
        is_second = is_second & (place + KEYS > length - window)
    for g in tl.static_range(G):
        q = _turn(queries[g], pairs[g], q_weights[0], q_weights[1], cos, sin, eps, D, PAIRS, HAS_NORM)
        q = q.to(QKV.dtype.element_ty).to(tl.float32)
        slope = 0.0
        if HAS_SLOPES:
            slope = tl.load(SLOPES + head * G + g)
        new = tl.sum(tl.where(is_number, q * k_new.to(tl.float32), 0.0), 0) * scale
        if HAS_CAP:
            new = softcap * (2.0 * tl.sigmoid(2.0 * new / softcap) - 1.0)
        if HAS_SLOPES:
            new += slope * length.to(tl.float32)
        scores = _score(q, k_first, place, is_first, slope, scale, softcap, HAS_CAP, HAS_SLOPES)
        others = tl.full((KEYS,), float("-inf"), tl.float32)
        if length - first > KEYS:
            others = _score(q, k_second, place + KEYS, is_second, slope, scale, softcap, HAS_CAP, HAS_SLOPES)
        top = tl.maximum(tl.max(tl.maximum(scores, others), 0), new)
        weights, own = tl.exp(scores - top), tl.exp(new - top)
        read = v_first.to(tl.float32) * weights[:, None]
        if length - first > KEYS:
            more = tl.exp(others - top)
            read += v_second.to(tl.float32) * more[:, None]
            weights += more
        total = tl.sum(weights, 0) + own
        if HAS_SINKS:
            total += tl.exp(tl.load(SINKS + head * G + g).to(tl.float32) - top)
        out = (tl.sum(read, 0) + own * v_new.to(tl.float32)) / total
        tl.store(OUT + (head * G + g) * D + rs, out.to(OUT.dtype.element_ty), mask=is_mine)
    tl.store(into + KV_HEADS * D + rs, v_new, mask=is_mine)
    if part == 0:
        tl.store(into + rd, k_new, mask=is_number)

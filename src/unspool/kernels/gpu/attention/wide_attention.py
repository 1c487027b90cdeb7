"""Several new tokens per row: as `step_attention`, for drafts and for candidates.

All new tokens of a row see the keys held. Drafts have consecutive positions, and each sees those before it; candidates
(`is_forked`) share one position, and each sees only itself. Their queries are one matrix, so the keys are read once
per row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.attention.key_lookup import find_new, find_row, find_tile
from unspool.kernels.gpu.attention.split_attention import (
    SMALLEST_DOT,
    HeadShape,
    Launch,
    SplitAttention,
    find_numbers,
    put_together,
    read_values,
    score_keys,
)
from unspool.kernels.gpu.attention.step_tilings import SEVERAL_ROWS, count_splits, fit_memory, pad_width
from unspool.kernels.gpu.launching import let_next_start, wait_for_input
from unspool.kernels.key_layout import KeyLayout


@triton.jit
def _turn(x, pair, token, TURNS, DP: tl.constexpr, PAIRS: tl.constexpr):
    """Rows (n, DP) rotated to the positions of their tokens (n,); `pair` has neighbours exchanged."""
    rd = tl.arange(0, DP)
    at = TURNS + token[:, None] * 2 * PAIRS + rd[None, :] // 2
    is_turned = (rd < 2 * PAIRS)[None, :] & (token >= 0)[:, None]
    cos = tl.load(at, mask=is_turned, other=1.0)
    sin = tl.load(at + PAIRS, mask=is_turned, other=0.0)
    return x * cos + pair * tl.where((rd % 2 == 0)[None, :], -sin, sin)


@triton.jit(do_not_specialize=["layer", "num_layers", "window", "num_splits", "smallest_chunk"])
def _attend_wide(
    QKV, OUT, BASE, TABLE, LENGTHS, TURNS, Q_NORM, K_NORM, SLOPES, SINKS,
    PARTS, STATS, COUNTS,
    layer, num_layers, scale, softcap, eps, window, num_splits, smallest_chunk,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr, GJ: tl.constexpr, NEW: tl.constexpr, NP: tl.constexpr, PAIRS: tl.constexpr,
    HALVED: tl.constexpr,
    BLOCK: tl.constexpr, UNIT: tl.constexpr, MOST_SPLITS: tl.constexpr, IS_FORKED: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PAGE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    POSITION: tl.constexpr = 2 * KV_HEADS * D  # numbers per position
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    length = tl.load(LENGTHS + row)  # keys held; where the first new one goes
    own, apart, shared, shared_apart, num_shared, listed = find_row(
        BASE, TABLE, LENGTHS, layer, num_layers, row, POSITION, UNIT, 0, PAGE
    )
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length + 1 - window, 0)
        if PAGE > 0:
            first = first // BLOCK * BLOCK  # tiles begin where they do without a window, so that none crosses a block
    num_keys = tl.maximum(length - first, 0)
    chunk = tl.maximum(tl.cdiv(tl.cdiv(num_keys, num_splits), BLOCK) * BLOCK, smallest_chunk)
    used = tl.maximum(tl.cdiv(num_keys, chunk), 1)
    let_next_start(PDL)
    wait_for_input(PDL)
    if (length >= 0) & (split < used):
        rg, rd, rn = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, NP)
        token = tl.minimum(rg // G, NEW - 1)  # the token of each query
        is_head, is_number, is_new = rg < G * NEW, rd < D, rn < NEW
        given, pair = find_numbers(rd, PAIRS, HALVED), find_numbers(rd ^ 1, PAIRS, HALVED)
        ahead, new_ahead = token, rn
        if IS_FORKED:
            ahead, new_ahead = token * 0, rn * 0
        # --- the queries and the new keys, rotated to their positions
        heads_at = QKV + ((row * NEW + token).to(tl.int64) * WIDTH + (head * G + rg % G) * D)[:, None]
        is_query = is_head[:, None] & is_number[None, :]
        q = tl.load(heads_at + given[None, :], mask=is_query, other=0.0).to(tl.float32)
        key_at = QKV + ((row * NEW + rn).to(tl.int64) * WIDTH + (HEADS + head) * D)[:, None]
        is_key_number = is_new[:, None] & is_number[None, :]
        k_new = tl.load(key_at + given[None, :], mask=is_key_number, other=0.0).to(tl.float32)
        v_new = tl.load(key_at + KV_HEADS * D + rd[None, :], mask=is_key_number, other=0.0)
        q_root, k_root = tl.full((GP,), 1.0, tl.float32), tl.full((NP,), 1.0, tl.float32)
        if HAS_NORM:
            q_root = tl.rsqrt(tl.sum(q * q, 1) / D + eps)
            k_root = tl.rsqrt(tl.sum(k_new * k_new, 1) / D + eps)
            q = q * q_root[:, None] * tl.load(Q_NORM + given, mask=is_number, other=0.0).to(tl.float32)[None, :]
            k_new = k_new * k_root[:, None] * tl.load(K_NORM + given, mask=is_number, other=0.0).to(tl.float32)[None, :]
        if PAIRS > 0:
            is_turned = rd < 2 * PAIRS
            q_pair = tl.load(heads_at + pair[None, :], mask=is_query & is_turned[None, :], other=0.0).to(tl.float32)
            k_pair = tl.load(key_at + pair[None, :], mask=is_key_number & is_turned[None, :], other=0.0)
            k_pair = k_pair.to(tl.float32)
            if HAS_NORM:
                q_weight = tl.load(Q_NORM + pair, mask=is_turned, other=0.0).to(tl.float32)
                k_weight = tl.load(K_NORM + pair, mask=is_turned, other=0.0).to(tl.float32)
                q_pair = q_pair * q_root[:, None] * q_weight[None, :]
                k_pair = k_pair * k_root[:, None] * k_weight[None, :]
            q = _turn(q, q_pair, row * NEW + token, TURNS, DP, PAIRS)
            k_new = _turn(k_new, k_pair, row * NEW + tl.minimum(rn, NEW - 1), TURNS, DP, PAIRS)
        slopes = tl.full((GP,), 0.0, tl.float32)
        if HAS_SLOPES:
            slopes = tl.load(SLOPES + head * G + rg % G, mask=is_head, other=0.0)
        query = q.to(QKV.dtype.element_ty)
        k_new = k_new.to(QKV.dtype.element_ty)
        # --- the keys held
        highest = tl.full((GP,), float("-inf"), tl.float32)
        total = tl.full((GP,), 0.0, tl.float32)
        read = tl.full((GP, DP), 0.0, tl.float32)
        begin = first + split * chunk
        end = tl.minimum(begin + chunk, length)
        for start in tl.range(begin, end, BLOCK):
            place = start + tl.arange(0, BLOCK)
            keys_at = find_tile(
                row, start, place, place < end, own, apart, shared, shared_apart, num_shared, listed, POSITION, 0, PAGE
            )
            at = keys_at[:, None] + head * D + rd[None, :]
            is_held = (place < end)[:, None] & is_number[None, :]
            k = tl.load(at, mask=is_held, other=0.0)
            v = tl.load(at + KV_HEADS * D, mask=is_held, other=0.0)
            scores = score_keys(query, k, place, slopes, scale, softcap, HAS_CAP, HAS_SLOPES)
            is_seen = (place < end)[None, :] & (rg >= 0)[:, None]
            if HAS_WINDOW:
                is_seen = is_seen & (place[None, :] > (length + ahead)[:, None] - window)
            scores = tl.where(is_seen, scores, float("-inf"))
            highest, total, read = read_values(
                scores, v, highest, total, read, True
            )  # all keys may be outside a window
        # --- the new keys, which the last part sees and writes
        if split == used - 1:
            scores = score_keys(query, k_new, length + new_ahead, slopes, scale, softcap, HAS_CAP, HAS_SLOPES)
            if IS_FORKED:
                is_seen = rn[None, :] == token[:, None]
            else:
                is_seen = rn[None, :] <= token[:, None]
                if HAS_WINDOW:
                    is_seen = is_seen & (rn[None, :] > token[:, None] - window)
            scores = tl.where(is_seen & is_new[None, :], scores, float("-inf"))
            highest, total, read = read_values(scores, v_new, highest, total, read, False)  # every query sees itself
            into, is_there = find_new(row, length + rn, is_new, own, apart, num_shared, listed, POSITION, PAGE)
            into = into[:, None] + head * D + rd[None, :]
            is_stored = is_there[:, None] & is_number[None, :]
            tl.store(into, k_new, mask=is_stored)
            tl.store(into + KV_HEADS * D, v_new, mask=is_stored)
        # --- combining the parts
        put_together(
            read, highest, total, OUT + row.to(tl.int64) * (NEW * HEADS * D) + head * G * D, PARTS, STATS, COUNTS,
            row * KV_HEADS + head, split, used, num_splits, G * NEW, G, HEADS * D, D, GP, DP, GJ, MOST_SPLITS,
            SINKS + head * G, HAS_SINKS,
        )  # fmt: skip


class WideAttention(SplitAttention):
    """The attention of captured passes of several tokens per row."""

    def __init__(self, rows: int, num_new: int, shape: HeadShape, device: torch.device, *, is_forked: bool) -> None:
        self._new, self._is_forked = num_new, is_forked
        splits = count_splits(SEVERAL_ROWS.programs // (rows * shape.kv_heads))
        super().__init__(rows, num_new * shape.heads // shape.kv_heads, pad_width(shape), shape, device, splits)

    def _prepare(self, qkv: torch.Tensor, base: torch.Tensor, layout: KeyLayout) -> Launch:  # noqa: ARG002 - for those that look at its dtype
        assert not layout.branches and not layout.is_away, "shared and offloaded keys are read one token at a time"
        block, stages = fit_memory(SEVERAL_ROWS, self._width * qkv.element_size(), layout)
        constants = {
            "DP": self._width,
            "NEW": self._new,
            "NP": max(SMALLEST_DOT, triton.next_power_of_2(self._new)),
            "BLOCK": block,
            "IS_FORKED": self._is_forked,
            "PAGE": layout.block_size,
            "num_warps": SEVERAL_ROWS.warps,
            "num_stages": stages,
        }
        return Launch(_attend_wide, SEVERAL_ROWS.chunk, constants)

"""Several new tokens a row: as `attention`, for drafts that are checked and candidates that are tried.

All of a row's new tokens see the keys held. Drafts stand one after the other, and each sees those before it;
candidates (`is_forked`) stand at one position, and each sees itself alone. The queries of all of them are one
matrix, so the keys are read once for a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.attention import (
    SEVERAL_ROWS,
    SMALLEST_DOT,
    HeadShape,
    SplitAttention,
    count_splits,
    fit_memory,
    pad_width,
    put_together,
)
from unspool.kernels.gpu.launching import let_next_start, wait_for_input


@triton.jit
def _turn(x, pair, token, TURNS, DP: tl.constexpr, PAIRS: tl.constexpr):
    """Rows (n, DP) turned as their tokens (n,) are; `pair` has neighbours exchanged."""
    rd = tl.arange(0, DP)
    at = TURNS + token[:, None] * 2 * PAIRS + rd[None, :] // 2
    is_turned = (rd < 2 * PAIRS)[None, :] & (token >= 0)[:, None]
    cos = tl.load(at, mask=is_turned, other=1.0)
    sin = tl.load(at + PAIRS, mask=is_turned, other=0.0)
    return x * cos + pair * tl.where((rd % 2 == 0)[None, :], -sin, sin)


@triton.jit(do_not_specialize=["layer", "num_layers", "window", "num_splits", "smallest_chunk"])
def _attend_wide(
    QKV, OUT, BASE, TABLE, LENGTHS, TURNS, Q_NORM, K_NORM, SLOPES,
    PARTS, STATS, COUNTS,
    layer, num_layers, scale, softcap, eps, window, num_splits, smallest_chunk,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr, GJ: tl.constexpr, NEW: tl.constexpr, NP: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK: tl.constexpr, UNIT: tl.constexpr, MOST_SPLITS: tl.constexpr, IS_FORKED: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SLOPES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    POSITION: tl.constexpr = 2 * KV_HEADS * D  # numbers a position takes
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    length = tl.load(LENGTHS + row)  # keys held; where the first new one goes
    own = BASE + tl.load(TABLE + layer) * UNIT
    own_row = tl.load(TABLE + num_layers) * POSITION
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length + 1 - window, 0)
    num_keys = tl.maximum(length - first, 0)
    chunk = tl.maximum(tl.cdiv(tl.cdiv(num_keys, num_splits), BLOCK) * BLOCK, smallest_chunk)
    used = tl.maximum(tl.cdiv(num_keys, chunk), 1)
    let_next_start(PDL)
    wait_for_input(PDL)
    if (length >= 0) & (split < used):
        rg, rd, rn = tl.arange(0, GP), tl.arange(0, DP), tl.arange(0, NP)
        token = tl.minimum(rg // G, NEW - 1)  # whose query it is
        is_head, is_number, is_new = rg < G * NEW, rd < D, rn < NEW
        ahead, new_ahead = token, rn
        if IS_FORKED:
            ahead, new_ahead = token * 0, rn * 0
        # --- the queries and the new keys, turned to their positions
        heads_at = QKV + ((row * NEW + token).to(tl.int64) * WIDTH + (head * G + rg % G) * D)[:, None]
        is_query = is_head[:, None] & is_number[None, :]
        q = tl.load(heads_at + rd[None, :], mask=is_query, other=0.0).to(tl.float32)
        key_at = QKV + ((row * NEW + rn).to(tl.int64) * WIDTH + (HEADS + head) * D)[:, None]
        is_key_number = is_new[:, None] & is_number[None, :]
        k_new = tl.load(key_at + rd[None, :], mask=is_key_number, other=0.0).to(tl.float32)
        v_new = tl.load(key_at + KV_HEADS * D + rd[None, :], mask=is_key_number, other=0.0)
        q_root, k_root = tl.full((GP,), 1.0, tl.float32), tl.full((NP,), 1.0, tl.float32)
        if HAS_NORM:
            q_root = tl.rsqrt(tl.sum(q * q, 1) / D + eps)
            k_root = tl.rsqrt(tl.sum(k_new * k_new, 1) / D + eps)
            q = q * q_root[:, None] * tl.load(Q_NORM + rd, mask=is_number, other=0.0).to(tl.float32)[None, :]
            k_new = k_new * k_root[:, None] * tl.load(K_NORM + rd, mask=is_number, other=0.0).to(tl.float32)[None, :]
        if PAIRS > 0:
            is_turned = rd < 2 * PAIRS
            pair = rd ^ 1
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
            at = (own + row * own_row + place.to(tl.int64) * POSITION)[:, None] + head * D + rd[None, :]
            is_held = (place < end)[:, None] & is_number[None, :]
            k = tl.load(at, mask=is_held, other=0.0)
            v = tl.load(at + KV_HEADS * D, mask=is_held, other=0.0)
            scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
            if HAS_CAP:
                scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
            if HAS_SLOPES:
                scores += slopes[:, None] * place.to(tl.float32)[None, :]
            is_seen = (place < end)[None, :] & (rg >= 0)[:, None]
            if HAS_WINDOW:
                is_seen = is_seen & (place[None, :] > (length + ahead)[:, None] - window)
            scores = tl.where(is_seen, scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)  # a window may have passed all keys so far
            fade = tl.exp(highest - base)
            weights = tl.exp(scores - base[:, None])
            total = total * fade + tl.sum(weights, 1)
            read = read * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            highest = higher
        # --- the new keys, which the last part sees and writes
        if split == used - 1:
            scores = tl.dot(query, tl.trans(k_new), input_precision="ieee") * scale  # (queries, new)
            if HAS_CAP:
                scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
            if HAS_SLOPES:
                scores += slopes[:, None] * (length + new_ahead).to(tl.float32)[None, :]
            if IS_FORKED:
                is_seen = rn[None, :] == token[:, None]
            else:
                is_seen = rn[None, :] <= token[:, None]
                if HAS_WINDOW:
                    is_seen = is_seen & (rn[None, :] > token[:, None] - window)
            scores = tl.where(is_seen & is_new[None, :], scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, 1))  # every query sees itself
            fade = tl.exp(highest - higher)
            weights = tl.exp(scores - higher[:, None])
            total = total * fade + tl.sum(weights, 1)
            read = read * fade[:, None] + tl.dot(weights.to(v_new.dtype), v_new, input_precision="ieee")
            highest = higher
            into = (own + row * own_row + (length + rn).to(tl.int64) * POSITION)[:, None] + head * D + rd[None, :]
            tl.store(into, k_new, mask=is_key_number)
            tl.store(into + KV_HEADS * D, v_new, mask=is_key_number)
        # --- the parts together
        put_together(
            read, highest, total, OUT + row.to(tl.int64) * (NEW * HEADS * D) + head * G * D, PARTS, STATS, COUNTS,
            row * KV_HEADS + head, split, used, num_splits, G * NEW, G, HEADS * D, D, GP, DP, GJ, MOST_SPLITS,
        )  # fmt: skip


class WideAttention(SplitAttention):
    """The attention of captured passes of several tokens a row."""

    def __init__(self, rows: int, num_new: int, shape: HeadShape, device: torch.device, *, is_forked: bool) -> None:
        self._new, self._is_forked = num_new, is_forked
        splits = count_splits(SEVERAL_ROWS.programs // (rows * shape.kv_heads))
        super().__init__(rows, num_new * shape.heads // shape.kv_heads, pad_width(shape), shape, device, splits)

    def __call__(
        self,
        qkv: torch.Tensor,  # (rows * new, (heads + 2 * kv_heads) * width), as the product left it
        out: torch.Tensor,  # (rows * new, heads * width)
        base: torch.Tensor,
        table: torch.Tensor,
        lengths: torch.Tensor,  # (rows,) int32: positions held, -1 for a row that is not there
        layer: int,
        num_layers: int,
        *,
        turns: torch.Tensor | None = None,  # (rows * new, 2, pairs) float32: `turning.find_turns`
        scale: float | None = None,
        is_windowed: bool = False,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,
        branches: int = 0,
    ) -> None:
        """Turn queries and keys, write keys and values after each row's length, and read what the queries see."""
        assert not branches, "rows that share keys read one token at a time"
        block, stages = fit_memory(SEVERAL_ROWS, self._width * qkv.element_size())
        self._launch(
            _attend_wide, qkv, out, base, table, lengths,
            layer=layer, num_layers=num_layers, chunk=SEVERAL_ROWS.chunk,
            turns=turns, scale=scale, is_windowed=is_windowed, q_norm=q_norm, k_norm=k_norm, slopes=slopes,
            DP=self._width, NEW=self._new, NP=max(SMALLEST_DOT, triton.next_power_of_2(self._new)), BLOCK=block,
            IS_FORKED=self._is_forked, num_warps=SEVERAL_ROWS.warps, num_stages=stages,
        )  # fmt: skip

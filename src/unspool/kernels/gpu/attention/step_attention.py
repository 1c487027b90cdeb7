"""One new token per row: rope, the write into the cache and attention over the keys in view, in one kernel.

The reference is `kernels.rotary.rotate_`, `Cache.write` and `kernels.attention.attend`. The number of keys and their
addresses (`key_lookup`) are read on the device: a captured step serves any cache and any length.
"""

from __future__ import annotations

from typing import Any, Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.attention.clusters import (
    announce,
    await_others,
    count_room,
    find_parts,
    join_parts,
    make_room,
    push_part,
)
from unspool.kernels.gpu.attention.key_lookup import (
    find_home,
    find_keys,
    find_new,
    find_room,
    find_row,
    find_tile,
    wrap,
)
from unspool.kernels.gpu.attention.split_attention import (
    COPIES,
    HeadShape,
    Launch,
    SplitAttention,
    find_numbers,
    put_together,
    read_values,
    score_keys,
)
from unspool.kernels.gpu.attention.step_tilings import (
    USUAL,
    AttentionTiling,
    choose_tiling,
    count_splits,
    fit_memory,
    pad_width,
)
from unspool.kernels.gpu.launching import LINE_BYTES, ask_for, can_overlap, let_next_start, wait_for_input
from unspool.kernels.key_layout import KeyLayout

ASKED: Final = 256  # keys: up to this many per program are prefetched before its queries are ready
CLUSTER_KEYS: Final = 128  # up to so many for each of its programs, a cluster has all keys
LARGEST_ROOM: Final = 8704  # bytes for a cluster's parts: together with tiles below what need not be asked for


@triton.jit
def _load_biases(BIASES, head, is_head, back, is_key, DISTANCES: tl.constexpr):
    """The biases (heads, keys) of distances `back`, of a table (heads, DISTANCES); the last is for all beyond."""
    at = BIASES + head[:, None] * DISTANCES + tl.minimum(back, DISTANCES - 1)[None, :]
    return tl.load(at, mask=is_head[:, None] & is_key[None, :], other=0.0)


@triton.jit
def _load_made(at, is_there, apart, PARTS: tl.constexpr, DTYPE: tl.constexpr):
    """Numbers that a product made, as float32; of parts so far apart their sum, rounded as the product would."""
    found = tl.load(at, mask=is_there, other=0.0).to(tl.float32)
    if PARTS > 1:
        for part in tl.static_range(1, PARTS):
            found += tl.load(at + part * apart, mask=is_there, other=0.0)
        found = found.to(DTYPE).to(tl.float32)
    return found


@triton.jit(do_not_specialize=["layer", "num_layers", "window", "num_splits", "smallest_chunk"])
def _attend(
    QKV, OUT, BASE, TABLE, LENGTHS, TURNS, Q_NORM, K_NORM, SLOPES, SINKS,
    PARTS, STATS, COUNTS,
    layer, num_layers, scale, softcap, eps, window, num_splits, smallest_chunk,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr, GJ: tl.constexpr, PAIRS: tl.constexpr, HALVED: tl.constexpr,
    BLOCK: tl.constexpr, UNIT: tl.constexpr, MOST_SPLITS: tl.constexpr, ASKED: tl.constexpr, LINE_BYTES: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_SINKS: tl.constexpr, BRANCHES: tl.constexpr, PAGE: tl.constexpr, IS_RING: tl.constexpr, IS_AWAY: tl.constexpr,
    IS_EAGER: tl.constexpr, DISTANCES: tl.constexpr, CLUSTER: tl.constexpr, CLUSTER_KEYS: tl.constexpr,
    ROOM: tl.constexpr, MADE_PARTS: tl.constexpr, COPIES: tl.constexpr, ORDER: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if CLUSTER > 1:
        split, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        num_rows = tl.num_programs(2)
        announce(True)
    else:
        row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
        num_rows = tl.num_programs(0)
    DTYPE: tl.constexpr = OUT.dtype.element_ty
    POSITION: tl.constexpr = 2 * KV_HEADS * D  # numbers per position
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    length = tl.load(LENGTHS + row)  # keys held; where the new one goes
    own, apart, shared, shared_apart, num_shared, listed = find_row(
        BASE, TABLE, LENGTHS, layer, num_layers, row, POSITION, UNIT, BRANCHES, PAGE
    )
    room, apart = find_room(TABLE, apart, layer, num_layers, POSITION, IS_RING)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length + 1 - window, 0)
        if PAGE > 0:
            first = first // BLOCK * BLOCK  # tiles begin where they do without a window, so that none crosses a block
    num_keys = tl.maximum(length - first, 0)
    chunk = tl.maximum(tl.cdiv(tl.cdiv(num_keys, num_splits), BLOCK) * BLOCK, smallest_chunk)
    if CLUSTER > 1:
        few = tl.maximum(tl.cdiv(tl.cdiv(num_keys, CLUSTER), BLOCK) * BLOCK, smallest_chunk)
        chunk = tl.where(num_keys <= CLUSTER * CLUSTER_KEYS, few, chunk)
    used = tl.maximum(tl.cdiv(num_keys, chunk), 1)
    parts_at, is_joined = 0, False
    if CLUSTER > 1:
        parts_at, is_joined = find_parts(ROOM), (length >= 0) & (used > 1) & (used <= CLUSTER)
    begin = first + split * chunk
    end = tl.minimum(begin + chunk, length)
    if BRANCHES == 0:  # a few keys can be prefetched while the queries are still computed
        LINE: tl.constexpr = LINE_BYTES * 8 // DTYPE.primitive_bitwidth  # numbers
        LINES: tl.constexpr = (DP + LINE - 1) // LINE
        number, asked = tl.arange(0, LINES) * LINE, begin + tl.arange(0, ASKED)
        asked_at = find_keys(
            row, wrap(asked, room, IS_RING), asked < end, own, apart, shared, shared_apart, num_shared, listed,
            POSITION, BRANCHES, PAGE,
        )  # fmt: skip
        lines = asked_at[:, None] + head * D + number[None, :]
        is_asked = ((asked < end) & (chunk <= ASKED))[:, None] & (number < D)[None, :]
        ask_for(lines, is_asked, PDL)
        ask_for(lines + KV_HEADS * D, is_asked, PDL)
    rg, rq, rd = tl.arange(0, GP), tl.arange(0, GJ), tl.arange(0, DP)
    is_head, is_number = rg < G, rd < D
    given, pair = find_numbers(rd, PAIRS, HALVED), find_numbers(rd ^ 1, PAIRS, HALVED)
    # What the kernel before does not write is loaded while it still runs: weights of norms, and the first keys.
    # As tensors of all queries, so that threads have what they need without exchanging it.
    is_query = (rq < G)[:, None] & is_number[None, :]
    is_turned = rd < 2 * PAIRS
    q_weight, k_weight, q_swapped, k_swapped = rd, rd, rd, rd
    if HAS_NORM:
        q_weight = tl.load(Q_NORM + given[None, :] + rq[:, None] * 0, mask=is_query, other=0.0)
        k_weight = tl.load(K_NORM + given, mask=is_number, other=0.0)
        if PAIRS > 0:
            is_both = is_query & is_turned[None, :]
            q_swapped = tl.load(Q_NORM + pair[None, :] + rq[:, None] * 0, mask=is_both, other=0.0)
            k_swapped = tl.load(K_NORM + pair, mask=rd < 2 * PAIRS, other=0.0)
    k_first, v_first = rd, rd
    if IS_EAGER:
        place = begin + tl.arange(0, BLOCK)
        is_held = (place < end)[:, None] & is_number[None, :]
        keys_at = find_keys(
            row, wrap(place, room, IS_RING), place < end, own, apart, shared, shared_apart, num_shared, listed,
            POSITION, BRANCHES, PAGE,
        )  # fmt: skip
        at = keys_at[:, None] + head * D + rd[None, :]
        k_first = tl.load(at, mask=is_held, other=0.0)
        v_first = tl.load(at + KV_HEADS * D, mask=is_held, other=0.0)
    let_next_start(PDL)
    wait_for_input(PDL)
    if (length >= 0) & (split < used):
        # --- the queries, rotated to their position
        heads_at = QKV + row.to(tl.int64) * WIDTH + (head * G + rq)[:, None] * D
        key_at = QKV + row.to(tl.int64) * WIDTH + (HEADS + head) * D
        part_size = num_rows.to(tl.int64) * WIDTH
        q = _load_made(heads_at + given[None, :], is_query, part_size, MADE_PARTS, DTYPE)
        k_new = _load_made(key_at + given, is_number, part_size, MADE_PARTS, DTYPE)
        v_new = _load_made(key_at + KV_HEADS * D + rd, is_number, part_size, MADE_PARTS, DTYPE).to(DTYPE)
        q_pair, k_pair, cos, sin, q_cos, q_sin = q, k_new, k_new, k_new, q, q
        if PAIRS > 0:  # all loads before the first use of one: a norm's barriers would part them
            is_both = is_query & is_turned[None, :]
            q_pair = _load_made(heads_at + pair[None, :], is_both, part_size, MADE_PARTS, DTYPE)
            k_pair = _load_made(key_at + pair, is_turned, part_size, MADE_PARTS, DTYPE)
            turns = TURNS + row * 2 * PAIRS + rd // 2
            cos = tl.load(turns, mask=is_turned, other=1.0)
            sin = tl.load(turns + PAIRS, mask=is_turned, other=0.0)
            turns = turns[None, :] + rq[:, None] * 0
            q_cos = tl.load(turns, mask=is_query & is_turned[None, :], other=1.0)
            q_sin = tl.load(turns + PAIRS, mask=is_query & is_turned[None, :], other=0.0)
        q_root, k_root = tl.full((GJ,), 1.0, tl.float32), 1.0
        if HAS_NORM:
            q_root = tl.rsqrt(tl.sum(q * q, 1) / D + eps)
            k_root = tl.rsqrt(tl.sum(k_new * k_new, 0) / D + eps)
            q = q * q_root[:, None] * q_weight.to(tl.float32)
            k_new = k_new * k_root * k_weight.to(tl.float32)
        if PAIRS > 0:
            if HAS_NORM:
                q_pair = q_pair * q_root[:, None] * q_swapped.to(tl.float32)
                k_pair = k_pair * k_root * k_swapped.to(tl.float32)
            sin = tl.where(rd % 2 == 0, -sin, sin)
            q = q * q_cos + q_pair * tl.where((rd % 2 == 0)[None, :], -q_sin, q_sin)
            k_new = k_new * cos + k_pair * sin
        slopes = tl.full((GP,), 0.0, tl.float32)
        if HAS_SLOPES:
            slopes = tl.load(SLOPES + head * G + rg, mask=is_head, other=0.0)
        q = q.to(DTYPE)
        # The tensor cores' tile has more queries: the same ones again.
        query = tl.reshape(tl.broadcast_to(q[None, :, :], (GP // GJ, GJ, DP)), (GP, DP))
        k_new = k_new.to(DTYPE)
        # --- the keys held
        highest = tl.full((GP,), float("-inf"), tl.float32)
        total = tl.full((GP,), 0.0, tl.float32)
        read = tl.full((GP, DP), 0.0, tl.float32)
        if IS_EAGER:
            place = begin + tl.arange(0, BLOCK)
            is_key = place < end
            if HAS_WINDOW and PAGE > 0:
                is_key = is_key & (place > length - window)
            scores = score_keys(query, k_first, place, slopes, scale, softcap, HAS_CAP, HAS_SLOPES)
            if DISTANCES > 0:
                scores += _load_biases(SLOPES, head * G + rg, is_head, length - place, is_key, DISTANCES)
            scores = tl.where(is_key[None, :], scores, float("-inf"))
            highest, total, read = read_values(scores, v_first, highest, total, read, True)
            begin += BLOCK
        for start in tl.range(begin, end, BLOCK):
            place = start + tl.arange(0, BLOCK)
            is_key = place < end
            keys_at = find_tile(
                row, start, wrap(place, room, IS_RING), is_key, own, apart, shared, shared_apart, num_shared, listed,
                POSITION, BRANCHES, PAGE,
            )  # fmt: skip
            at = keys_at[:, None] + head * D + rd[None, :]
            is_held = is_key[:, None] & is_number[None, :]
            k = tl.load(at, mask=is_held, other=0.0)
            v = tl.load(at + KV_HEADS * D, mask=is_held, other=0.0)
            if HAS_WINDOW and PAGE > 0:
                is_key = is_key & (place > length - window)
            scores = score_keys(query, k, place, slopes, scale, softcap, HAS_CAP, HAS_SLOPES)
            if DISTANCES > 0:
                scores += _load_biases(SLOPES, head * G + rg, is_head, length - place, is_key, DISTANCES)
            scores = tl.where(is_key[None, :], scores, float("-inf"))
            highest, total, read = read_values(scores, v, highest, total, read, IS_EAGER or (HAS_WINDOW and PAGE > 0))
        # --- the new key, which the last part sees
        if split == used - 1:
            score = tl.sum(q.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scale
            score = tl.reshape(tl.broadcast_to(score[None, :], (GP // GJ, GJ)), (GP,))
            if HAS_CAP:
                score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
            if HAS_SLOPES:
                score += slopes * length.to(tl.float32)
            if DISTANCES > 0:
                score += tl.load(SLOPES + (head * G + rg) * DISTANCES, mask=is_head, other=0.0)
            higher = tl.maximum(highest, score)
            fade = tl.exp(highest - higher)
            weight = tl.exp(score - higher)
            total = total * fade + weight
            read = read * fade[:, None] + weight[:, None] * v_new.to(tl.float32)[None, :]
            highest = higher
        # --- combining the parts
        if is_joined:
            if CLUSTER > 1:
                await_others()  # until all have begun
                push_part(read, highest, total, parts_at, split, G, GP, DP, GJ, CLUSTER)
                announce(False)
        else:
            put_together(
                read, highest, total, OUT + row.to(tl.int64) * (HEADS * D) + head * G * D, PARTS, STATS, COUNTS,
                row * KV_HEADS + head, split, used, num_splits, G, G, HEADS * D, D, GP, DP, GJ, MOST_SPLITS,
                SINKS + head * G, HAS_SINKS, head * G * D, ORDER, COPIES,
            )  # fmt: skip
        # --- and writes: only now, because who announces its part waits for what it has written elsewhere
        if split == used - 1:
            home = find_home(BASE, TABLE, own, layer, num_layers, UNIT, IS_AWAY)
            into, _ = find_new(
                row, wrap(length, room, IS_RING), length >= 0, home, apart, num_shared, listed, POSITION, PAGE
            )
            into += head * D + rd
            tl.store(into, k_new, mask=is_number)
            tl.store(into + KV_HEADS * D, v_new, mask=is_number)
    if CLUSTER > 1:
        tl.static_assert(ORDER == 0)
        if is_joined & (split < CLUSTER):
            if split >= used:
                await_others()
                announce(False)
            await_others()
            join_parts(
                OUT + row.to(tl.int64) * (HEADS * D) + head * G * D, parts_at, split, used,
                G, G, HEADS * D, D, DP, GJ, CLUSTER, SINKS + head * G, HAS_SINKS,
            )  # fmt: skip


class StepAttention(SplitAttention):
    """The attention of captured steps: one new token per row."""

    takes_parts = True
    arranges = True

    def __init__(
        self,
        rows: int,
        shape: HeadShape,
        device: torch.device,
        tiling: AttentionTiling | None = None,
        *,
        distances: int = 0,
    ) -> None:
        """With `distances`, `slopes` is a table (heads, distances) of biases; the last one is for all greater ones."""
        self._distances = distances
        self._tiling = tiling or choose_tiling(rows, shape)
        splits = count_splits(self._tiling.programs // (rows * shape.kv_heads))
        super().__init__(rows, shape.heads // shape.kv_heads, pad_width(shape), shape, device, splits)

    def _prepare(self, qkv: torch.Tensor, base: torch.Tensor, layout: KeyLayout) -> Launch:
        block, stages = fit_memory(self._tiling, self._width * base.element_size(), layout)
        cluster = self._count_cluster(base, layout)
        constants: dict[str, Any] = {
            "DP": self._width,
            "BLOCK": block,
            "ASKED": ASKED,
            "LINE_BYTES": LINE_BYTES,
            "BRANCHES": layout.branches,
            "PAGE": layout.block_size,
            "IS_RING": layout.is_ring,
            "IS_AWAY": layout.is_away,
            "IS_EAGER": self._tiling.is_eager and not layout.branches and not layout.is_away,
            "DISTANCES": self._distances,
            "CLUSTER": cluster,
            "CLUSTER_KEYS": CLUSTER_KEYS,
            "ROOM": make_room(cluster, self._joined, self._width),
            "MADE_PARTS": qkv.shape[0] if qkv.dim() == 3 else 1,
            "COPIES": COPIES if cluster > 1 and self._width > USUAL else 1,  # where steps were timed with them
            "num_warps": self._tiling.warps,
            "num_stages": stages,
        }
        if self._distances:
            constants["HAS_SLOPES"] = False
        if self._tiling.registers is not None:
            constants["maxnreg"] = self._tiling.registers
        takes_any_window = layout.block_size == 0  # it is where the keys begin
        return Launch(_attend, self._tiling.chunk, constants, cluster=cluster, takes_any_window=takes_any_window)

    def _count_cluster(self, base: torch.Tensor, layout: KeyLayout) -> int:
        """How many programs combine their parts in shared memory: as many as were measured and fit, or 1."""
        if not can_overlap() or layout.is_away or self._distances or base.element_size() > 2:
            return 1
        cluster = min(self._tiling.cluster, self.splits)
        return cluster if count_room(cluster, self._joined, self._width) <= LARGEST_ROOM else 1

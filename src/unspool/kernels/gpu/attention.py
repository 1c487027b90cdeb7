"""One new token a row: rope, the write into the cache and attention over the keys in view, in one kernel.

The reference is `kernels.rotary.rotate_`, `Cache.write` and `kernels.attention.attend`. The keys of a row are split
among programs (flash-decoding: Dao et al., 2023), each of which serves all query heads that share a key head; the
program that ends last puts the parts together. How many keys there are is read on the device, and so are the
addresses of the buffers: a captured step serves any cache and any length.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import (
    LINE_BYTES,
    ask_for,
    launch,
    launch_options,
    let_next_start,
    wait_for_input,
)

UNIT: Final = 8  # numbers: addresses are told as multiples of so many, so that loads are known to be aligned
SMALLEST_DOT: Final = 16
MOST_SPLITS: Final = 32
ASKED: Final = 256  # keys: so few of a program are asked for before its queries are there
NARROW: Final = 64  # numbers a head
LARGEST_BLOCK_BYTES: Final = 32_768  # of keys; there are as many of values
USUAL_SHARED_BYTES: Final = 98_304  # where the GPU does not say how much a program may have


@dataclass(frozen=True, slots=True)
class AttentionTiling:
    """How keys are cut: those looked at at once, the fewest a program is started for, and for how many programs."""

    block: int
    chunk: int
    programs: int
    warps: int
    stages: int


# Measured inside whole passes (`benchmarks/gpu_attention.py`): a program that takes much shared memory keeps the next
# kernel's out, which a measurement of attention alone doesn't show.
ONE_ROW: Final = AttentionTiling(64, 64, 256, 4, 2)
SEVERAL_ROWS: Final = AttentionTiling(64, 128, 256, 4, 2)
SEVERAL_ROWS_OF_NARROW_HEADS: Final = AttentionTiling(64, 64, 256, 4, 3)


@dataclass(frozen=True, slots=True)
class HeadShape:
    """What the attention of a block looks like."""

    heads: int
    kv_heads: int
    width: int
    scale: float = 1.0
    softcap: float | None = None
    window: int | None = None
    eps: float = 0.0


@triton.jit
def put_together(
    read, highest, total, OUT, PARTS, STATS, COUNTS, slot, split, used, num_splits,
    QUERIES: tl.constexpr, G: tl.constexpr, TOKEN: tl.constexpr, D: tl.constexpr,
    GP: tl.constexpr, DP: tl.constexpr, GJ: tl.constexpr, MOST_SPLITS: tl.constexpr,
):  # fmt: skip
    """Write what a key head's queries read; where its keys are split, the program that ends last adds the parts up.

    Query `q` of `QUERIES` belongs to head `q % G` of token `q // G`; tokens lie `TOKEN` numbers apart at `OUT`. A tile
    for the tensor cores has room for more queries (GP) than there are: parts are added up over GJ, as few as can be.
    """
    rg, rd = tl.arange(0, GP), tl.arange(0, DP)
    is_head = rg < QUERIES
    is_number = is_head[:, None] & (rd < D)[None, :]
    if used == 1:
        target = OUT + (rg // G * TOKEN + rg % G * D)[:, None] + rd[None, :]
        tl.store(target, (read / total[:, None]).to(OUT.dtype.element_ty), mask=is_number)
    else:
        part = (slot * num_splits + split) * GP
        tl.store(PARTS + (part + rg)[:, None] * DP + rd[None, :], read, mask=is_number)
        tl.store(STATS + 2 * (part + rg), highest, mask=is_head)
        tl.store(STATS + 2 * (part + rg) + 1, total, mask=is_head)
        tl.debug_barrier()  # every thread's part is written before the count says so
        num_before = tl.atomic_add(COUNTS + slot, 1, sem="acq_rel")
        if num_before == used - 1:
            tl.debug_barrier()
            # How much each part counts is known at once; what they read is then added up, several loads at a time.
            rq = tl.arange(0, GJ)
            is_one = rq < QUERIES
            is_its = is_one[:, None] & (rd < D)[None, :]
            parts = tl.arange(0, MOST_SPLITS)
            place = (slot * num_splits + parts)[:, None] * GP + rq[None, :]
            is_part = (parts < used)[:, None] & is_one[None, :]
            tops = tl.load(STATS + 2 * place, mask=is_part, other=float("-inf"), cache_modifier=".cg")
            sums = tl.load(STATS + 2 * place + 1, mask=is_part, other=0.0, cache_modifier=".cg")
            peak = tl.where(is_one, tl.max(tops, 0), 0.0)
            whole = tl.sum(sums * tl.exp(tops - peak[None, :]), 0)
            joined = tl.full((GJ, DP), 0.0, tl.float32)
            for number in tl.range(0, used, loop_unroll_factor=8 if GJ * DP <= 1024 else 4):
                one = (slot * num_splits + number) * GP + rq
                weight = tl.exp(tl.load(STATS + 2 * one, mask=is_one, other=0.0, cache_modifier=".cg") - peak)
                its = tl.load(PARTS + one[:, None] * DP + rd[None, :], mask=is_its, other=0.0, cache_modifier=".cg")
                joined += its * weight[:, None]
            whole = tl.where(is_one, whole, 1.0)
            target = OUT + (rq // G * TOKEN + rq % G * D)[:, None] + rd[None, :]
            tl.store(target, (joined / whole[:, None]).to(OUT.dtype.element_ty), mask=is_its)
            tl.store(COUNTS + slot, 0)


@triton.jit(do_not_specialize=["layer", "num_layers", "window", "num_splits", "smallest_chunk"])
def _attend(
    QKV, OUT, BASE, TABLE, LENGTHS, TURNS, Q_NORM, K_NORM, SLOPES,
    PARTS, STATS, COUNTS,
    layer, num_layers, scale, softcap, eps, window, num_splits, smallest_chunk,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    G: tl.constexpr, GP: tl.constexpr, GJ: tl.constexpr, PAIRS: tl.constexpr,
    BLOCK: tl.constexpr, UNIT: tl.constexpr, MOST_SPLITS: tl.constexpr, ASKED: tl.constexpr, LINE_BYTES: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SLOPES: tl.constexpr,
    BRANCHES: tl.constexpr, IS_AWAY: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    POSITION: tl.constexpr = 2 * KV_HEADS * D  # numbers a position takes
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    length = tl.load(LENGTHS + row)  # keys held; where the new one goes
    # The table: the layers' buffers and the positions a row has room for; for branches the same again of the prompts,
    # then where the ancestry lies, its width, and each row's number of shared keys. Where layers are away, the first
    # buffers are those that they were brought into, and behind the room is where they live.
    own = BASE + tl.load(TABLE + layer) * UNIT
    own_row = tl.load(TABLE + num_layers) * POSITION
    shared, shared_row, num_shared, ancestry = own, own_row, 0, LENGTHS
    if BRANCHES > 0:
        shared = BASE + tl.load(TABLE + num_layers + 1 + layer) * UNIT
        shared_row = tl.load(TABLE + 2 * num_layers + 1) * POSITION
        ancestry = LENGTHS + tl.load(TABLE + 2 * num_layers + 2) + row * tl.load(TABLE + 2 * num_layers + 3)
        num_shared = tl.load(TABLE + 2 * num_layers + 4 + row).to(tl.int32)
    first = 0
    if HAS_WINDOW:
        first = tl.maximum(length + 1 - window, 0)
    num_keys = tl.maximum(length - first, 0)
    chunk = tl.maximum(tl.cdiv(tl.cdiv(num_keys, num_splits), BLOCK) * BLOCK, smallest_chunk)
    used = tl.maximum(tl.cdiv(num_keys, chunk), 1)
    begin = first + split * chunk
    end = tl.minimum(begin + chunk, length)
    if BRANCHES == 0:  # a few keys can be on their way while the queries are still made
        LINE: tl.constexpr = LINE_BYTES * 8 // QKV.dtype.element_ty.primitive_bitwidth  # numbers
        LINES: tl.constexpr = (DP + LINE - 1) // LINE
        number, asked = tl.arange(0, LINES) * LINE, begin + tl.arange(0, ASKED)
        lines = own + row * own_row + head * D + asked.to(tl.int64)[:, None] * POSITION + number[None, :]
        is_asked = ((asked < end) & (chunk <= ASKED))[:, None] & (number < D)[None, :]
        ask_for(lines, is_asked, PDL)
        ask_for(lines + KV_HEADS * D, is_asked, PDL)
    let_next_start(PDL)
    wait_for_input(PDL)
    if (length >= 0) & (split < used):
        rg, rd = tl.arange(0, GP), tl.arange(0, DP)
        is_head, is_number = rg < G, rd < D
        # --- the queries, turned to their position
        heads_at = QKV + row.to(tl.int64) * WIDTH + (head * G + rg)[:, None] * D
        is_query = is_head[:, None] & is_number[None, :]
        q = tl.load(heads_at + rd[None, :], mask=is_query, other=0.0).to(tl.float32)
        key_at = QKV + row.to(tl.int64) * WIDTH + (HEADS + head) * D
        k_new = tl.load(key_at + rd, mask=is_number, other=0.0).to(tl.float32)
        v_new = tl.load(key_at + KV_HEADS * D + rd, mask=is_number, other=0.0)
        q_root, k_root = tl.full((GP,), 1.0, tl.float32), 1.0
        if HAS_NORM:
            q_root = tl.rsqrt(tl.sum(q * q, 1) / D + eps)
            k_root = tl.rsqrt(tl.sum(k_new * k_new, 0) / D + eps)
            q = q * q_root[:, None] * tl.load(Q_NORM + rd, mask=is_number, other=0.0).to(tl.float32)[None, :]
            k_new = k_new * k_root * tl.load(K_NORM + rd, mask=is_number, other=0.0).to(tl.float32)
        if PAIRS > 0:
            is_turned = rd < 2 * PAIRS
            pair = rd ^ 1
            q_pair = tl.load(heads_at + pair[None, :], mask=is_query & is_turned[None, :], other=0.0).to(tl.float32)
            k_pair = tl.load(key_at + pair, mask=is_turned, other=0.0).to(tl.float32)
            if HAS_NORM:
                q_weight = tl.load(Q_NORM + pair, mask=is_turned, other=0.0).to(tl.float32)
                q_pair = q_pair * q_root[:, None] * q_weight[None, :]
                k_pair = k_pair * k_root * tl.load(K_NORM + pair, mask=is_turned, other=0.0).to(tl.float32)
            turns = TURNS + row * 2 * PAIRS + rd // 2
            cos = tl.load(turns, mask=is_turned, other=1.0)
            sin = tl.load(turns + PAIRS, mask=is_turned, other=0.0)
            sin = tl.where(rd % 2 == 0, -sin, sin)
            q = q * cos[None, :] + q_pair * sin[None, :]
            k_new = k_new * cos + k_pair * sin
        slopes = tl.full((GP,), 0.0, tl.float32)
        if HAS_SLOPES:
            slopes = tl.load(SLOPES + head * G + rg, mask=is_head, other=0.0)
        query = q.to(QKV.dtype.element_ty)
        k_new = k_new.to(QKV.dtype.element_ty)
        # --- the keys held
        highest = tl.full((GP,), float("-inf"), tl.float32)
        total = tl.full((GP,), 0.0, tl.float32)
        read = tl.full((GP, DP), 0.0, tl.float32)
        for start in tl.range(begin, end, BLOCK):
            place = start + tl.arange(0, BLOCK)
            is_key = place < end
            if BRANCHES > 0:
                is_shared = place < num_shared
                mine = tl.maximum(place - num_shared, 0)
                whose = tl.load(ancestry + mine, mask=is_key & (place >= num_shared), other=0)
                keys_at = tl.where(
                    is_shared,
                    shared + (row // BRANCHES) * shared_row + place * POSITION,
                    own + whose * own_row + mine * POSITION,
                )
            else:
                keys_at = own + row * own_row + place.to(tl.int64) * POSITION
            at = keys_at[:, None] + head * D + rd[None, :]
            is_held = is_key[:, None] & is_number[None, :]
            k = tl.load(at, mask=is_held, other=0.0)
            v = tl.load(at + KV_HEADS * D, mask=is_held, other=0.0)
            scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale
            if HAS_CAP:
                scores = softcap * (2.0 * tl.sigmoid(2.0 * scores / softcap) - 1.0)
            if HAS_SLOPES:
                scores += slopes[:, None] * place.to(tl.float32)[None, :]
            scores = tl.where(is_key[None, :], scores, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, 1))
            fade = tl.exp(highest - higher)
            weights = tl.exp(scores - higher[:, None])
            total = total * fade + tl.sum(weights, 1)
            read = read * fade[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
            highest = higher
        # --- the new key, which the last part sees and writes
        if split == used - 1:
            score = tl.sum(query.to(tl.float32) * k_new.to(tl.float32)[None, :], 1) * scale
            if HAS_CAP:
                score = softcap * (2.0 * tl.sigmoid(2.0 * score / softcap) - 1.0)
            if HAS_SLOPES:
                score += slopes * length.to(tl.float32)
            higher = tl.maximum(highest, score)
            fade = tl.exp(highest - higher)
            weight = tl.exp(score - higher)
            total = total * fade + weight
            read = read * fade[:, None] + weight[:, None] * v_new.to(tl.float32)[None, :]
            highest = higher
            home = own
            if IS_AWAY:
                home = BASE + tl.load(TABLE + num_layers + 1 + layer) * UNIT
            into = home + row * own_row + (length - num_shared).to(tl.int64) * POSITION + head * D + rd
            tl.store(into, k_new, mask=is_number)
            tl.store(into + KV_HEADS * D, v_new, mask=is_number)
        # --- the parts together
        put_together(
            read, highest, total, OUT + row.to(tl.int64) * (HEADS * D) + head * G * D, PARTS, STATS, COUNTS,
            row * KV_HEADS + head, split, used, num_splits, G, G, HEADS * D, D, GP, DP, GJ, MOST_SPLITS,
        )  # fmt: skip


class SplitAttention:
    """What every attention of captured passes has: room for the parts of split keys, and the launch of its kernel."""

    def __init__(
        self, rows: int, num_queries: int, width: int, shape: HeadShape, device: torch.device, splits: int
    ) -> None:
        self._rows, self._shape, self._width = rows, shape, width
        self._queries = max(SMALLEST_DOT, triton.next_power_of_2(num_queries))  # of one key head
        self._joined = triton.next_power_of_2(num_queries)
        self.splits = splits
        num_parts = rows * shape.kv_heads * self.splits * self._queries
        self._parts = torch.empty(num_parts, width, dtype=torch.float32, device=device)
        self._stats = torch.empty(num_parts, 2, dtype=torch.float32, device=device)
        self._counts = torch.zeros(rows * shape.kv_heads, dtype=torch.int32, device=device)

    def _launch(
        self,
        kernel: Any,
        *args: Any,  # what the kernel is given before `turns`
        layer: int,
        num_layers: int,
        chunk: int,
        turns: torch.Tensor | None,
        scale: float | None,
        is_windowed: bool,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        slopes: torch.Tensor | None,
        is_away: bool = False,
        **more: Any,  # what the kernel is compiled for, beside what all are
    ) -> None:
        shape, unused = self._shape, self._stats
        launch(
            kernel,
            (self._rows, shape.kv_heads, self.splits),
            *args,
            turns if turns is not None else unused,
            q_norm if q_norm is not None else args[0],
            k_norm if k_norm is not None else args[0],
            slopes if slopes is not None else unused,
            self._parts,
            self._stats,
            self._counts,
            layer,
            num_layers,
            shape.scale if scale is None else scale,
            shape.softcap or 1.0,
            shape.eps,
            shape.window or 0,
            self.splits,
            chunk,
            HEADS=shape.heads,
            KV_HEADS=shape.kv_heads,
            D=shape.width,
            G=shape.heads // shape.kv_heads,
            GP=self._queries,
            GJ=self._joined,
            PAIRS=turns.shape[2] if turns is not None else 0,
            UNIT=UNIT,
            MOST_SPLITS=triton.next_power_of_2(max(2, self.splits)),
            HAS_NORM=q_norm is not None,
            HAS_CAP=shape.softcap is not None,
            HAS_WINDOW=is_windowed,
            HAS_SLOPES=slopes is not None,
            **more,
            # What waits for a copy as well as for the product before it can't start early.
            **({"PDL": False} if is_away else launch_options()),
        )


class StepAttention(SplitAttention):
    """The attention of captured steps: one new token a row."""

    def __init__(
        self, rows: int, shape: HeadShape, device: torch.device, tiling: AttentionTiling | None = None
    ) -> None:
        self._tiling = tiling or _choose_tiling(rows, shape)
        splits = count_splits(self._tiling.programs // (rows * shape.kv_heads))
        super().__init__(rows, shape.heads // shape.kv_heads, pad_width(shape), shape, device, splits)

    def __call__(
        self,
        qkv: torch.Tensor,  # (rows, (heads + 2 * kv_heads) * width), as the product left it
        out: torch.Tensor,  # (rows, heads * width)
        base: torch.Tensor,  # of the buffers' dtype: where addresses are counted from
        table: torch.Tensor,  # int64: see `_attend`
        lengths: torch.Tensor,  # (rows,) int32; -1 for a row that is not there
        layer: int,
        num_layers: int,
        *,
        turns: torch.Tensor | None = None,  # (rows, 2, pairs) float32: `turning.find_turns`
        scale: float | None = None,
        is_windowed: bool = False,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        slopes: torch.Tensor | None = None,  # (heads,) float32: ALiBi
        branches: int = 0,  # rows a prompt that share its keys
        is_away: bool = False,  # the layer's keys were brought here, and the new one is written where they live
    ) -> None:
        """Turn queries and keys, write keys and values at each row's length, and read what the queries see."""
        block, stages = fit_memory(self._tiling, self._width * qkv.element_size())
        self._launch(
            _attend, qkv, out, base, table, lengths,
            layer=layer, num_layers=num_layers, chunk=self._tiling.chunk,
            turns=turns, scale=scale, is_windowed=is_windowed, q_norm=q_norm, k_norm=k_norm, slopes=slopes,
            is_away=is_away, DP=self._width, BLOCK=block, ASKED=ASKED, LINE_BYTES=LINE_BYTES, BRANCHES=branches,
            IS_AWAY=is_away,
            num_warps=self._tiling.warps, num_stages=stages,
        )  # fmt: skip


def count_splits(wanted: int) -> int:
    """Among how many programs a row's keys are split: a power of two."""
    return min(MOST_SPLITS, 1 << (max(1, wanted).bit_length() - 1))


def pad_width(shape: HeadShape) -> int:
    """A head's numbers as a kernel's tile has them: a power of two."""
    return int(max(SMALLEST_DOT, triton.next_power_of_2(shape.width)))


def _choose_tiling(rows: int, shape: HeadShape) -> AttentionTiling:
    """What was found best on an H200."""
    if rows == 1:
        return ONE_ROW
    return SEVERAL_ROWS if shape.width > NARROW else SEVERAL_ROWS_OF_NARROW_HEADS


def fit_memory(tiling: AttentionTiling, head_bytes: int) -> tuple[int, int]:
    """The keys looked at at once and how many such blocks are on their way: what the shared memory has room for."""
    block = max(16, min(tiling.block, LARGEST_BLOCK_BYTES // head_bytes))
    return block, max(1, min(tiling.stages, _find_shared_bytes() // (2 * block * head_bytes)))


@cache
def _find_shared_bytes() -> int:
    """Shared memory that keys and values on their way may take, with some left for the rest."""
    if not torch.cuda.is_available():
        return USUAL_SHARED_BYTES
    properties = torch.cuda.get_device_properties()
    return int(getattr(properties, "shared_memory_per_block_optin", USUAL_SHARED_BYTES) * 7 // 8)

"""One new token per row over keys in few bits: `step_attention.py` for a cache whose old positions are packed.

The reference is `kernels.packed.attend_plainly`. Programs share a row's packed blocks and unpack them tile by tile in
registers; the last one reads the unpacked positions, and writes the new key after them. Packed counts, row lengths and
addresses are read on the device, so one captured step serves any cache of one scheme.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.attention.packed_halves import read_in_halves
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
from unspool.kernels.gpu.launching import let_next_start, wait_for_input
from unspool.kernels.key_layout import KeyLayout
from unspool.kernels.packing import Scheme

ALIGNED: Final = 16  # bytes: addresses of packed blocks are multiples of this
SMALLEST_CHUNK: Final = 128  # the fewest positions per program
TILES: Final = (64, 32, 16)  # positions unpacked at once: the largest that divides a block
MOST_RECENT: Final = 32  # positions that are not packed, read at once
MOST_SPLITS: Final = 64
_HALVED_BITS: Final = 4
NUM_TENSORS: Final = 6  # per layer: codes, scales and zero points of keys, then of values


@dataclass(frozen=True, slots=True)
class PackedTiling:
    """The number of programs that packed positions are split among; a program's warps, and its tiles in flight."""

    programs: int
    warps: int
    stages: int
    registers: int | None = None  # the most per thread


USUAL: Final = PackedTiling(256, 4, 3)  # about two programs for each processor of an H200


@triton.jit
def _unpack(
    CODES, SCALES, ZEROS, start, NBITS: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    BY_CHANNEL: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """The numbers of `TILE` positions of one block: (TILE, D) float32."""
    BYTES: tl.constexpr = D * NBITS // 8
    GROUPS: tl.constexpr = D // GROUP
    place, channel = start + tl.arange(0, TILE), tl.arange(0, D)
    # A byte is loaded once for every channel that it holds; only the first load goes to memory.
    raw = tl.load(CODES + place[:, None] * BYTES + (channel % BYTES)[None, :]).to(tl.int32)
    codes = ((raw >> (channel // BYTES * NBITS)[None, :]) & ((1 << NBITS) - 1)).to(tl.float32)
    if BY_CHANNEL:
        at = start // BLOCK * D + channel
        return codes * tl.load(SCALES + at).to(tl.float32)[None, :] + tl.load(ZEROS + at).to(tl.float32)[None, :]
    at = place[:, None] * GROUPS + tl.arange(0, GROUPS)[None, :]
    scale, zero = tl.load(SCALES + at).to(tl.float32), tl.load(ZEROS + at).to(tl.float32)
    grouped = tl.reshape(codes, (TILE, GROUPS, GROUP)) * scale[:, :, None] + zero[:, :, None]
    return tl.reshape(grouped, (TILE, D))


@triton.jit
def _read_tile(
    query, k, v, place, is_key, slopes, scale, softcap, highest, total, read,
    HAS_CAP: tl.constexpr, HAS_SLOPES: tl.constexpr,
):  # fmt: skip
    """Continue an online softmax over a tile of keys; at least one of them is visible."""
    scores = score_keys(query, k, place, slopes, scale, softcap, HAS_CAP, HAS_SLOPES)
    scores = tl.where(is_key[None, :], scores, float("-inf"))
    higher, total, read = read_values(scores, v, highest, total, read, False)
    return higher, total, read


@triton.jit
def _take_turned(AT, NORM, cos, sin, is_number, eps, PAIRS: tl.constexpr, HALVED: tl.constexpr, D: tl.constexpr,
                 HAS_NORM: tl.constexpr):  # fmt: skip
    """Heads (ROWS, D) at `AT` (ROWS, 1), normalised and rotated to their position: float32."""
    number = find_numbers(tl.arange(0, D), PAIRS, HALVED)
    x = tl.load(AT + number[None, :], mask=is_number, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(x * x, 1) / D + eps)[:, None]
    if HAS_NORM:
        x = x * root * tl.load(NORM + number).to(tl.float32)[None, :]
    if PAIRS > 0:
        pair = find_numbers(tl.arange(0, D) ^ 1, PAIRS, HALVED)
        other = tl.load(AT + pair[None, :], mask=is_number, other=0.0).to(tl.float32)
        if HAS_NORM:
            other = other * root * tl.load(NORM + pair).to(tl.float32)[None, :]
        x = x * cos[None, :] + other * sin[None, :]
    return x


@triton.jit(do_not_specialize=["layer", "num_layers", "window", "num_splits", "smallest_chunk"])
def _attend(
    QKV, OUT, BASE, BYTES, SCALES, TABLE, LENGTHS, TURNS, Q_NORM, K_NORM, SLOPES, SINKS,
    PARTS, STATS, COUNTS,
    layer, num_layers, scale, softcap, eps, window, num_splits, smallest_chunk,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, D: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, GJ: tl.constexpr,
    PAIRS: tl.constexpr, HALVED: tl.constexpr, TILE: tl.constexpr, RECENT: tl.constexpr,
    UNIT: tl.constexpr, ALIGNED: tl.constexpr, MOST_SPLITS: tl.constexpr,
    NBITS: tl.constexpr, BLOCK: tl.constexpr, SCALE_BYTES: tl.constexpr,
    KEY_GROUP: tl.constexpr, KEYS_BY_CHANNEL: tl.constexpr,
    VALUE_GROUP: tl.constexpr, VALUES_BY_CHANNEL: tl.constexpr,
    IN_HALVES: tl.constexpr, STAGES: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_CAP: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SLOPES: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    HAS_ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    POSITION: tl.constexpr = 2 * KV_HEADS * D  # numbers per unpacked position
    WIDTH: tl.constexpr = (HEADS + 2 * KV_HEADS) * D
    length = tl.load(LENGTHS + row)  # keys held; where the new one goes
    # The table: the layers' recent positions and a row's capacity for them; a row's capacity for packed positions;
    # the layers' packed tensors, six times; each row's number of packed positions.
    recent = BASE + tl.load(TABLE + layer) * UNIT
    recent += row * tl.load(TABLE + num_layers) * POSITION + head * D
    num_places = tl.load(TABLE + num_layers + 1)
    tensors = TABLE + num_layers + 2 + layer
    pair = row * KV_HEADS + head
    SCALE_UNIT: tl.constexpr = ALIGNED // SCALE_BYTES
    codes_at = pair * num_places * (D * NBITS // 8)
    keys_at = pair * (num_places // BLOCK * D if KEYS_BY_CHANNEL else num_places * (D // KEY_GROUP))
    values_at = pair * (num_places // BLOCK * D if VALUES_BY_CHANNEL else num_places * (D // VALUE_GROUP))
    key_codes = BYTES + tl.load(tensors) * ALIGNED + codes_at
    key_scales = SCALES + tl.load(tensors + num_layers) * SCALE_UNIT + keys_at
    key_zeros = SCALES + tl.load(tensors + 2 * num_layers) * SCALE_UNIT + keys_at
    value_codes = BYTES + tl.load(tensors + 3 * num_layers) * ALIGNED + codes_at
    value_scales = SCALES + tl.load(tensors + 4 * num_layers) * SCALE_UNIT + values_at
    value_zeros = SCALES + tl.load(tensors + 5 * num_layers) * SCALE_UNIT + values_at
    num_packed = tl.load(TABLE + 7 * num_layers + 2 + row).to(tl.int32)
    first = 0  # what is seen
    if HAS_WINDOW:
        first = tl.maximum(length + 1 - window, 0)
    first_tile = first // TILE * TILE
    num_keys = tl.maximum(num_packed - first_tile, 0)
    chunk = tl.maximum(tl.cdiv(tl.cdiv(num_keys, num_splits - 1), TILE) * TILE, smallest_chunk)
    used = tl.cdiv(num_keys, chunk) + 1
    let_next_start(PDL)
    wait_for_input(PDL)
    if (length >= 0) & (split < used):
        rg, rd = tl.arange(0, GP), tl.arange(0, D)
        is_head = rg < G
        is_query = is_head[:, None] & (rd < D)[None, :]
        cos, sin = tl.full((D,), 1.0, tl.float32), tl.full((D,), 0.0, tl.float32)
        if PAIRS > 0:
            turns = TURNS + row * 2 * PAIRS + rd // 2
            cos = tl.load(turns, mask=rd < 2 * PAIRS, other=1.0)
            sin = tl.load(turns + PAIRS, mask=rd < 2 * PAIRS, other=0.0)
            sin = tl.where(rd % 2 == 0, -sin, sin)
        new = QKV + row.to(tl.int64) * WIDTH
        query = _take_turned(
            new + (head * G + rg)[:, None] * D, Q_NORM, cos, sin, is_query, eps, PAIRS, HALVED, D, HAS_NORM
        )
        query = query.to(QKV.dtype.element_ty)
        slopes = tl.full((GP,), 0.0, tl.float32)
        if HAS_SLOPES:
            slopes = tl.load(SLOPES + head * G + rg, mask=is_head, other=0.0)
        # --- what is packed
        begin = first_tile + split * chunk
        end = tl.where(split == used - 1, begin, tl.minimum(begin + chunk, num_packed))
        if IN_HALVES:
            highest, total, read = read_in_halves(
                query, key_codes, key_scales, key_zeros, value_codes, value_scales, value_zeros, slopes,
                begin, end, first, scale, softcap,
                GP, D, TILE, BLOCK, D != VALUE_GROUP, STAGES, HAS_CAP, HAS_WINDOW, HAS_SLOPES, HAS_ASM,
            )  # fmt: skip
        else:
            highest = tl.full((GP,), float("-inf"), tl.float32)
            total = tl.full((GP,), 0.0, tl.float32)
            read = tl.full((GP, D), 0.0, tl.float32)
            for start in tl.range(begin, end, TILE):
                k = _unpack(
                    key_codes, key_scales, key_zeros, start, NBITS, D, BLOCK, KEY_GROUP, KEYS_BY_CHANNEL, TILE
                ).to(query.dtype)
                v = _unpack(
                    value_codes, value_scales, value_zeros, start, NBITS, D, BLOCK, VALUE_GROUP, VALUES_BY_CHANNEL, TILE
                ).to(query.dtype)
                place = start + tl.arange(0, TILE)
                highest, total, read = _read_tile(
                    query, k, v, place, place >= first, slopes, scale, softcap, highest, total, read,
                    HAS_CAP, HAS_SLOPES,
                )  # fmt: skip
        # --- what is not, and the new key, which the last part writes before it reads
        if split == used - 1:
            k_new = _take_turned(
                new + (HEADS + head) * D + tl.arange(0, 1)[:, None], K_NORM, cos, sin, (rd < D)[None, :], eps,
                PAIRS, HALVED, D, HAS_NORM,
            ).to(query.dtype)  # fmt: skip
            v_new = tl.load(new + (HEADS + KV_HEADS + head) * D + rd)[None, :]
            slot = length - num_packed
            into = recent + slot * POSITION + rd[None, :]
            tl.store(into, k_new)
            tl.store(into + KV_HEADS * D, v_new)
            seen = tl.maximum(first - num_packed, 0) // RECENT * RECENT
            for start in tl.range(seen, slot + 1, RECENT, num_stages=1):
                here = start + tl.arange(0, RECENT)
                at = recent + here[:, None] * POSITION + rd[None, :]
                is_old = (here < slot)[:, None]
                k = tl.load(at, mask=is_old, other=0.0)
                v = tl.load(at + KV_HEADS * D, mask=is_old, other=0.0)
                is_new = (here == slot)[:, None]
                k = tl.where(is_new, k_new, k)
                v = tl.where(is_new, v_new, v)
                place = num_packed + here
                is_key = (here <= slot) & (place >= first)
                highest, total, read = _read_tile(
                    query, k, v, place, is_key, slopes, scale, softcap, highest, total, read, HAS_CAP, HAS_SLOPES
                )
        put_together(
            read, highest, total, OUT + row.to(tl.int64) * (HEADS * D) + head * G * D, PARTS, STATS, COUNTS,
            pair, split, used, num_splits, G, G, HEADS * D, D, GP, D, GJ, MOST_SPLITS,
            SINKS + head * G, HAS_SINKS,
        )  # fmt: skip


def explain_no_tiles(keys: Scheme, values: Scheme) -> str | None:
    """Why the kernel can't read this packing; None if it can."""
    width = keys.width
    if width < SMALLEST_DOT or width & (width - 1) or keys.parts * keys.num_bytes != width:
        return f"heads of {width} numbers can't be unpacked in whole tiles"
    if keys.block % TILES[-1]:
        return f"groups of {keys.block} positions are not whole tiles of {TILES[-1]}"
    if keys.nbits != values.nbits or keys.dtype != values.dtype:
        return "keys and values are packed in different numbers of bits"
    return None


def can_halve(keys: Scheme, values: Scheme, dtype: torch.dtype) -> bool:
    """Whether queries of this dtype can read this packing in halves: `packed_halves`."""
    has_groups = keys.by_channel and not values.by_channel and values.width // values.group <= 2
    return (
        has_groups
        and keys.nbits == values.nbits == _HALVED_BITS
        and keys.dtype == values.dtype == torch.float16
        and keys.width >= 2 * SMALLEST_DOT
        and dtype in (torch.bfloat16, torch.float16)
    )


def list_packed(
    base: torch.Tensor, layers: Sequence[tuple[torch.Tensor, ...]], num_places: int, num_packed: Sequence[int]
) -> list[int]:
    """The table's entries after the recent positions: the packed tensors of all layers, as offsets from `base`."""
    entries = [num_places]
    for which in range(NUM_TENSORS):
        entries += [(tensors[which].data_ptr() - base.data_ptr()) // ALIGNED for tensors in layers]
    return [*entries, *num_packed]


def count_packed(num_layers: int, rows: int) -> int:
    """The number of entries that `list_packed` returns."""
    return 1 + NUM_TENSORS * num_layers + rows


class PackedStepAttention(SplitAttention):
    """The attention of captured steps over packed keys."""

    def __init__(
        self,
        rows: int,
        shape: HeadShape,
        packing: tuple[Scheme, Scheme],
        device: torch.device,
        tiling: PackedTiling = USUAL,
    ) -> None:
        self._packing, self._tiling = packing, tiling
        self._tile = next(tile for tile in TILES if packing[0].block % tile == 0)
        splits = min(MOST_SPLITS, max(2, tiling.programs // (rows * shape.kv_heads)))
        super().__init__(rows, shape.heads // shape.kv_heads, shape.width, shape, device, splits)

    def _prepare(self, qkv: torch.Tensor, base: torch.Tensor, layout: KeyLayout) -> Launch:
        assert not layout.branches and not layout.block_size, "rows over packed keys share none, and are contiguous"
        keys, values = self._packing
        constants = {
            "TILE": self._tile,
            "RECENT": min(MOST_RECENT, self._tile),
            "ALIGNED": ALIGNED,
            "NBITS": keys.nbits,
            "BLOCK": keys.block,
            "SCALE_BYTES": keys.dtype.itemsize,
            "KEY_GROUP": keys.group,
            "KEYS_BY_CHANNEL": keys.by_channel,
            "VALUE_GROUP": values.group,
            "VALUES_BY_CHANNEL": values.by_channel,
            "IN_HALVES": can_halve(keys, values, qkv.dtype),
            "STAGES": self._tiling.stages,
            "HAS_ASM": qkv.is_cuda,
            "num_warps": self._tiling.warps,
            "num_stages": self._tiling.stages,
            "maxnreg": self._tiling.registers,
        }
        views = (base.view(torch.uint8), base.view(keys.dtype))
        return Launch(_attend, SMALLEST_CHUNK, constants, views)

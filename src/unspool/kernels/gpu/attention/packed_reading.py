"""Passes of a few tokens over packed keys: tiles are unpacked in registers, long rows are split.

One program reads a part of one row's keys for all queries that share a key head. The last part is what is stored in
full precision. A second kernel combines the parts. A tile is processed in slices of channels: a slice has one scale
per position, and one shift unpacks it. (Captured steps of one token have a kernel of their own:
`packed_attention.py`.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.attention.packed_tiles import multiply_tile, pick, unpack_tile, weigh_tile
from unspool.kernels.packed_keys import PackedKeys
from unspool.kernels.packing import Scheme

MOST_NEW = 16  # query positions per row; more are a prompt, whose products fill the device anyway
_MOST_ASKED = 128  # queries that share a key head
_MOST_SLICES = 4
_SHORTEST_PART = 256  # positions
_PROGRAMS_EACH = 4  # per multiprocessor


def can_read(queries: torch.Tensor, keys: PackedKeys, values: PackedKeys) -> bool:
    """Whether the kernel supports the shapes of these queries and this packing."""
    _, heads, num_new, _ = queries.shape
    asked = heads // keys.recent.shape[1] * num_new
    if num_new > MOST_NEW or asked > _MOST_ASKED or keys.view.num_places == 0:
        return False
    scheme = keys.packed.scheme
    width = _slice_width(scheme, values.packed.scheme)
    return (
        width >= 16
        and scheme.width == scheme.parts * scheme.num_bytes
        and _is_power(scheme.width)
        and scheme.width // width <= _MOST_SLICES
        and scheme.block % 16 == 0
    )


def attend(
    queries: torch.Tensor,  # (rows, heads, new, width)
    keys: PackedKeys,
    values: PackedKeys,
    scale: float,
    mask: torch.Tensor | None,  # additive, by position: (rows or 1, heads or 1, new or 1, stop)
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """The attention output: (rows, heads, new, width)."""
    rows, heads, num_new, width = queries.shape
    kv_heads, num_recent = keys.recent.shape[1], keys.recent.shape[2]
    share = heads // kv_heads
    asked = share * num_new
    key_scheme, value_scheme = keys.packed.scheme, values.packed.scheme
    tile = next(size for size in (64, 32, 16) if key_scheme.block % size == 0)
    part, num_parts = _split(keys.view.num_places, rows * kv_heads, tile, queries.device)
    read = torch.empty(rows, kv_heads, num_parts, asked, width, dtype=torch.float32, device=queries.device)
    logs = torch.empty(rows, kv_heads, num_parts, asked, dtype=torch.float32, device=queries.device)
    positions = keys.view.positions
    slice_width = _slice_width(key_scheme, value_scheme)
    masked = mask if mask is not None else read  # a dummy pointer if there is no mask
    _read_part[(num_parts, kv_heads, rows)](
        queries, read, logs, keys.packed.codes, keys.packed.scale, keys.packed.zero, values.packed.codes,
        values.packed.scale, values.packed.zero, keys.recent, values.recent, keys.view.counts, positions, masked,
        scale, softcap if softcap is not None else 1.0, window if window is not None else 0, part, num_recent,
        share, num_new,
        *queries.stride()[:3], *keys.packed.codes.stride()[:2], *keys.packed.scale.stride()[:2],
        *values.packed.codes.stride()[:2], *values.packed.scale.stride()[:2], *keys.recent.stride()[:3],
        *values.recent.stride()[:3], positions.stride(0), *(_mask_strides(mask) if mask is not None else (0, 0, 0)),
        mask.shape[-1] if mask is not None else 0,
        NBITS=key_scheme.nbits, WIDTH=width, NUM_BYTES=key_scheme.num_bytes, BLOCK=key_scheme.block,
        SLICE=slice_width, KEYS_BY_CHANNEL=key_scheme.by_channel, KEY_GROUP=key_scheme.group,
        VALUES_BY_CHANNEL=value_scheme.by_channel, VALUE_GROUP=value_scheme.group, TILE=tile,
        ASKED=max(16, triton.next_power_of_2(asked)), HAS_MASK=mask is not None, HAS_WINDOW=window is not None,
        HAS_CAP=softcap is not None, IS_WIDE=queries.dtype == torch.float32, num_warps=4,
        num_stages=3 if queries.element_size() == 2 else 2,
    )  # fmt: skip
    out = torch.empty(rows, heads, num_new, width, dtype=queries.dtype, device=queries.device)
    _join_parts[(rows * kv_heads, asked)](
        read, logs, out, num_parts, asked, WIDTH=width, PARTS=triton.next_power_of_2(num_parts), num_warps=2
    )
    return out


def _split(num_places: int, pairs: int, tile: int, device: torch.device) -> tuple[int, int]:
    """Positions per part, and the number of parts: the last one is what is not packed."""
    cores = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
    wanted = max(1, _PROGRAMS_EACH * cores // pairs)
    part = max(_SHORTEST_PART, -(-num_places // wanted))
    part = -(-part // tile) * tile
    return part, -(-num_places // part) + 1


def _slice_width(keys: Scheme, values: Scheme) -> int:
    """Channels that one shift unpacks and that have one scale per position, for keys and values alike; 0 if none."""
    width = keys.num_bytes
    for scheme in (keys, values):
        if not scheme.by_channel:
            small, large = sorted((scheme.group, width))
            if large % small:
                return 0
            width = small
    return width if _is_power(width) else 0


def _is_power(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0


def _mask_strides(mask: torch.Tensor) -> tuple[int, int, int]:
    """Strides over rows, heads and new positions; 0 for a dimension that the mask broadcasts."""
    row, head, new = (0 if mask.shape[axis] == 1 else mask.stride(axis) for axis in range(3))
    return row, head, new


# --- the kernels -----------------------------------------------------------------------------------------


@triton.jit
def _read_part(
    queries, read, logs, key_codes, key_scale, key_zero, value_codes, value_scale, value_zero, recent_keys,
    recent_values, counts, positions, mask,
    scale, softcap, window, part, num_recent, share, num_new,
    query_row, query_head, query_new, key_codes_row, key_codes_head, key_scale_row, key_scale_head, value_codes_row,
    value_codes_head, value_scale_row, value_scale_head, recent_key_row, recent_key_head, recent_key_slot,
    recent_value_row, recent_value_head, recent_value_slot, positions_row, mask_row, mask_head, mask_new, mask_stop,
    NBITS: tl.constexpr, WIDTH: tl.constexpr, NUM_BYTES: tl.constexpr, BLOCK: tl.constexpr, SLICE: tl.constexpr,
    KEYS_BY_CHANNEL: tl.constexpr, KEY_GROUP: tl.constexpr, VALUES_BY_CHANNEL: tl.constexpr,
    VALUE_GROUP: tl.constexpr, TILE: tl.constexpr, ASKED: tl.constexpr, HAS_MASK: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, IS_WIDE: tl.constexpr,
):  # fmt: skip
    PARTS: tl.constexpr = 8 // NBITS
    CODES: tl.constexpr = (1 << NBITS) - 1
    RUNS: tl.constexpr = NUM_BYTES // SLICE  # slices of a row of bytes; each is PARTS slices of channels
    SLICES: tl.constexpr = PARTS * RUNS
    split = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    is_last = split == tl.num_programs(0) - 1
    num_asked = share * num_new

    lane = tl.arange(0, ASKED)
    is_asked = lane < num_asked
    new = lane % num_new
    query_heads = head * share + lane // num_new
    column = tl.arange(0, SLICE)
    tile = tl.arange(0, TILE)
    num_packed = tl.load(counts + row).to(tl.int32)
    asked = tl.load(positions + row * positions_row + new, mask=is_asked, other=0).to(tl.int32)
    mask_at = mask + row * mask_row + query_heads.to(tl.int64) * mask_head + new.to(tl.int64) * mask_new

    # Slice number p * RUNS + r is the channels from p * NUM_BYTES + r * SLICE on.
    q_at = queries + row * query_row + query_heads.to(tl.int64)[:, None] * query_head + new[:, None] * query_new
    q_at += column[None, :]
    q0 = tl.load(q_at, mask=is_asked[:, None], other=0.0)
    q1 = q0
    q2 = q0
    q3 = q0
    if SLICES > 1:
        q1 = tl.load(q_at + (1 // RUNS * NUM_BYTES + 1 % RUNS * SLICE), mask=is_asked[:, None], other=0.0)
    if SLICES > 2:
        q2 = tl.load(q_at + (2 // RUNS * NUM_BYTES + 2 % RUNS * SLICE), mask=is_asked[:, None], other=0.0)
        q3 = tl.load(q_at + (3 // RUNS * NUM_BYTES + 3 % RUNS * SLICE), mask=is_asked[:, None], other=0.0)

    key_codes += row * key_codes_row + head * key_codes_head
    key_scale += row * key_scale_row + head * key_scale_head
    key_zero += row * key_scale_row + head * key_scale_head
    value_codes += row * value_codes_row + head * value_codes_head
    value_scale += row * value_scale_row + head * value_scale_head
    value_zero += row * value_scale_row + head * value_scale_head
    recent_keys += row * recent_key_row + head * recent_key_head
    recent_values += row * recent_value_row + head * recent_value_head

    peak = tl.full((ASKED,), float("-inf"), tl.float32)
    total = tl.zeros((ASKED,), tl.float32)
    acc0 = tl.zeros((ASKED, SLICE), tl.float32)
    acc1 = tl.zeros((ASKED, SLICE), tl.float32)
    acc2 = tl.zeros((ASKED, SLICE), tl.float32)
    acc3 = tl.zeros((ASKED, SLICE), tl.float32)

    # What is packed: whole tiles, so that nothing has to be masked while loading.
    first = split * part
    stop = tl.where(is_last, 0, tl.minimum(first + part, num_packed))
    if HAS_WINDOW:
        earliest = tl.load(positions + row * positions_row).to(tl.int32) - window + 1
        first = tl.maximum(first, earliest // TILE * TILE)
    for start in range(first, stop, TILE):
        places = start + tile
        scores = tl.zeros((ASKED, TILE), tl.float32)
        for r in tl.static_range(RUNS):
            raw = tl.load(key_codes + places[:, None] * NUM_BYTES + (r * SLICE + column)[None, :]).to(tl.int32)
            for p in tl.static_range(PARTS):
                tile_keys = unpack_tile(
                    raw, key_scale, key_zero, places, p * NUM_BYTES + r * SLICE + column, p * NBITS, CODES,
                    KEYS_BY_CHANNEL, p * NUM_BYTES + r * SLICE, KEY_GROUP, BLOCK, WIDTH,
                )  # fmt: skip
                q = pick(p * RUNS + r, q0, q1, q2, q3)
                scores += multiply_tile(q, tl.trans(tile_keys.to(q.dtype)), IS_WIDE)
        weights, peak, fade = weigh_tile(
            scores * scale, places, places < num_packed, asked, is_asked, mask_at, mask_stop, softcap, window, peak,
            HAS_MASK, HAS_WINDOW, HAS_CAP,
        )  # fmt: skip
        total = total * fade + tl.sum(weights, 1)
        acc0 = acc0 * fade[:, None]
        acc1 = acc1 * fade[:, None]
        acc2 = acc2 * fade[:, None]
        acc3 = acc3 * fade[:, None]
        narrow = weights.to(q0.dtype)
        for r in tl.static_range(RUNS):
            raw = tl.load(value_codes + places[:, None] * NUM_BYTES + (r * SLICE + column)[None, :]).to(tl.int32)
            for p in tl.static_range(PARTS):
                tile_values = unpack_tile(
                    raw, value_scale, value_zero, places, p * NUM_BYTES + r * SLICE + column, p * NBITS, CODES,
                    VALUES_BY_CHANNEL, p * NUM_BYTES + r * SLICE, VALUE_GROUP, BLOCK, WIDTH,
                )  # fmt: skip
                got = multiply_tile(narrow, tile_values.to(q0.dtype), IS_WIDE)
                if p * RUNS + r == 0:
                    acc0 += got
                elif p * RUNS + r == 1:
                    acc1 += got
                elif p * RUNS + r == 2:
                    acc2 += got
                else:
                    acc3 += got

    # What is not: the last part's, slot by slot after the row's packed positions.
    for start in tl.range(0, tl.where(is_last, num_recent, 0), TILE, num_stages=1):
        slots = start + tile
        is_held = slots < num_recent
        places = num_packed + slots
        scores = tl.zeros((ASKED, TILE), tl.float32)
        for i in tl.static_range(SLICES):
            at = slots[:, None] * recent_key_slot + (i // RUNS * NUM_BYTES + i % RUNS * SLICE + column)[None, :]
            tile_keys = tl.load(recent_keys + at, mask=is_held[:, None], other=0.0)
            q = pick(i, q0, q1, q2, q3)
            scores += multiply_tile(q, tl.trans(tile_keys), IS_WIDE)
        weights, peak, fade = weigh_tile(
            scores * scale, places, is_held, asked, is_asked, mask_at, mask_stop, softcap, window, peak, HAS_MASK,
            HAS_WINDOW, HAS_CAP,
        )  # fmt: skip
        total = total * fade + tl.sum(weights, 1)
        acc0 = acc0 * fade[:, None]
        acc1 = acc1 * fade[:, None]
        acc2 = acc2 * fade[:, None]
        acc3 = acc3 * fade[:, None]
        narrow = weights.to(q0.dtype)
        for i in tl.static_range(SLICES):
            at = slots[:, None] * recent_value_slot + (i // RUNS * NUM_BYTES + i % RUNS * SLICE + column)[None, :]
            tile_values = tl.load(recent_values + at, mask=is_held[:, None], other=0.0)
            got = multiply_tile(narrow, tile_values, IS_WIDE)
            if i == 0:
                acc0 += got
            elif i == 1:
                acc1 += got
            elif i == 2:
                acc2 += got
            else:
                acc3 += got

    safe = tl.where(total > 0, total, 1.0)
    place = ((row * tl.num_programs(1) + head) * tl.num_programs(0) + split) * num_asked + lane
    tl.store(logs + place, tl.where(total > 0, peak + tl.log(safe), float("-inf")), mask=is_asked)
    out_at = read + place[:, None] * WIDTH + column[None, :]
    tl.store(out_at, acc0 / safe[:, None], mask=is_asked[:, None])
    if SLICES > 1:
        tl.store(out_at + (1 // RUNS * NUM_BYTES + 1 % RUNS * SLICE), acc1 / safe[:, None], mask=is_asked[:, None])
    if SLICES > 2:
        tl.store(out_at + (2 // RUNS * NUM_BYTES + 2 % RUNS * SLICE), acc2 / safe[:, None], mask=is_asked[:, None])
        tl.store(out_at + (3 // RUNS * NUM_BYTES + 3 % RUNS * SLICE), acc3 / safe[:, None], mask=is_asked[:, None])


@triton.jit
def _join_parts(read, logs, out, num_parts, num_asked, WIDTH: tl.constexpr, PARTS: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    lane = tl.program_id(1)
    part = tl.arange(0, PARTS)
    first = pair * num_parts * num_asked + lane
    found = tl.load(logs + first + part * num_asked, mask=part < num_parts, other=float("-inf"))
    peak = tl.max(found, 0)
    total = tl.sum(tl.exp(found - peak), 0)
    column = tl.arange(0, WIDTH)
    made = tl.zeros((WIDTH,), tl.float32)
    for each in range(num_parts):
        log = tl.load(logs + first + each * num_asked)
        made += tl.load(read + (first + each * num_asked) * WIDTH + column) * tl.exp(log - peak)
    # Queries of a pair are ordered by head, then by position: as in (rows, heads, new, width).
    tl.store(out + (pair * num_asked + lane) * WIDTH + column, (made / total).to(out.dtype.element_ty))

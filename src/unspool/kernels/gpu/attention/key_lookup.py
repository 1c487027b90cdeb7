"""The address of the key at a position of a row, for every layout of `kernels.key_layout`.

`find_row` reads a row's entries of the table once; the others then turn positions into addresses. For a plain layout
nothing is looked up, and the address arithmetic is the usual one.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def find_row(
    BASE, TABLE, LENGTHS, layer, num_layers, row,
    POSITION: tl.constexpr, UNIT: tl.constexpr, BRANCHES: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """A layer's keys and the stride of its rows (or blocks); the same for prompts, and the number of keys that a row
    shares; and the address of the row's ancestry (or block table)."""
    own = BASE + tl.load(TABLE + layer) * UNIT
    apart = tl.load(TABLE + num_layers) * POSITION
    shared, shared_apart, num_shared, listed = own, apart, 0, LENGTHS
    if BRANCHES > 0:
        shared = BASE + tl.load(TABLE + num_layers + 1 + layer) * UNIT
        shared_apart = tl.load(TABLE + 2 * num_layers + 1) * POSITION
        listed = LENGTHS + tl.load(TABLE + 2 * num_layers + 2) + row * tl.load(TABLE + 2 * num_layers + 3)
        num_shared = tl.load(TABLE + 2 * num_layers + 4 + row).to(tl.int32)
    if PAGE > 0:
        listed = LENGTHS + tl.load(TABLE + num_layers + 1) + row * tl.load(TABLE + num_layers + 2)
    return own, apart, shared, shared_apart, num_shared, listed


@triton.jit
def find_room(TABLE, apart, layer, num_layers, POSITION: tl.constexpr, IS_RING: tl.constexpr):
    """The capacity of a layer's rows in positions, if each layer has its own, and their stride."""
    room = 1
    if IS_RING:
        room = tl.load(TABLE + num_layers + 1 + layer).to(tl.int32)
        apart = room.to(tl.int64) * POSITION
    return room, apart


@triton.jit
def wrap(place, room, IS_RING: tl.constexpr):
    """The indices of positions in a ring."""
    found = place
    if IS_RING:
        found = place % room
    return found


@triton.jit
def find_home(BASE, TABLE, own, layer, num_layers, UNIT: tl.constexpr, IS_AWAY: tl.constexpr):
    """The home of a layer's keys, where new ones are written; for an offloaded layer not the buffer that is read."""
    home = own
    if IS_AWAY:
        home = BASE + tl.load(TABLE + num_layers + 1 + layer) * UNIT
    return home


@triton.jit
def find_keys(
    row, place, is_there, own, apart, shared, shared_apart, num_shared, listed,
    POSITION: tl.constexpr, BRANCHES: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """The addresses of the keys at any positions of a row."""
    if BRANCHES > 0:
        mine = tl.maximum(place - num_shared, 0)
        whose = tl.load(listed + mine, mask=is_there & (place >= num_shared), other=0)
        found = tl.where(
            place < num_shared,
            shared + (row // BRANCHES) * shared_apart + place * POSITION,
            own + whose * apart + mine * POSITION,
        )
    elif PAGE > 0:
        block = tl.load(listed + place // PAGE, mask=is_there, other=0).to(tl.int64)
        found = own + (block * PAGE + place % PAGE) * POSITION
    else:
        found = own + row * apart + place.to(tl.int64) * POSITION
    return found


@triton.jit
def find_tile(
    row, start, place, is_there, own, apart, shared, shared_apart, num_shared, listed,
    POSITION: tl.constexpr, BRANCHES: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """The addresses of the keys of a tile of positions, the first of which exists; no tile crosses a block's end."""
    if PAGE > 0:
        block = tl.load(listed + start // PAGE).to(tl.int64)
        found = own + block * (PAGE * POSITION) + (place % PAGE) * POSITION
    else:
        found = find_keys(
            row, place, is_there, own, apart, shared, shared_apart, num_shared, listed, POSITION, BRANCHES, PAGE
        )
    return found


@triton.jit
def find_new(
    row, place, is_there, home, apart, num_shared, listed,
    POSITION: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """The addresses of a row's new keys, and which of them are written: none if the row has no block."""
    if PAGE > 0:
        block = tl.load(listed + place // PAGE, mask=is_there, other=0).to(tl.int64)
        into = home + (block * PAGE + place % PAGE) * POSITION
        is_there = is_there & (block > 0)
    else:
        into = home + row * apart + (place - num_shared).to(tl.int64) * POSITION
    return into, is_there

"""Where a layer's matrices, vectors and keys are, in shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from unspool.kernels.gpu.gluon_launching import ask_for
from unspool.kernels.gpu.resident.tiles import find_octet


@gluon.jit
def keep_tables(PLACES, TABLE, SOURCES, num_layers, room, ENTRIES: gl.constexpr, WARPS: gl.constexpr):
    """Copy what the layers' addresses are into shared memory, 32 numbers for each layer."""
    entry = gl.arange(0, 32, gl.BlockedLayout([1], [32], [WARPS], [0]))
    rows = ()
    for layer in gl.static_range(ENTRIES):
        is_there = layer < num_layers
        row = gl.load(PLACES + layer * 32 + entry, mask=is_there & (entry >= 0), other=0)
        keys, source = gl.load(TABLE + layer, mask=is_there, other=0), gl.load(SOURCES + layer, mask=is_there, other=0)
        row = gl.where(entry == 18, keys.to(gl.int32), gl.where(entry == 19, (keys >> 32).to(gl.int32), row))
        row = gl.where(entry == 20, source.to(gl.int32), gl.where(entry == 21, (source >> 32).to(gl.int32), row))
        rows = rows + (row,)
    for layer in gl.static_range(ENTRIES):
        room.index(layer).store(rows[layer])


@gluon.jit
def read_table(room, layer):
    """A layer's numbers (32,), all of them in every thread."""
    return room.index(layer).load(gl.BlockedLayout([32], [32], [8], [0]))


@gluon.jit
def pick(numbers, INDEX: gl.constexpr):
    """One of a layer's numbers."""
    place = gl.arange(0, 32, numbers.type.layout)
    return gl.sum(gl.where(place == INDEX, numbers, 0), 0)


@gluon.jit
def pick_long(numbers, INDEX: gl.constexpr):
    """A number of 64 bits."""
    return (pick(numbers, INDEX + 1).to(gl.int64) << 32) | (pick(numbers, INDEX).to(gl.int64) & 0xFFFFFFFF)


@gluon.jit
def ask_for_vectors(
    VECTOR, numbers, program, word, H: gl.constexpr, F: gl.constexpr, PROGRAMS: gl.constexpr, UNIT: gl.constexpr
):  # fmt: skip
    """Ask for a layer's norms, some lines by each program, and for the program's own biases, octet by octet."""
    vector, turn = word // 8, word % 8
    at = word * 0
    for index in gl.static_range(12):
        at = gl.where(vector == index, pick(numbers, index), at)
    outputs = gl.where(vector == 6, 3 * H, gl.where(vector == 10, F, H))
    place = gl.where(vector < 6, (program + turn * PROGRAMS) * 64, find_octet(program, turn, PROGRAMS) * 8)
    ask_for(VECTOR + at.to(gl.int64) * UNIT + place, (vector < 12) & (place < outputs), True)


@gluon.jit
def load_some(VECTOR, place, output, mask, other, UNIT: gl.constexpr):
    """Some numbers of a vector, in 16 bits: who widens them waits for them."""
    return gl.load(VECTOR + place.to(gl.int64) * UNIT + output, mask=mask, other=other)

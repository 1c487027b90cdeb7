"""How the numbers of a state lie in the threads of a program: some side by side, and of the rest some more.

A tensor has a power of two numbers, so a state of another size is two of them: 1,280 numbers are 1,024 and 256. What is
done to each number is done to a tuple of tensors with one number for each thread: those of the first part, then those
of the rest.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

THREADS = gl.constexpr(256)


@gluon.constexpr_function
def find_first(hidden):
    """Numbers of a state's first part: the largest power of two in it."""
    return 1 << (hidden.bit_length() - 1)


@gluon.constexpr_function
def count_each(hidden, part):
    """How many numbers a thread has of the first part, or of the rest: 0 if there is none."""
    first = find_first(hidden)
    return (hidden - first if part else first) // 256


@gluon.constexpr_function
def count_all(hidden):
    """How many numbers of a state a thread has."""
    return hidden // 256


@gluon.constexpr_function
def count_kinds(hidden):
    """How many parts a state has."""
    return 1 if find_first(hidden) == hidden else 2


@gluon.jit
def find_thread(WARPS: gl.constexpr):
    """Each thread's number."""
    return gl.arange(0, THREADS, gl.BlockedLayout([1], [32], [WARPS], [0]))


@gluon.jit
def list_places(thread, H: gl.constexpr):
    """Where a thread's numbers of a state stand in it."""
    FIRST: gl.constexpr = count_each(H, 0)
    REST: gl.constexpr = count_each(H, 1)
    places = ()
    for number in gl.static_range(FIRST):
        places = places + (thread * FIRST + number,)
    for number in gl.static_range(REST):
        places = places + (thread * REST + (find_first(H) + number),)
    return places


@gluon.jit
def gather(xs, FIRST: gl.constexpr, EACH: gl.constexpr, WARPS: gl.constexpr):
    """A thread's numbers side by side, as one tensor."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([EACH], [32], [WARPS], [0])
    if EACH == 4:
        low, high = gl.join(xs[FIRST], xs[FIRST + 2]), gl.join(xs[FIRST + 1], xs[FIRST + 3])
        x = gl.convert_layout(gl.join(low, high).reshape([4 * THREADS]), LAYOUT, assert_trivial=True)
    elif EACH == 2:
        pairs = gl.join(xs[FIRST], xs[FIRST + 1]).reshape([2 * THREADS])
        x = gl.convert_layout(pairs, LAYOUT, assert_trivial=True)
    else:
        gl.static_assert(EACH == 1)
        x = xs[FIRST]
    return x


@gluon.jit
def load_pairs(VECTOR, place, thread, mask, other, H: gl.constexpr, WARPS: gl.constexpr, UNIT: gl.constexpr):
    """A vector's numbers of 16 bits, two in a word: who takes words apart waits for them (`take_number`)."""
    FIRST: gl.constexpr = count_each(H, 0)
    REST: gl.constexpr = count_each(H, 1)
    at = VECTOR.to(gl.pointer_type(gl.int32)) + place.to(gl.int64) * (UNIT // 2)
    if FIRST == 4:
        pair = gl.arange(0, 2 * THREADS, gl.BlockedLayout([2], [32], [WARPS], [0]))
        words = gl.split(gl.load(at + pair, mask=mask & (pair >= 0), other=other).reshape([THREADS, 2]))
        words = (
            gl.convert_layout(words[0], thread.type.layout, assert_trivial=True),
            gl.convert_layout(words[1], thread.type.layout, assert_trivial=True),
        )
    else:
        gl.static_assert(FIRST == 2)
        words = (gl.load(at + thread, mask=mask & (thread >= 0), other=other),)
    if REST > 0:
        rest = thread if REST == 2 else thread // 2
        words = words + (gl.load(at + find_first(H) // 2 + rest, mask=mask & (thread >= 0), other=other),)
    return words


@gluon.jit
def take_number(words, NUMBER: gl.constexpr, thread, H: gl.constexpr):
    """One of a thread's numbers of what `load_pairs` has loaded."""
    FIRST: gl.constexpr = count_each(H, 0)
    REST: gl.constexpr = count_each(H, 1)
    if NUMBER < FIRST:
        found = words[NUMBER // 2] >> (16 * (NUMBER % 2))
    elif REST == 2:
        found = words[FIRST // 2] >> (16 * (NUMBER - FIRST))
    else:
        found = words[FIRST // 2] >> (16 * (thread % 2))
    return found.to(gl.int16).to(gl.bfloat16, bitcast=True)

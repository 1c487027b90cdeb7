"""Norms behind their products.

What is taken from a state before it is rounded to be multiplied is the mean of the state before it, so that a large
mean loses nothing; the norm's weights and its bias are rows of the same product.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from unspool.kernels.gpu.resident.products import keep_rows


@gluon.jit
def load_norm(VECTOR, weight, shift, pair, has_norm, UNIT: gl.constexpr):
    """A norm's weights and bias, two in a word: who takes words apart waits for them."""
    is_there = (pair >= 0) & has_norm
    words = VECTOR.to(gl.pointer_type(gl.int32))
    found = gl.load(words + weight.to(gl.int64) * (UNIT // 2) + pair, mask=is_there, other=0x3F803F80)
    return found, gl.load(words + shift.to(gl.int64) * (UNIT // 2) + pair, mask=is_there, other=0)


@gluon.jit
def _take_apart(pairs, NUMBERS: gl.constexpr):
    """Words of two floats as twice as many floats."""
    low, high = (
        pairs.to(gl.int16).to(gl.bfloat16, bitcast=True),
        (pairs >> 16).to(gl.int16).to(gl.bfloat16, bitcast=True),
    )
    return gl.convert_layout(gl.join(low, high).reshape([2 * pairs.shape[0]]), NUMBERS, assert_trivial=True)


@gluon.jit
def enter_norm(weights, shifts, held, H: gl.constexpr, WARPS: gl.constexpr, NUMBERS: gl.constexpr):
    """Store a norm's weights and its bias, which are multiplied as rows beside the state's; return the weights."""
    weight = _take_apart(weights, NUMBERS)
    both = gl.join(weight, _take_apart(shifts, NUMBERS)).permute(1, 0).reshape([2 * H])
    keep_rows(both, held.slice(2, 2, dim=0), 2, WARPS)
    return weight


@gluon.jit
def enter_state(x, mean, weight, held, moments, H: gl.constexpr, WARPS: gl.constexpr):
    """Store what a norm's product reads of a state: what is beyond a number, times the norm's weights; and its sums."""
    less = x.to(gl.float32) - mean
    keep_rows((less * weight.to(gl.float32)).to(gl.bfloat16), held.slice(0, 1, dim=0), 1, WARPS)
    less = less.reshape([WARPS, H // WARPS])
    moments[0].store(gl.sum(less, 1))
    moments[1].store(gl.sum(less * less, 1))


@gluon.jit
def find_moments(moments, mean, eps, has_norm, H: gl.constexpr, WARPS: gl.constexpr):
    """The mean of the state, how far it is from the mean before it, and the root of the norm."""
    EVERY: gl.constexpr = gl.BlockedLayout([WARPS], [32], [WARPS], [0])
    first = gl.sum(moments[0].load(EVERY), 0) / H
    square = gl.sum(moments[1].load(EVERY), 0) / H
    root = gl.rsqrt(gl.maximum(square - first * first, 0.0) + eps)
    return gl.where(has_norm, mean + first, 0.0), gl.where(has_norm, first, -mean), gl.where(has_norm, root, 1.0)


@gluon.jit
def leave_norm(sums, first, root):
    """Products behind their norm (outputs,): root * (V x - first * V weights) + V bias."""
    row = gl.arange(0, 4, gl.SliceLayout(0, sums.type.layout))[None, :]
    share = gl.where(row == 0, root, gl.where(row == 2, -root * first, 1.0))
    return gl.sum(gl.where(row == 1, 0.0, sums * share), 1)  # of the second there is no row


@gluon.jit
def normalise(state, mean, root, weight, shift):
    """Some numbers of a state behind its norm."""
    return round_state((state - mean) * root * weight.to(gl.float32) + shift.to(gl.float32))


@gluon.jit
def round_state(x):
    return x.to(gl.bfloat16).to(gl.float32)

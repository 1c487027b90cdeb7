"""Norms behind their products.

What is taken from a state before it is rounded to be multiplied is the mean of the state before it, so that a large
mean loses nothing; the norm's weights and its bias are rows of the same product.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from unspool.kernels.gpu.resident.products import keep_rows
from unspool.kernels.gpu.resident.vectors import count_each, gather, load_pairs, take_number


@gluon.jit
def load_norm(
    VECTOR, weight, shift, thread, has_norm, H: gl.constexpr, WARPS: gl.constexpr, UNIT: gl.constexpr
):  # fmt: skip
    """A norm's weights and bias, two in a word."""
    weights = load_pairs(VECTOR, weight, thread, has_norm, 0x3F803F80, H, WARPS, UNIT)
    return weights, load_pairs(VECTOR, shift, thread, has_norm, 0, H, WARPS, UNIT)


@gluon.jit
def _keep_part(weights, shifts, held, FIRST: gl.constexpr, EACH: gl.constexpr, WARPS: gl.constexpr):
    both = gl.join(gather(weights, FIRST, EACH, WARPS), gather(shifts, FIRST, EACH, WARPS))
    keep_rows(both.permute(1, 0).reshape([2 * both.shape[0]]), held.slice(2, 2, dim=0), 2, WARPS)


@gluon.jit
def enter_norm(weights, shifts, held, thread, H: gl.constexpr, WARPS: gl.constexpr):
    """Store a norm's weights and its bias, which are multiplied as rows beside the state's; return the weights."""
    FIRST: gl.constexpr = count_each(H, 0)
    REST: gl.constexpr = count_each(H, 1)
    own_weights, own_shifts = (), ()
    for number in gl.static_range(FIRST + REST):
        own_weights = own_weights + (take_number(weights, number, thread, H),)
        own_shifts = own_shifts + (take_number(shifts, number, thread, H),)
    _keep_part(own_weights, own_shifts, held[0], 0, FIRST, WARPS)
    if REST > 0:
        _keep_part(own_weights, own_shifts, held[1], FIRST, REST, WARPS)
    return own_weights


@gluon.jit
def enter_state(xs, mean, weights, held, moments, H: gl.constexpr, WARPS: gl.constexpr):
    """Store what a norm's product reads of a state: what is beyond a number, times the norm's weights; and its sums."""
    FIRST: gl.constexpr = count_each(H, 0)
    REST: gl.constexpr = count_each(H, 1)
    less = xs[0].to(gl.float32) - mean
    ys = ((less * weights[0].to(gl.float32)).to(gl.bfloat16),)
    total, square = less, less * less
    for number in gl.static_range(1, FIRST + REST):
        less = xs[number].to(gl.float32) - mean
        ys = ys + ((less * weights[number].to(gl.float32)).to(gl.bfloat16),)
        total += less
        square += less * less
    keep_rows(gather(ys, 0, FIRST, WARPS), held[0].slice(0, 1, dim=0), 1, WARPS)
    if REST > 0:
        keep_rows(gather(ys, FIRST, REST, WARPS), held[1].slice(0, 1, dim=0), 1, WARPS)
    moments[0].store(gl.sum(total.reshape([WARPS, 32]), 1))
    moments[1].store(gl.sum(square.reshape([WARPS, 32]), 1))


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

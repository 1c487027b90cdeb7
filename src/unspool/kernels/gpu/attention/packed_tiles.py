"""Tiles of packed keys inside a kernel: unpack, multiply, weigh. A slice of channels has one scale per position."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def pick(index: tl.constexpr, first, second, third, fourth):
    if index == 0:
        return first
    if index == 1:
        return second
    if index == 2:
        return third
    return fourth


@triton.jit
def unpack_tile(
    raw,  # (TILE, SLICE) bytes
    scale,
    zero,
    places,  # (TILE,) positions of one block
    channels,  # (SLICE,)
    SHIFT: tl.constexpr,
    CODES: tl.constexpr,
    BY_CHANNEL: tl.constexpr,
    FIRST: tl.constexpr,  # the first of the channels
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    codes = ((raw >> SHIFT) & CODES).to(tl.float32)
    if BY_CHANNEL:
        at = (tl.min(places, 0) // BLOCK) * WIDTH + channels
        factor = tl.load(scale + at).to(tl.float32)[None, :]
        shift = tl.load(zero + at).to(tl.float32)[None, :]
    else:
        at = places * (WIDTH // GROUP) + FIRST // GROUP
        factor = tl.load(scale + at).to(tl.float32)[:, None]
        shift = tl.load(zero + at).to(tl.float32)[:, None]
    return codes * factor + shift


@triton.jit
def multiply_tile(left, right, IS_WIDE: tl.constexpr):
    if IS_WIDE:
        return tl.dot(left, right, input_precision="ieee")
    return tl.dot(left, right)


@triton.jit
def weigh_tile(
    scores,  # (ASKED, TILE), scaled
    places,  # (TILE,)
    is_held,  # (TILE,)
    asked,  # (ASKED,) positions of the queries
    is_asked,
    mask,  # at the query's row, head and new position: (ASKED,) pointers
    mask_stop,
    softcap,
    window,
    peak,
    HAS_MASK: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr,
):
    """The tile's weights, the new maximum, and the factor that rescales the output so far."""
    if HAS_CAP:
        doubled = 2.0 * scores / softcap
        scores = softcap * (1.0 - 2.0 / (tl.exp(doubled) + 1.0))  # tanh; an infinite exponential gives 1
    visible = is_held[None, :] & (places[None, :] <= asked[:, None])
    if HAS_WINDOW:
        visible = visible & (places[None, :] > asked[:, None] - window)
    if HAS_MASK:
        inside = is_asked[:, None] & (places[None, :] < mask_stop)
        scores += tl.load(mask[:, None] + places[None, :], mask=inside, other=0.0).to(tl.float32)
    scores = tl.where(visible, scores, float("-inf"))
    higher = tl.maximum(peak, tl.max(scores, 1))
    base = tl.where(higher == float("-inf"), 0.0, higher)
    return tl.exp(scores - base[:, None]), higher, tl.exp(peak - base)

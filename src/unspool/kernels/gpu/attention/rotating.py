"""Rope over the heads of many tokens, in place: `kernels.rotary.rotate_` in one pass over them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import launch

_HEADS = 8  # heads per program


@triton.jit(do_not_specialize=["num_factors"])
def _rotate(HEADS, FACTORS, per_token, num_heads, num_factors, WIDTH: tl.constexpr, PAIRS: tl.constexpr,
            BLOCK: tl.constexpr, COUNT: tl.constexpr, HALVED: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK)[None, :]
    head = tl.program_id(1) * COUNT + tl.arange(0, COUNT)[:, None]
    at = FACTORS + (token % num_factors) * 2 * PAIRS + 2 * pair
    cos = tl.load(at, mask=pair < PAIRS, other=0.0)
    sin = tl.load(at + 1, mask=pair < PAIRS, other=0.0)
    number = tl.arange(0, 2 * BLOCK)[None, :]
    is_there = (head < num_heads) & (number < 2 * PAIRS)
    first = HEADS + token * per_token + head * WIDTH
    # Neighbours are loaded and stored together: two bytes at a time would take four times as long.
    if HALVED:
        is_pair = (head < num_heads) & (pair < PAIRS)
        one = tl.load(first + pair, mask=is_pair, other=0.0).to(tl.float32)
        two = tl.load(first + PAIRS + pair, mask=is_pair, other=0.0).to(tl.float32)
        tl.debug_barrier()  # all threads have loaded what others overwrite
    else:
        both = tl.load(first + number, mask=is_there, other=0.0).to(tl.float32)
        one, two = tl.split(tl.reshape(both, (COUNT, BLOCK, 2)))
    turned = tl.join(one * cos - two * sin, one * sin + two * cos)
    turned = tl.reshape(turned, (COUNT, 2 * BLOCK)).to(HEADS.dtype.element_ty)
    tl.store(first + number, turned, mask=is_there)


def rotate_heads_(heads: torch.Tensor, factors: torch.Tensor, *, is_halved: bool = False) -> None:
    """Rotate the pairs at the front of each head (rows, new, heads, width) by factors (rows or 1, new, 1, pairs).

    A token's heads lie one after the other; between tokens there may be others'. The rotated pairs are neighbours;
    before, they may be the two halves of what is rotated (`is_halved`).
    """
    rows, new, num_heads, width = heads.shape
    turns = torch.view_as_real(factors.contiguous())  # (rows or 1, new, 1, pairs, 2) float32
    pairs = turns.shape[-2]
    launch(
        _rotate,
        (rows * new, triton.cdiv(num_heads, _HEADS)),
        heads,
        turns,
        heads.stride(1),
        num_heads,
        turns.shape[0] * new,
        WIDTH=width,
        PAIRS=pairs,
        BLOCK=triton.next_power_of_2(pairs),
        COUNT=_HEADS,
        HALVED=is_halved,
        num_warps=4,
    )

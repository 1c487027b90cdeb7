"""Processors of what was written, one kernel each: penalties, bans of repeated n-grams, and DRY.

Scores of a vocabulary are copied once; then only those of tokens in the history are read and written.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.arguments import count_parts, find_step, lay_in_rows
from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input

BLOCK: Final = 256  # columns of the history per program
KINDS: Final = ("repetition", "presence", "frequency")


@triton.jit(do_not_specialize=["num_columns"])
def _penalise(
    SCORES, OUT, IDS, PENALTY, PADS, STARTS, IGNORED, V, num_columns,
    row_stride, ids_stride, penalty_stride, ignored_stride,
    HAS_PADS: tl.constexpr, HAS_STARTS: tl.constexpr, HAS_IGNORED: tl.constexpr, KIND: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    let_next_start(PDL)
    wait_for_input(PDL)
    first = tl.zeros((), tl.int64)
    if HAS_STARTS:
        first += tl.load(STARTS + row)
    if HAS_IGNORED:
        first += tl.load(IGNORED + row * ignored_stride)
    if HAS_PADS:
        first = tl.maximum(first, tl.load(PADS + row))
    penalty = tl.load(PENALTY + row * penalty_stride)
    is_seen = (column >= first) & (column < num_columns)
    token = tl.load(IDS + row * ids_stride + column, mask=is_seen, other=-1)
    is_seen = (token >= 0) & (token < V)
    if KIND == 2:  # what is added for a token is always the same: the order does not matter
        tl.atomic_add(OUT + row * V + token, tl.zeros((BLOCK,), tl.float32) - penalty, mask=is_seen)
    else:
        value = tl.load(SCORES + row * row_stride + token, mask=is_seen, other=0.0)
        if KIND == 1:
            made = value - penalty
        else:
            made = tl.where(value < 0, value * penalty, tl.div_rn(value, tl.zeros_like(value) + penalty))
        tl.store(OUT + row * V + token, made, mask=is_seen)


def penalise(
    scores: torch.Tensor,  # (rows, vocab) float32
    ids: torch.Tensor,  # (rows, columns) int64
    penalty: torch.Tensor,  # (rows or 1, 1) float32
    *,
    pads: torch.Tensor | None,  # (rows,) int64: columns that hold no token
    starts: torch.Tensor | None,  # (rows,) int64: columns before a row's history
    ignored: torch.Tensor | None,  # (rows or 1, 1) int64: columns after those that are not looked at
    kind: str,
) -> torch.Tensor:
    """The scores with those of every token seen made smaller.

    They are divided by a penalty, or multiplied if they are negative ("repetition"); or the penalty is taken from them
    once ("presence"), or as often as they were seen ("frequency").
    """
    scores = lay_in_rows(scores)
    ids = lay_in_rows(ids)
    out = scores.clone(memory_format=torch.contiguous_format)
    rows, columns = ids.shape
    launch(
        _penalise,
        (rows, count_parts(columns, BLOCK)),
        scores,
        out,
        ids,
        penalty,
        ids if pads is None else pads,
        ids if starts is None else starts,
        ids if ignored is None else ignored,
        scores.shape[1],
        columns,
        scores.stride(0),
        ids.stride(0),
        find_step(penalty),
        find_step(ignored),
        HAS_PADS=pads is not None,
        HAS_STARTS=starts is not None,
        HAS_IGNORED=ignored is not None,
        KIND=KINDS.index(kind),
        BLOCK=BLOCK,
        **launch_options(),
    )
    return out


@triton.jit(do_not_specialize=["num_columns", "size"])
def _ban_repeated(
    OUT, IDS, PADS, V, num_columns, ids_stride, size,
    HAS_PADS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Set the tokens that followed what the text ends with to minus infinity; `size` tokens are compared."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    let_next_start(PDL)
    wait_for_input(PDL)
    IDS += row * ids_stride
    is_match = column < num_columns - size
    if HAS_PADS:
        is_match = is_match & (column >= tl.load(PADS + row))
    for place in range(size):
        token = tl.load(IDS + column + place, mask=is_match, other=-1)
        is_match = is_match & (token == tl.load(IDS + num_columns - size + place))
    token = tl.load(IDS + column + size, mask=is_match, other=-1)
    is_match = is_match & (token >= 0) & (token < V)
    tl.store(OUT + row * V + token, float("-inf"), mask=is_match)


def ban_repeated(scores: torch.Tensor, ids: torch.Tensor, size: int, pads: torch.Tensor | None) -> torch.Tensor:
    """The scores (rows, vocab) float32 with tokens that would end an n-gram of `size` again at minus infinity."""
    ids = lay_in_rows(ids)
    out = scores.clone(memory_format=torch.contiguous_format)
    rows, columns = ids.shape
    launch(
        _ban_repeated,
        (rows, count_parts(columns, BLOCK)),
        out,
        ids,
        ids if pads is None else pads,
        scores.shape[1],
        columns,
        ids.stride(0),
        size - 1,
        HAS_PADS=pads is not None,
        BLOCK=BLOCK,
        **launch_options(),
    )
    return out


@triton.jit(do_not_specialize=["num_columns", "allowed", "reach"])
def _penalise_repeats(
    SCORES, OUT, IDS, OPEN, MULTIPLIER, BASE, PADS, V, num_columns, row_stride, ids_stride, multiplier_stride,
    base_stride, allowed, reach, largest, lowest,
    HAS_PADS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    let_next_start(PDL)
    wait_for_input(PDL)
    IDS += row * ids_stride
    first = tl.zeros((), tl.int64)
    if HAS_PADS:
        first = tl.load(PADS + row)
    is_there = column < num_columns - 1
    is_same = is_there
    length = tl.zeros((BLOCK,), tl.int32)
    for back in range(reach):  # from the text's end
        is_open = (tl.load(OPEN + row * reach + reach - 1 - back) != 0) & (num_columns - 1 - back >= first)
        token = tl.load(IDS + column - back, mask=is_same & (column - back >= first), other=-1)
        is_same = is_same & (column - back >= first) & is_open
        is_same = is_same & (token == tl.load(IDS + tl.maximum(num_columns - 1 - back, 0)))
        length += is_same.to(tl.int32)
    over = (length - allowed).to(tl.float32)
    base = tl.load(BASE + row * base_stride)
    penalty = tl.load(MULTIPLIER + row * multiplier_stride) * tl.exp2(over * tl.log2(base))
    token = tl.load(IDS + column + 1, mask=is_there, other=-1)
    is_hit = is_there & (over >= 0) & (token >= 0) & (token < V)
    value = tl.load(SCORES + row * row_stride + token, mask=is_hit, other=0.0)
    lowered = tl.maximum(value - tl.minimum(penalty, largest), lowest)
    tl.atomic_min(OUT + row * V + token, lowered, mask=is_hit)


def penalise_repeats(
    scores: torch.Tensor,  # (rows, vocab) float32
    ids: torch.Tensor,  # (rows, columns) int64
    is_open: torch.Tensor,  # (rows, reach) bool: which of the last tokens a match may have
    multiplier: torch.Tensor,  # (rows or 1, 1) float32
    base: torch.Tensor,  # (rows or 1, 1) float32
    *,
    allowed: int,
    largest: float,
    pads: torch.Tensor | None,  # (rows,) int64: columns that hold no token
) -> torch.Tensor:
    """The scores with those of tokens that would extend a repetition lowered, by how long it is (DRY)."""
    scores = lay_in_rows(scores)
    ids = lay_in_rows(ids)
    out = scores.clone(memory_format=torch.contiguous_format)
    rows, columns = ids.shape
    launch(
        _penalise_repeats,
        (rows, count_parts(columns, BLOCK)),
        scores,
        out,
        ids,
        is_open.to(torch.int8),
        multiplier,
        base,
        ids if pads is None else pads,
        scores.shape[1],
        columns,
        scores.stride(0),
        ids.stride(0),
        find_step(multiplier),
        find_step(base),
        allowed,
        is_open.shape[1],
        largest,
        torch.finfo(torch.float32).min,
        HAS_PADS=pads is not None,
        BLOCK=BLOCK,
        **launch_options(),
    )
    return out

"""Whisper's rules for timestamps in two kernels, where operators would be twenty.

The reference is `logits.whisper.WhisperTimeStampLogitsProcessor` on torch's operators. A row is divided among
programs: the first kernel finds the highest score of text and the sum of the timestamps' probabilities, the second
writes the scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.arguments import count_parts, lay_in_rows, round_up
from unspool.kernels.gpu.launching import launch

BLOCK: Final = 2_048
_HISTORY: Final = 512  # tokens at a time


@dataclass(frozen=True, slots=True)
class TimestampRules:
    """What the rules know of a model's tokens."""

    begin: int  # the column of the first token that is not forced
    first: int  # timestamp; the id before it forbids them all, and is never written
    end: int  # of a text
    last_initial: int  # the highest place of a timestamp that may stand first
    compares: bool  # text is forbidden where timestamps together are likelier than each of its tokens


@triton.jit
def _follow(IDS, row, ids_stride, begin, num_columns, FIRST, HISTORY: tl.constexpr):
    """Whether a lone timestamp wants its pair, whether text must come, and the first timestamp that may come."""
    ids = IDS + row * ids_stride
    newest = num_columns * 0 - 1
    for start in tl.range(begin, num_columns, HISTORY):
        column = start + tl.arange(0, HISTORY)
        token = tl.load(ids + column, mask=column < num_columns, other=0)
        newest = tl.maximum(newest, tl.max(tl.where(token >= FIRST, column, -1), 0))
    is_last = newest == num_columns - 1
    before = tl.load(ids + tl.maximum(num_columns - 2, 0))
    has_before = (before >= FIRST) | (num_columns - 1 == begin)
    is_alone = is_last & (has_before == 0)
    is_paired = is_last & has_before
    reached = tl.load(ids + tl.maximum(newest, 0)).to(tl.int32) - FIRST + tl.where(is_alone, 0, 1)
    return is_alone, is_paired, tl.where(newest >= 0, reached, 0)


@triton.jit
def _obey(
    IDS, SCORES, row, ids_stride, row_stride, num_columns, begin, V, FIRST, END, LAST_INITIAL,
    BLOCK: tl.constexpr, HISTORY: tl.constexpr,
):  # fmt: skip
    """A part of a row's scores after the rules that do not compare, and their tokens."""
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    scores = tl.load(SCORES + row * row_stride + token, mask=token < V, other=float("-inf"))
    is_stamp, place = token >= FIRST, token - FIRST
    is_out = token == FIRST - 1
    if num_columns == begin:
        is_out = is_out | (is_stamp == 0) | (place > LAST_INITIAL)
    if num_columns > begin:
        is_alone, is_paired, reached = _follow(IDS, row, ids_stride, begin, num_columns, FIRST, HISTORY)
        is_out = is_out | (is_stamp & (is_paired | (place < reached))) | ((token < END) & is_alone)
    return tl.where(is_out, float("-inf"), scores), token, is_stamp


@triton.jit(do_not_specialize=["num_columns", "begin", "ids_stride"])
def _sum_up(
    IDS, SCORES, SUMS, ids_stride, row_stride, num_columns, begin, V, FIRST, END, LAST_INITIAL,
    BLOCK: tl.constexpr, HISTORY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scores, _, is_stamp = _obey(
        IDS, SCORES, row, ids_stride, row_stride, num_columns, begin, V, FIRST, END, LAST_INITIAL, BLOCK, HISTORY
    )
    stamps = tl.where(is_stamp, scores, float("-inf"))
    highest = tl.max(stamps, 0)
    total = tl.sum(tl.exp(stamps - tl.where(highest > float("-inf"), highest, 0.0)), 0)
    into = SUMS + (row * tl.num_programs(1) + tl.program_id(1)) * 3
    tl.store(into, tl.max(tl.where(is_stamp, float("-inf"), scores), 0))
    tl.store(into + 1, highest)
    tl.store(into + 2, total)


@triton.jit(do_not_specialize=["num_columns", "begin", "ids_stride"])
def _write(
    IDS, SCORES, SUMS, OUT, ids_stride, row_stride, num_columns, begin, V, FIRST, END, LAST_INITIAL,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, HISTORY: tl.constexpr, COMPARES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scores, token, is_stamp = _obey(
        IDS, SCORES, row, ids_stride, row_stride, num_columns, begin, V, FIRST, END, LAST_INITIAL, BLOCK, HISTORY
    )
    if COMPARES:
        part = tl.arange(0, PARTS)
        at = SUMS + (row * tl.num_programs(1) + part) * 3
        is_part = part < tl.num_programs(1)
        of_text = tl.max(tl.load(at, mask=is_part, other=float("-inf")), 0)
        peaks = tl.load(at + 1, mask=is_part, other=float("-inf"))
        totals = tl.load(at + 2, mask=is_part, other=0.0)
        peak = tl.max(peaks, 0)
        total = tl.sum(totals * tl.exp(peaks - tl.where(peak > float("-inf"), peak, 0.0)), 0)
        if tl.log(total) + peak > of_text:
            scores = tl.where(is_stamp, scores, float("-inf"))
    tl.store(OUT + row * V + token, scores, mask=token < V)


def obey_timestamps(ids: torch.Tensor, scores: torch.Tensor, rules: TimestampRules) -> torch.Tensor:
    """The scores (rows, vocab) float32 with all that the rules forbid after tokens (rows, columns) at -inf."""
    (rows, vocab), num_columns = scores.shape, ids.shape[1]
    ids, scores = lay_in_rows(ids) if num_columns else ids, lay_in_rows(scores)
    parts = count_parts(vocab, BLOCK)
    sums = torch.empty(rows, parts, 3, dtype=torch.float32, device=scores.device)
    out = torch.empty(rows, vocab, dtype=torch.float32, device=scores.device)
    strides, tokens = (ids.stride(0), scores.stride(0)), (rules.first, rules.end, rules.last_initial)
    known = (*strides, num_columns, rules.begin, vocab, *tokens)
    sizes = {"BLOCK": BLOCK, "HISTORY": _HISTORY}
    if rules.compares:
        launch(_sum_up, (rows, parts), ids, scores, sums, *known, **sizes)
    launch(
        _write, (rows, parts), ids, scores, sums, out, *known, PARTS=round_up(parts), COMPARES=rules.compares, **sizes
    )
    return out

"""Processors that compare every score with what its row amounts to: cuts below a floor, XTC, a temperature that follows
the entropy. Two kernels each, XTC three.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.arguments import find_step, lay_in_rows
from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.sampling.row_sums import SUMS, TILE, WARPS, count_joined, join_sums, sum_rows

KINDS: Final = ("epsilon", "eta", "min_p", "top_a", "sigma")  # of `cut_below`


@triton.jit
def _cut_below(
    SCORES, OUT, SUMS, VALUES, V, row_stride, values_stride, num_tiles, filler,
    KIND: tl.constexpr, NUM: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    let_next_start(PDL)
    value = tl.load(VALUES + row * values_stride)
    wait_for_input(PDL)
    scores = tl.load(SCORES + row * row_stride + token, mask=token < V, other=float("-inf"))
    floor = find_floor(SUMS, row, num_tiles, value, KIND, NUM, TILES)
    tl.store(OUT + row * V + token, tl.where(scores < floor, filler, scores), mask=token < V)


@triton.jit
def find_floor(SUMS, row, num_tiles, value, KIND: tl.constexpr, NUM: tl.constexpr, TILES: tl.constexpr):
    """The lowest score that a cut of a kind of KINDS leaves of a row."""
    highest, _, whole, entropy, deviation, _, _ = join_sums(SUMS, row, num_tiles, NUM, TILES)
    if KIND == 0:  # in the order of KINDS
        floor = tl.minimum(value + (highest + whole), highest)
    elif KIND == 1:
        floor = tl.minimum(tl.minimum(value, value / 2.0 - entropy) + (highest + whole), highest)
    elif KIND == 2:
        floor = highest + value
    elif KIND == 3:
        floor = highest - whole + value
    else:
        floor = tl.where(value == 0.0, float("-inf"), highest - value * deviation)
    return floor


def cut_below(scores: torch.Tensor, values: torch.Tensor, kind: str, filler: float) -> torch.Tensor:
    """The scores (rows, vocab) float32 with those below the floor of their row at `filler`.

    `values` (rows or 1, 1) float32 are the settings of a kind of KINDS; logarithms of all but "sigma".
    """
    scores = lay_in_rows(scores)
    rows, vocab = scores.shape
    out = torch.empty(rows, vocab, dtype=scores.dtype, device=scores.device)
    sums, tiles = sum_rows(scores)
    launch(
        _cut_below,
        (rows, tiles),
        scores,
        out,
        sums,
        values,
        vocab,
        scores.stride(0),
        find_step(values),
        tiles,
        filler,
        KIND=KINDS.index(kind),
        NUM=SUMS,
        TILE=TILE,
        TILES=count_joined(tiles),
        num_warps=WARPS,
        **launch_options(),
    )
    return out


@triton.jit
def _temper(
    SCORES, OUT, SUMS, MIDDLE, SPREAD, EXPONENT, V, row_stride, middle_stride, spread_stride, exponent_stride,
    num_tiles, NUM: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    let_next_start(PDL)
    middle, spread = tl.load(MIDDLE + row * middle_stride), tl.load(SPREAD + row * spread_stride)
    exponent = tl.load(EXPONENT + row * exponent_stride)
    wait_for_input(PDL)
    scores = tl.load(SCORES + row * row_stride + token, mask=token < V, other=float("-inf"))
    _, _, _, entropy, _, _, count = join_sums(SUMS, row, num_tiles, NUM, TILES)
    share = entropy / tl.maximum(tl.log(count.to(tl.float32)), 1e-9)
    share = tl.where(count > 1.0, tl.minimum(tl.maximum(share, 0.0), 1.0), 0.0)
    share = tl.where(share > 0.0, tl.exp2(exponent * tl.log2(share)), 0.0)
    temperature = (middle - spread) + 2.0 * spread * share
    tl.store(OUT + row * V + token, tl.div_rn(scores, tl.zeros_like(scores) + temperature), mask=token < V)


def temper(scores: torch.Tensor, middle: torch.Tensor, spread: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """The scores (rows, vocab) float32 divided by a temperature from `middle - spread` to `middle + spread`, by the
    entropy relative to the largest possible one, to the power of `exponent`; (rows or 1, 1) float32 each."""
    scores = lay_in_rows(scores)
    rows, vocab = scores.shape
    out = torch.empty(rows, vocab, dtype=scores.dtype, device=scores.device)
    sums, tiles = sum_rows(scores)
    launch(
        _temper,
        (rows, tiles),
        scores,
        out,
        sums,
        middle,
        spread,
        exponent,
        vocab,
        scores.stride(0),
        *(find_step(values) for values in (middle, spread, exponent)),
        tiles,
        NUM=SUMS,
        TILE=TILE,
        TILES=count_joined(tiles),
        num_warps=WARPS,
        **launch_options(),
    )
    return out


@triton.jit
def _find_least(
    SCORES, SUMS, THRESHOLD, LEASTS, TOKENS, V, row_stride, threshold_stride, num_tiles,
    NUM: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The lowest of a tile's scores that are likely, and its first token."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    let_next_start(PDL)
    threshold = tl.load(THRESHOLD + row * threshold_stride)
    wait_for_input(PDL)
    scores = tl.load(SCORES + row * row_stride + token, mask=token < V, other=float("-inf"))
    highest, _, whole, _, _, _, _ = join_sums(SUMS, row, num_tiles, NUM, TILES)
    is_top = tl.exp((scores - highest) - whole) >= threshold
    least = tl.min(tl.where(is_top, scores, float("inf")), 0)
    place = row * num_tiles + tile
    tl.store(LEASTS + place, least)
    tl.store(TOKENS + place, tl.min(tl.where(is_top & (scores == least), token, V), 0))


@triton.jit
def _exclude(
    SCORES, OUT, SUMS, THRESHOLD, PROBABILITY, UNIFORMS, LEASTS, TOKENS, V, row_stride, threshold_stride,
    probability_stride, num_tiles, filler,
    NUM: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tiles = tl.arange(0, TILES)
    token = tile * TILE + tl.arange(0, TILE)
    let_next_start(PDL)
    threshold = tl.load(THRESHOLD + row * threshold_stride)
    probability = tl.load(PROBABILITY + row * probability_stride)
    wait_for_input(PDL)
    uniform = tl.load(UNIFORMS + row)
    scores = tl.load(SCORES + row * row_stride + token, mask=token < V, other=float("-inf"))
    highest, _, whole, _, _, _, _ = join_sums(SUMS, row, num_tiles, NUM, TILES)
    leasts = tl.load(LEASTS + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("inf"))
    tokens = tl.load(TOKENS + row * num_tiles + tiles, mask=tiles < num_tiles, other=V)
    least = tl.min(leasts, 0)
    spared = tl.min(tl.where(leasts == least, tokens, V), 0)
    is_top = tl.exp((scores - highest) - whole) >= threshold
    spared = tl.where(uniform < probability, spared, -1)  # -1: the row is not cut
    is_dropped = is_top & (token != spared) & (spared >= 0)
    tl.store(OUT + row * V + token, tl.where(is_dropped, filler, scores), mask=token < V)


def exclude_top(
    scores: torch.Tensor,  # (rows, vocab) float32
    threshold: torch.Tensor,  # (rows or 1, 1) float32
    probability: torch.Tensor,  # (rows or 1, 1) float64
    uniforms: torch.Tensor,  # (rows,) float64
    filler: float,
) -> torch.Tensor:
    """The scores with those of tokens that reach a probability of `threshold` at `filler`, but for the first of the
    least likely ones, in rows whose number lies below `probability` (XTC)."""
    scores = lay_in_rows(scores)
    rows, vocab = scores.shape
    out = torch.empty(rows, vocab, dtype=scores.dtype, device=scores.device)
    sums, tiles = sum_rows(scores)
    leasts = torch.empty(rows * tiles, dtype=torch.float32, device=scores.device)
    tokens = torch.empty(rows * tiles, dtype=torch.int32, device=scores.device)
    threshold_stride, probability_stride = (find_step(values) for values in (threshold, probability))
    wide = {"NUM": SUMS, "TILE": TILE, "TILES": count_joined(tiles), "num_warps": WARPS, **launch_options()}
    launch(
        _find_least,
        (rows, tiles),
        scores,
        sums,
        threshold,
        leasts,
        tokens,
        vocab,
        scores.stride(0),
        threshold_stride,
        tiles,
        **wide,
    )
    launch(
        _exclude,
        (rows, tiles),
        scores,
        out,
        sums,
        threshold,
        probability,
        uniforms.contiguous(),
        leasts,
        tokens,
        vocab,
        scores.stride(0),
        threshold_stride,
        probability_stride,
        tiles,
        filler,
        **wide,
    )
    return out

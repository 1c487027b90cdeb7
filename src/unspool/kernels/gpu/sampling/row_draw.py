"""A draw from whole rows of scores in two kernels: tiles are summed in parallel, then one program per row finds the
tile at which the cumulative probability passes the uniform number, and the token in it. The reference is
`select.draw_plainly`.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.arguments import count_parts, lay_in_rows, round_up
from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.sampling.replays import KeptReplays

TILE: Final = 1_024  # scores per program of the first kernel


@triton.jit
def _weigh_tiles(SCORES, TOPS, WEIGHTS, V, row_stride, TILE: tl.constexpr, PDL: tl.constexpr):
    """Every tile's highest score (infinity if one is NaN), and the sum of exponentials relative to it."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    let_next_start(PDL)
    wait_for_input(PDL)
    scores = tl.load(SCORES + row * row_stride + token, mask=token < V, other=float("-inf"))
    store_weight(TOPS, WEIGHTS, row * tl.num_programs(1) + tile, scores)


@triton.jit
def store_weight(TOPS, WEIGHTS, place, scores):
    """Store a tile's highest score and its sum of exponentials."""
    scores = tl.where(scores == scores, scores, float("inf"))
    top = tl.max(scores, 0)
    shares = tl.exp(scores.to(tl.float64) - top.to(tl.float64))
    tl.store(TOPS + place, top)
    tl.store(WEIGHTS + place, tl.sum(tl.where(scores > float("-inf"), shares, 0.0), 0))


@triton.jit
def choose_tile(tops, weights, highest, uniform, TILES: tl.constexpr):
    """The tile at which the cumulative weight passes a number, the weight before it, and the weight that is passed."""
    tile = tl.arange(0, TILES)
    scales = tl.exp(tops.to(tl.float64) - highest.to(tl.float64))
    weights = tl.where(tops > float("-inf"), weights * scales, 0.0)
    passed = tl.cumsum(weights, 0)
    target = uniform * tl.max(passed, 0)
    drawn = tl.min(tl.where((weights > 0.0) & (passed > target), tile, TILES), 0)
    drawn = tl.minimum(drawn, tl.max(tl.where(weights > 0.0, tile, 0), 0))  # if rounding lets none pass
    return drawn, tl.sum(tl.where(tile < drawn, weights, 0.0), 0), target


@triton.jit
def choose_in_tile(scores, highest, before, target, TILE: tl.constexpr):
    """The place in a tile of scores at which the cumulative weight passes the target."""
    at = tl.arange(0, TILE)
    shares = tl.exp(scores.to(tl.float64) - highest.to(tl.float64))
    shares = tl.where(scores > float("-inf"), shares, 0.0)
    passed = before + tl.cumsum(shares, 0)
    found = tl.min(tl.where((shares > 0.0) & (passed > target), at, TILE), 0)
    return tl.minimum(found, tl.max(tl.where(shares > 0.0, at, 0), 0))


@triton.jit(do_not_specialize=["UNIFORMS", "OUT"])  # single numbers are loaded and stored there
def _find_token(
    SCORES, TOPS, WEIGHTS, UNIFORMS, OUT, V, row_stride, num_tiles,
    TILE: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    let_next_start(PDL)
    wait_for_input(PDL)
    uniform = tl.load(UNIFORMS + row)
    tops = tl.load(TOPS + row * num_tiles + tile, mask=tile < num_tiles, other=float("-inf"))
    weights = tl.load(WEIGHTS + row * num_tiles + tile, mask=tile < num_tiles, other=0.0)
    highest = tl.max(tops, 0)
    chosen = tl.full((), -1, tl.int64)
    if (highest > float("-inf")) & (highest < float("inf")):
        drawn, before, target = choose_tile(tops, weights, highest, uniform, TILES)
        token = drawn * TILE + tl.arange(0, TILE)
        scores = tl.load(SCORES + row * row_stride + token, mask=token < V, other=float("-inf"))
        found = choose_in_tile(scores, highest, before, target, TILE)
        chosen = (drawn * TILE + found).to(tl.int64)
    tl.store(OUT + row, chosen)


_kept: Final = KeptReplays[tuple[torch.Tensor, torch.Tensor]](most=16)


def _make_work(rows: int, num_tiles: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """What tiles amount to: their highest scores, and sums of exponentials."""
    tops = torch.empty(rows, num_tiles, dtype=torch.float32, device=device)
    return tops, torch.empty(rows, num_tiles, dtype=torch.float64, device=device)


def draw_row(scores: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """The tokens (rows,) at which scores (rows, vocab) float32 pass uniforms (rows,) float64.

    -1 if there is none: no score is finite, or one of them is NaN.
    """
    scores = lay_in_rows(scores)
    uniforms = uniforms.contiguous()
    rows, vocab = scores.shape
    num_tiles, device = count_parts(vocab, TILE), scores.device
    tops, weights = _kept.lend((rows, num_tiles), device, lambda: _make_work(rows, num_tiles, device))
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    options = launch_options()
    launch(
        _weigh_tiles,
        (rows, num_tiles),
        scores,
        tops,
        weights,
        vocab,
        scores.stride(0),
        TILE=TILE,
        num_warps=8,
        **options,
    )
    launch(
        _find_token,
        (rows,),
        scores,
        tops,
        weights,
        uniforms,
        tokens,
        vocab,
        scores.stride(0),
        num_tiles,
        TILE=TILE,
        TILES=max(2, round_up(num_tiles)),
        num_warps=8,
        **options,
    )
    return tokens

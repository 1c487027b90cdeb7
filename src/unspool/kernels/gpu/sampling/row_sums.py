"""What a row of scores amounts to: its highest and lowest score, log-sum-exp, entropy and deviation, without a sort.

Rows are cut into tiles, one per program. `sum_rows` leaves partial results of the tiles; every program of the kernel
that follows joins those of its row (`join_sums`): there are some thirty.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.arguments import count_parts, find_step, round_up
from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input

TILE: Final = 4_096  # scores per program
SUMS: Final = 8  # numbers of a tile: see `_sum_tiles`
WARPS: Final = 8


@triton.jit
def _sum_tiles(SCORES, SUMS, V, row_stride, NUM: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    """Of every tile: highest and lowest score, the sums of exponentials and of products with them, the number of
    possible scores, their sum and the sum of their squares; all but the first two relative to the highest."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    let_next_start(PDL)
    wait_for_input(PDL)
    scores = tl.load(SCORES + row * row_stride + token, mask=token < V, other=float("-inf"))
    store_sums(SUMS + (row * tl.num_programs(1) + tile) * NUM, scores)


@triton.jit
def store_sums(sums, scores):
    """Store what the scores of a tile amount to, as `join_sums` reads it."""
    scores = tl.where(scores == scores, scores, float("inf"))
    is_possible = scores > float("-inf")
    highest = tl.max(scores, 0)
    below = tl.where(is_possible, scores - highest, 0.0)
    weights = tl.where(is_possible, tl.exp(below), 0.0)
    tl.store(sums, highest)
    tl.store(sums + 1, tl.min(tl.where(is_possible, scores, float("inf")), 0))
    tl.store(sums + 2, tl.sum(weights, 0))
    tl.store(sums + 3, tl.sum(weights * below, 0))
    tl.store(sums + 4, tl.sum(is_possible.to(tl.float32), 0))
    tl.store(sums + 5, tl.sum(below, 0))
    tl.store(sums + 6, tl.sum(below * below, 0))


@triton.jit
def join_sums(SUMS, row, num_tiles, NUM: tl.constexpr, TILES: tl.constexpr):
    """A row's highest and lowest score, its log-sum-exp relative to the highest, its entropy, its deviation, its sum of
    exponentials relative to the highest, and the number of its possible scores."""
    tiles = tl.arange(0, TILES)
    sums = SUMS + (row * num_tiles + tiles) * NUM
    is_there = tiles < num_tiles
    tops = tl.load(sums, mask=is_there, other=float("-inf"))
    lows = tl.load(sums + 1, mask=is_there, other=float("inf"))
    highest = tl.max(tops, 0)
    is_there = is_there & (tops > float("-inf"))
    off = tl.where(is_there, tops - highest, 0.0)
    scale = tl.where(is_there, tl.exp(off), 0.0)
    weights = tl.load(sums + 2, mask=is_there, other=0.0)
    products = tl.load(sums + 3, mask=is_there, other=0.0)
    total = tl.sum((weights * scale).to(tl.float64), 0)
    product = tl.sum(((products + off * weights) * scale).to(tl.float64), 0)
    whole = tl.log(total.to(tl.float32))
    counts = tl.load(sums + 4, mask=is_there, other=0.0).to(tl.float64)
    firsts = tl.load(sums + 5, mask=is_there, other=0.0).to(tl.float64)
    squares = tl.load(sums + 6, mask=is_there, other=0.0).to(tl.float64)
    off = off.to(tl.float64)
    count = tl.maximum(tl.sum(counts, 0), 1.0)
    mean = tl.sum(firsts + off * counts, 0) / count
    square = tl.sum(squares + 2.0 * off * firsts + off * off * counts, 0) / count
    deviation = tl.sqrt(tl.maximum(square - mean * mean, 0.0).to(tl.float32))
    entropy = whole - (product / total).to(tl.float32)
    return highest, tl.min(lows, 0), whole, entropy, deviation, total, count


def sum_rows(scores: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Partial results of the tiles of scores (rows, vocab) float32, whose rows lie whole; and the number of tiles."""
    rows, vocab = scores.shape
    tiles = count_parts(vocab, TILE)
    sums = torch.empty(rows * tiles * SUMS, dtype=torch.float32, device=scores.device)
    launch(
        _sum_tiles,
        (rows, tiles),
        scores,
        sums,
        vocab,
        scores.stride(0),
        NUM=SUMS,
        TILE=TILE,
        num_warps=WARPS,
        **launch_options(),
    )
    return sums, tiles


def count_joined(tiles: int) -> int:
    """The number of tiles that `join_sums` is compiled for."""
    return max(2, int(round_up(tiles)))


@triton.jit(do_not_specialize=["TEMPERATURE", "UNIFORMS", "NUMBERS", "temperature_stride", "uniforms_stride"])
def _copy_scores(
    SCORES, OUT, SUMS, TEMPERATURE, UNIFORMS, NUMBERS, V, row_stride, temperature_stride, uniforms_stride,
    IS_TEMPERED: tl.constexpr, HAS_UNIFORMS: tl.constexpr, NUM: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    let_next_start(PDL)
    wait_for_input(PDL)
    scores = tl.load(SCORES + row * row_stride + token, mask=token < V, other=float("-inf"))
    if IS_TEMPERED:
        temperature = tl.load(TEMPERATURE + row * temperature_stride)
        scores = tl.div_rn(scores, tl.zeros_like(scores) + temperature)
        scores = tl.where(token < V, scores, float("-inf"))
    tl.store(OUT + row * V + token, scores, mask=token < V)
    store_sums(SUMS + (row * tl.num_programs(1) + tile) * NUM, scores)
    if HAS_UNIFORMS:
        is_first = tile == 0
        uniform = tl.load(UNIFORMS + row * uniforms_stride, mask=is_first, other=0.0)
        tl.store(NUMBERS + row, uniform, mask=is_first)


class ScoresCopy:
    """Scores of a number of rows where a graph reads them, with the partial results of their tiles."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        tiles = count_parts(vocab, TILE)
        with torch.inference_mode(False):
            self.scores = torch.empty(rows, vocab, dtype=torch.float32, device=device)
            self.sums = torch.empty(rows * tiles * SUMS, dtype=torch.float32, device=device)
            self.uniforms = torch.empty(rows, dtype=torch.float64, device=device)

    def take(
        self, scores: torch.Tensor, temperature: torch.Tensor | None = None, uniforms: torch.Tensor | None = None
    ) -> None:
        """Copy scores (rows, vocab) float32, divided by a temperature (rows or 1, 1), and uniforms (rows,) float64."""
        rows, vocab = self.scores.shape
        launch(
            _copy_scores,
            (rows, count_parts(vocab, TILE)),
            scores,
            self.scores,
            self.sums,
            self.sums if temperature is None else temperature,
            self.uniforms if uniforms is None else uniforms,
            self.uniforms,
            vocab,
            scores.stride(0),
            find_step(temperature),
            0 if uniforms is None else uniforms.stride(0),
            IS_TEMPERED=temperature is not None,
            HAS_UNIFORMS=uniforms is not None,
            NUM=SUMS,
            TILE=TILE,
            num_warps=WARPS,
            **launch_options(),
        )

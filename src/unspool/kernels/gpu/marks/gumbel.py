"""Gumbel's keyed draw in two kernels: every tile of the vocabulary finds its least key, then the drawn token is left
alone. The reference is `watermark.gumbel.draw_plainly`; keys are float64 here as there, so that devices agree.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.arguments import count_parts, lay_in_rows, round_up
from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input

TILE: Final = 1_024  # tokens per program


@triton.jit
def _finish(word):
    """MurmurHash3's 32-bit finaliser."""
    word = (word ^ (word >> 16)) * 0x85EBCA6B
    word = (word ^ (word >> 13)) * 0xC2B2AE35
    return word ^ (word >> 16)


@triton.jit
def _find_least(SCORES, STATES, LEAST, TOKENS, V, row_stride, TILE: tl.constexpr, PDL: tl.constexpr):
    """Every tile's least key and the first token that has it; minus infinity if a score is NaN or infinite."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    let_next_start(PDL)
    wait_for_input(PDL)
    state = tl.load(STATES + row).to(tl.uint64)
    scores = tl.load(SCORES + row * row_stride + token, mask=token < V, other=float("-inf")).to(tl.float32)
    word = _finish(token.to(tl.uint32) * 0x9E3779B1 + state.to(tl.uint32))
    word = _finish(word ^ (state >> 32).to(tl.uint32))
    noise = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2**-32: exact, as is one less it
    keys = tl.log(-tl.log(1.0 - noise)) - scores.to(tl.float64)
    keys = tl.where(scores == scores, keys, float("-inf"))
    least = tl.min(keys, 0)
    first = tl.min(tl.where((keys == least) & (token < V), token, V), 0)
    tl.store(LEAST + row * tl.num_programs(1) + tile, least)
    tl.store(TOKENS + row * tl.num_programs(1) + tile, first)


@triton.jit
def _leave_one(
    SCORES, LEAST, TOKENS, REPEATED, OUT, V, row_stride, num_tiles,
    TILE: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tiles = tl.arange(0, TILES)
    let_next_start(PDL)
    wait_for_input(PDL)
    keys = tl.load(LEAST + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("inf"))
    tokens = tl.load(TOKENS + row * num_tiles + tiles, mask=tiles < num_tiles, other=V)
    least = tl.min(keys, 0)
    drawn = tl.min(tl.where(keys == least, tokens, V), 0)
    is_drawn = (least > float("-inf")) & (least < float("inf")) & (tl.load(REPEATED + row) == 0)
    token = tile * TILE + tl.arange(0, TILE)
    is_there = token < V
    scores = tl.load(SCORES + row * row_stride + token, mask=is_there & (is_drawn == 0), other=float("-inf"))
    alone = tl.where(token == drawn, 0.0, float("-inf")).to(scores.dtype)
    tl.store(OUT + row * V + token, tl.where(is_drawn, alone, scores), mask=is_there)


def leave_drawn(scores: torch.Tensor, states: torch.Tensor, repeated: torch.Tensor) -> torch.Tensor:
    """Zero for the token that the noise of `states` (rows,) draws from scores (rows, vocab), minus infinity elsewhere;
    rows that are repeated, and those without a finite highest score, stay as they are."""
    scores = lay_in_rows(scores)
    rows, vocab = scores.shape
    num_tiles = count_parts(vocab, TILE)
    least = torch.empty(rows, num_tiles, dtype=torch.float64, device=scores.device)
    tokens = torch.empty(rows, num_tiles, dtype=torch.int32, device=scores.device)
    out = torch.empty(rows, vocab, dtype=scores.dtype, device=scores.device)
    options = launch_options()
    grid = (rows, num_tiles)
    launch(_find_least, grid, scores, states, least, tokens, vocab, scores.stride(0), TILE=TILE, num_warps=4, **options)
    launch(
        _leave_one,
        grid,
        scores,
        least,
        tokens,
        repeated,
        out,
        vocab,
        scores.stride(0),
        num_tiles,
        TILE=TILE,
        TILES=max(2, round_up(num_tiles)),
        num_warps=4,
        **options,
    )
    return out

"""Both ends of a step: a token's embedding, and the most likely next token, which becomes the next step's input."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.arguments import count_parts, round_up
from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.sampling.replays import KeptReplays

EMBED_BLOCK = 1024
TILE = 4096  # logits per program


@triton.jit
def _embed(
    TOKENS, TABLE, POSITIONS, LENGTHS, OUT, scale, N, offset, num_positions, new, ahead,
    BLOCK: tl.constexpr, HAS_POSITIONS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    let_next_start(PDL)
    wait_for_input(PDL)
    token = tl.maximum(tl.load(TOKENS + row), 0)  # a row without a token has ended
    x = tl.load(TABLE + token * N + at, mask=at < N, other=0.0).to(tl.float32) * scale
    if HAS_POSITIONS:
        position = tl.load(LENGTHS + row // new) + row % new * ahead + offset
        position = tl.minimum(tl.maximum(position, 0), num_positions - 1)
        x += tl.load(POSITIONS + position.to(tl.int64) * N + at, mask=at < N, other=0.0).to(tl.float32)
    tl.store(OUT + row * N + at, x.to(OUT.dtype.element_ty), mask=at < N)


@dataclass(frozen=True, slots=True)
class LearnedPositions:
    """A learned table of positions, and where a pass's tokens stand in it."""

    table: torch.Tensor  # (positions, hidden)
    offset: int  # row of position 0
    lengths: torch.Tensor  # (rows,) int32: position of a row's first new token
    is_forked: bool = False  # all new tokens of a row have the same position


def embed(
    tokens: torch.Tensor, table: torch.Tensor, scale: float, out: torch.Tensor, places: LearnedPositions | None = None
) -> None:
    """out (tokens, hidden) = scale * table[tokens], plus the rows of their positions if these are learned."""
    rows, width = out.shape
    launch(
        _embed,
        (rows, count_parts(width, EMBED_BLOCK)),
        tokens,
        table,
        places.table if places is not None else table,
        places.lengths if places is not None else tokens,
        out,
        scale,
        width,
        places.offset if places is not None else 0,
        places.table.shape[0] if places is not None else 0,
        rows // places.lengths.numel() if places is not None else 1,
        0 if places is None or places.is_forked else 1,
        BLOCK=EMBED_BLOCK,
        HAS_POSITIONS=places is not None,
        **launch_options(),
    )


@triton.jit
def _find_highest(LOGITS, TOPS, cap, V, HAS_CAP: tl.constexpr, TILE: tl.constexpr, PDL: tl.constexpr):
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tile * TILE + tl.arange(0, TILE)
    let_next_start(PDL)
    wait_for_input(PDL)
    logits = tl.load(LOGITS + row * V + at, mask=at < V, other=float("-inf"))
    if HAS_CAP:
        logits = cap * (2.0 * tl.sigmoid(2.0 * logits / cap) - 1.0)
        tl.store(LOGITS + row * V + at, logits, mask=at < V)
    is_number = logits == logits
    logits = tl.where(is_number, logits, float("inf"))
    tl.store(TOPS + row * tl.num_programs(1) + tile, tl.max(logits, 0))


@triton.jit
def enter_row(row, token, TOKENS, LENGTHS, LOG, num_logged):
    """Enter what a program's row chose where the next pass reads it and in the log, and increment its length."""
    tl.store(TOKENS + row, token)
    length = tl.load(LENGTHS + row)
    tl.store(LENGTHS + row, tl.where(length >= 0, length + 1, length))
    if num_logged > 0:
        line = tl.maximum(length, 0) % num_logged
        tl.store(LOG + line * tl.num_programs(0) + row, token)


@triton.jit(do_not_specialize=["num_logged"])
def _take_highest(
    LOGITS, TOPS, TOKENS, LENGTHS, LOG, V, num_tiles, num_logged,
    TILE: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    let_next_start(PDL)
    wait_for_input(PDL)
    tops = tl.load(TOPS + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
    tile = tl.argmax(tops, 0)
    highest = tl.max(tops, 0)
    at = tile * TILE + tl.arange(0, TILE)
    logits = tl.load(LOGITS + row * V + at, mask=at < V, other=float("-inf"))
    num_missing = tl.sum((logits != logits).to(tl.int32), 0)
    token = tile * TILE + tl.argmax(logits, 0)
    token = tl.where((highest > float("-inf")) & (num_missing == 0), token, -1)
    enter_row(row, token.to(tl.int64), TOKENS, LENGTHS, LOG, num_logged)


def take_highest(
    logits: torch.Tensor,  # (rows, vocab) float32; capped in place if a cap is given
    tops: torch.Tensor,  # (rows, tiles) float32: workspace
    tokens: torch.Tensor,  # (rows,) int64: the first of the highest, or -1 if there is none
    lengths: torch.Tensor,  # (rows,) int32: incremented for rows that are present
    cap: float | None,
    log: torch.Tensor | None = None,  # (lines, rows) int64: the tokens of a step of length n stand in line n % lines
) -> None:
    """The most likely tokens, one per row, and the rows' lengths after them."""
    rows, vocab = logits.shape
    num_tiles = tops.shape[1]
    launch(
        _find_highest,
        (rows, num_tiles),
        logits,
        tops,
        cap or 1.0,
        vocab,
        HAS_CAP=cap is not None,
        TILE=TILE,
        num_warps=8,
        **launch_options(),
    )
    take_found(logits, tops, tokens, lengths, log)


_kept: Final = KeptReplays[tuple[torch.Tensor, torch.Tensor]](most=16)


def _make_work(rows: int, vocab: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tiles' highest scores, and lengths of nothing."""
    tops = torch.empty(rows, count_tiles(vocab), dtype=torch.float32, device=device)
    return tops, torch.zeros(rows, dtype=torch.int32, device=device)


def find_likeliest(scores: torch.Tensor) -> torch.Tensor:
    """The first token (rows,) of the highest of scores (rows, vocab) float32; -1 if none is possible, or one is NaN."""
    scores = scores.contiguous()
    (rows, vocab), device = scores.shape, scores.device
    tops, lengths = _kept.lend((rows, vocab), device, lambda: _make_work(rows, vocab, device))
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    take_highest(scores, tops, tokens, lengths, None)
    return tokens


def take_found(
    scores: torch.Tensor,
    tops: torch.Tensor,
    tokens: torch.Tensor,
    lengths: torch.Tensor,
    log: torch.Tensor | None = None,
) -> None:
    """`take_highest` of scores (rows, vocab) whose maximum per tile is known (rows, tiles)."""
    rows, vocab = scores.shape
    num_tiles = tops.shape[1]
    launch(
        _take_highest,
        (rows,),
        scores,
        tops,
        tokens,
        lengths,
        log if log is not None else tokens,
        vocab,
        num_tiles,
        len(log) if log is not None else 0,
        TILE=TILE,
        TILES=max(2, round_up(num_tiles)),
        num_warps=8,
        **launch_options(),
    )


def count_tiles(vocab: int) -> int:
    """The number of tiles that the logits are cut into."""
    return int(count_parts(vocab, TILE))

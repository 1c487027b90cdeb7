"""Guidance and DoLa at the end of a captured pass. The reference is `kernels/readings.py`, in torch.

A row of logits is cut into tiles, one per program. A row's totals (the sum of its exponentials, the layer that differs
most) are reduced by every program of the next kernel from the tiles' partial results: there are some thirty.
"""

from __future__ import annotations

import math
from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.arguments import round_up
from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.sampling.ends import PassEnd
from unspool.kernels.gpu.sampling.tokens import TILE, count_tiles, take_found
from unspool.kernels.readings import Contrast, Guide, ReadLogits
from unspool.kernels.sending import send

WARPS: Final = 8


@triton.jit
def _sum_tiles(LOGITS, PARTS, V, TILE: tl.constexpr, PDL: tl.constexpr):
    """Of every tile of every row: its highest logit, and the sum of exponentials relative to it."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tile * TILE + tl.arange(0, TILE)
    let_next_start(PDL)
    wait_for_input(PDL)
    logits = tl.load(LOGITS + row * V + at, mask=at < V, other=float("-inf"))
    highest = tl.max(logits, 0)
    base = tl.where(highest > float("-inf"), highest, 0.0)
    part = PARTS + (row * tl.num_programs(1) + tile) * 2
    tl.store(part, highest)
    tl.store(part + 1, tl.sum(tl.exp(logits - base), 0))


@triton.jit
def join_parts(PARTS, row, num_tiles, TILES: tl.constexpr):
    """A row's highest logit, and its log-sum-exp."""
    tiles = tl.arange(0, TILES)
    part = PARTS + (row * num_tiles + tiles) * 2
    highest = tl.load(part, mask=tiles < num_tiles, other=float("-inf"))
    sums = tl.load(part + 1, mask=tiles < num_tiles, other=0.0)
    top = tl.max(highest, 0)
    total = tl.sum(tl.where(sums == 0.0, 0.0, sums * tl.exp(highest - top)), 0)
    return top, top + tl.log(total)


@triton.jit
def _count_rows(LENGTHS, num_rows, ROWS: tl.constexpr):
    """The number of rows that are present."""
    rows = tl.arange(0, ROWS)
    lengths = tl.load(LENGTHS + rows, mask=rows < num_rows, other=-1)
    return tl.sum((lengths >= 0).to(tl.int32), 0)


@triton.jit
def _guide(
    LOGITS, PARTS, LENGTHS, SCORES, TOPS, SCALE, V, num_tiles,
    ROWS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tile * TILE + tl.arange(0, TILE)
    let_next_start(PDL)
    wait_for_input(PDL)
    scale = tl.load(SCALE)
    half = _count_rows(LENGTHS, tl.num_programs(0), ROWS) // 2
    top = float("-inf")
    if row < half:
        _, own_sum = join_parts(PARTS, row, num_tiles, TILES)
        _, other_sum = join_parts(PARTS, row + half, num_tiles, TILES)
        own = tl.load(LOGITS + row * V + at, mask=at < V, other=float("-inf")) - own_sum
        other = tl.load(LOGITS + (row + half) * V + at, mask=at < V, other=float("-inf")) - other_sum
        way = own - other
        scores = tl.where(tl.abs(scale) < 0.5, other + scale * way, own - way * (1.0 - scale))  # as torch.lerp
        scores = tl.where(at < V, scores, float("-inf"))
        tl.store(SCORES + row * V + at, scores, mask=at < V)
        top = tl.max(tl.where(scores == scores, scores, float("inf")), 0)
    tl.store(TOPS + row * num_tiles + tile, top)


@triton.jit
def _diverge(
    LOGITS, PARTS, DIVERGENCES, V, num_tiles,
    TILE: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The divergence of a layer's distribution from the last layer's, tile by tile."""
    row, tile, layer = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    num_rows = tl.num_programs(0)
    early = (1 + layer) * num_rows + row
    at = tile * TILE + tl.arange(0, TILE)
    let_next_start(PDL)
    wait_for_input(PDL)
    _, last_sum = join_parts(PARTS, row, num_tiles, TILES)
    _, early_sum = join_parts(PARTS, early, num_tiles, TILES)
    mature = tl.load(LOGITS + row * V + at, mask=at < V, other=0.0) - last_sum
    premature = tl.load(LOGITS + early * V + at, mask=at < V, other=0.0) - early_sum
    middle = (tl.exp(mature) + tl.exp(premature)) / 2
    own = tl.where(middle == 0.0, 0.0, middle * tl.log(middle))
    parts = tl.where(at < V, own - middle * (mature + premature) / 2, 0.0)
    tl.store(DIVERGENCES + (layer * num_rows + row) * num_tiles + tile, tl.sum(parts, 0))


@triton.jit
def _contrast(
    LOGITS, PARTS, DIVERGENCES, LENGTHS, SCORES, TOPS, CHOSEN, relative, V, num_tiles, num_layers,
    BY_ROW: tl.constexpr, ROWS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    num_rows = tl.num_programs(0)
    tiles = tl.arange(0, TILES)
    at = tile * TILE + tl.arange(0, TILE)
    let_next_start(PDL)
    wait_for_input(PDL)
    first, stop = row, row + 1
    if not BY_ROW:  # one layer for the batch: the mean over rows
        first, stop = row * 0, row * 0 + _count_rows(LENGTHS, num_rows, ROWS)
    farthest, chosen = float("-inf"), row * 0
    for layer in range(num_layers):
        total = 0.0
        for each in range(first, stop):
            place = DIVERGENCES + (layer * num_rows + each) * num_tiles + tiles
            total += tl.sum(tl.load(place, mask=tiles < num_tiles, other=0.0), 0)
        is_farther = total > farthest
        farthest = tl.where(is_farther, total, farthest)
        chosen = tl.where(is_farther, layer, chosen)
    early = (1 + chosen) * num_rows + row
    highest, last_sum = join_parts(PARTS, row, num_tiles, TILES)
    _, early_sum = join_parts(PARTS, early, num_tiles, TILES)
    mature = tl.load(LOGITS + row * V + at, mask=at < V, other=float("-inf")) - last_sum
    premature = tl.load(LOGITS + early * V + at, mask=at < V, other=0.0) - early_sum
    is_out = (mature < highest - last_sum + relative) | (at >= V)
    scores = tl.where(is_out, float("-inf"), mature - premature)
    tl.store(SCORES + row * V + at, scores, mask=at < V)
    tl.store(TOPS + row * num_tiles + tile, tl.max(tl.where(scores == scores, scores, float("inf")), 0))
    if tile == 0:
        tl.store(CHOSEN + row, chosen.to(tl.int64))


class CapturedReading:
    """Computes scores for the processors from a captured pass's logits, and the most likely token by them."""

    def __init__(self, reading: Guide | Contrast, rows: int, num_early: int, vocab: int, device: torch.device) -> None:
        self._reading, self._num_early = reading.key, num_early
        self._scale = torch.zeros(1, dtype=torch.float32, device=device)  # guidance's, an input of the graph
        self._held: float | None = None  # the value in `_scale`
        self.scores = torch.zeros(rows, vocab, dtype=torch.float32, device=device)
        self.chosen = torch.zeros(rows, dtype=torch.int64, device=device)  # indices of early layers
        num_tiles = count_tiles(vocab)
        self._parts = torch.zeros((1 + num_early) * rows, num_tiles, 2, dtype=torch.float32, device=device)
        self._divergences = torch.zeros(max(1, num_early), rows, num_tiles, dtype=torch.float32, device=device)
        self._tops = torch.zeros(rows, num_tiles, dtype=torch.float32, device=device)
        self._sizes = {"ROWS": max(2, round_up(rows)), "TILES": max(2, round_up(num_tiles))}
        self.set_inputs(reading)

    def holds(self, reading: Guide | Contrast) -> bool:  # noqa: ARG002 - the protocol's
        """Whether the inputs of the next pass are there: never, as its tokens are chosen elsewhere."""
        return False

    def set_inputs(self, reading: Guide | Contrast) -> None:
        """Set the inputs of the next pass, from a reading with the same key."""
        if isinstance(reading, Guide) and reading.scale != self._held:
            self._scale.copy_(send([reading.scale], self._scale.device, torch.float32))
            self._held = reading.scale

    def finish(self, end: PassEnd) -> None:
        """Read the logits of a pass of one token per row."""
        self.run(end.logits, end.likeliest, end.lengths)

    def take(self, rows: int) -> tuple[None, ReadLogits]:
        """The scores of the first `rows` rows of the pass."""
        if isinstance(self._reading, Guide):
            return None, ReadLogits(self.scores[: rows // 2].clone())
        return None, ReadLogits(self.scores[:rows].clone(), self.chosen[:rows].clone())

    def run(self, logits: torch.Tensor, tokens: torch.Tensor, lengths: torch.Tensor) -> None:
        """Read logits (rows * (1 + early layers), vocab): `scores`, `chosen`, and tokens (rows,).

        Lengths (rows,) are incremented for rows that are present.
        """
        rows, vocab = self.scores.shape
        num_tiles = self._tops.shape[1]
        options = {"TILE": TILE, "num_warps": WARPS, **launch_options()}
        tiles = {"TILES": self._sizes["TILES"]}
        launch(_sum_tiles, (logits.shape[0], num_tiles), logits, self._parts, vocab, **options)
        if isinstance(self._reading, Guide):
            launch(
                _guide,
                (rows, num_tiles),
                logits,
                self._parts,
                lengths,
                self.scores,
                self._tops,
                self._scale,
                vocab,
                num_tiles,
                **self._sizes,
                **options,
            )
        else:
            grid = (rows, num_tiles, self._num_early)
            launch(_diverge, grid, logits, self._parts, self._divergences, vocab, num_tiles, **tiles, **options)
            launch(
                _contrast,
                (rows, num_tiles),
                logits,
                self._parts,
                self._divergences,
                lengths,
                self.scores,
                self._tops,
                self.chosen,
                math.log(self._reading.relative_top),
                vocab,
                num_tiles,
                self._num_early,
                BY_ROW=self._reading.by_row,
                **self._sizes,
                **options,
            )
        take_found(self.scores, self._tops, tokens, lengths)

"""A sampling tail over whole rows: temperature, top-k, top-p, min-p, top-a, typical, epsilon, eta and the draw, without
a sort and without a top-k that leaves few candidates (`tail.py` is for those).

One kernel copies the scores, divided by the temperature, to where a graph reads them. In that graph every part finds
where it cuts (`nearest.py`, `cuts.py`); the kernel that cuts finds what the tiles of scores amount to afterwards, for
the next part or for the draw. The last part writes no scores: the draw cuts the one tile that it looks at again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.arguments import count_parts, lay_in_rows
from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.sampling.cuts import KINDS, find_floor
from unspool.kernels.gpu.sampling.held_input import HeldInput
from unspool.kernels.gpu.sampling.nearest import FACTS, NEAREST, NearestSearch
from unspool.kernels.gpu.sampling.nearest_kernels import is_beyond
from unspool.kernels.gpu.sampling.replays import KeptReplays, Replay, can_replay
from unspool.kernels.gpu.sampling.row_draw import choose_in_tile, choose_tile
from unspool.kernels.gpu.sampling.row_sums import SUMS, TILE, WARPS, ScoresCopy, count_joined, store_sums

PARTS: Final = ("top_k", "top_p", "min_p", "top_a", "typical", "epsilon", "eta")  # after the temperature, in this order
MOST_KEPT_SCORES: Final = 1 << 24  # of all rows: more are not copied into memory that is kept
_CUTS: Final = (*NEAREST, *KINDS)  # kinds as the kernels number them
_NUM_NEAREST: Final = tl.constexpr(len(NEAREST))


@triton.jit
def _cut_tile(
    scores, token, row, SUMS, VALUES, ROWS, CUTS, LASTS, num_tiles,
    KIND: tl.constexpr, NUM: tl.constexpr, FACTS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """The scores of a tile, minus infinity for those that a part of the tail cuts."""
    if KIND < _NUM_NEAREST:
        is_cut = is_beyond(scores, token, row, ROWS, CUTS, LASTS, KIND, FACTS)
    else:
        value = tl.load(VALUES + row)
        is_cut = scores < find_floor(SUMS, row, num_tiles, value, KIND - _NUM_NEAREST, NUM, TILES)
    return tl.where(is_cut, float("-inf"), scores)


@triton.jit
def _cut(
    SCORES, SUMS, VALUES, ROWS, CUTS, LASTS, AFTER, TOPS, WEIGHTS, V, num_tiles,
    KIND: tl.constexpr, IS_LAST: tl.constexpr, NUM: tl.constexpr, FACTS: tl.constexpr, TILE: tl.constexpr,
    TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Cut the scores where they are, and store what every tile amounts to then."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = tile * TILE + tl.arange(0, TILE)
    let_next_start(PDL)
    wait_for_input(PDL)
    scores = tl.load(SCORES + row * V + token, mask=token < V, other=float("-inf"))
    scores = _cut_tile(scores, token, row, SUMS, VALUES, ROWS, CUTS, LASTS, num_tiles, KIND, NUM, FACTS, TILES)
    place = row * num_tiles + tile
    if IS_LAST:
        # Exponentials of single precision: their sum's error lies far below a token's share. In the one tile that is
        # drawn from they are exact.
        scores = tl.where(scores == scores, scores, float("inf"))
        top = tl.max(scores, 0)
        shares = tl.where(scores > float("-inf"), tl.exp(scores - top), 0.0)
        tl.store(TOPS + place, top)
        tl.store(WEIGHTS + place, tl.sum(shares.to(tl.float64), 0))
    else:
        tl.store(SCORES + row * V + token, scores, mask=token < V)
        store_sums(AFTER + place * NUM, scores)


@triton.jit
def _draw(
    SCORES, SUMS, VALUES, ROWS, CUTS, LASTS, TOPS, WEIGHTS, UNIFORMS, OUT, V, num_tiles,
    KIND: tl.constexpr, NUM: tl.constexpr, FACTS: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Draw from what the last part leaves; its cut has not been written."""
    row = tl.program_id(0).to(tl.int64)
    tiles = tl.arange(0, TILES)
    let_next_start(PDL)
    wait_for_input(PDL)
    uniform = tl.load(UNIFORMS + row)
    tops = tl.load(TOPS + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
    weights = tl.load(WEIGHTS + row * num_tiles + tiles, mask=tiles < num_tiles, other=0.0)
    highest = tl.max(tops, 0)
    chosen = tl.full((), -1, tl.int64)
    if (highest > float("-inf")) & (highest < float("inf")):
        drawn, before, target = choose_tile(tops, weights, highest, uniform, TILES)
        token = drawn * TILE + tl.arange(0, TILE)
        scores = tl.load(SCORES + row * V + token, mask=token < V, other=float("-inf"))
        scores = _cut_tile(scores, token, row, SUMS, VALUES, ROWS, CUTS, LASTS, num_tiles, KIND, NUM, FACTS, TILES)
        found = choose_in_tile(scores, highest, before, target, TILE)
        chosen = (drawn * TILE + found).to(tl.int64)
    tl.store(OUT + row, chosen)


class WholeTail:
    """Draws by a tail of some parts, the temperature among them, for a number of rows and a vocabulary."""

    def __init__(self, rows: int, vocab: int, parts: tuple[str, ...], device: torch.device) -> None:
        self._rows, self._vocab, self._parts = rows, vocab, tuple(part for part in parts if part in PARTS)
        self._tiles = tiles = count_parts(vocab, TILE)
        self._copy = ScoresCopy(rows, vocab, device)
        self._temperature = HeldInput.of_rows(rows, torch.float32, device) if "temperature" in parts else None
        wanted = {part: torch.float64 if part in NEAREST else torch.float32 for part in self._parts}
        self._settings = {part: HeldInput.of_rows(rows, dtype, device) for part, dtype in wanted.items()}
        with torch.inference_mode(False):
            self._search = NearestSearch(rows, vocab, device)
            self._sums = torch.empty_like(self._copy.sums)
            self._tops = torch.empty(rows * tiles, dtype=torch.float32, device=device)
            self._weights = torch.empty(rows * tiles, dtype=torch.float64, device=device)
            self._tokens = torch.empty(rows, dtype=torch.int64, device=device)
        self._replay = Replay(self._launch)

    def set(self, settings: Mapping[str, torch.Tensor]) -> None:
        """Set what each part cuts by; see `draw_whole`."""
        if self._temperature is not None:
            self._temperature.give(settings["temperature"])
        for part in self._parts:
            self._settings[part].give(settings[part])

    def draw(self, scores: torch.Tensor, uniforms: torch.Tensor, *, as_graph: bool) -> torch.Tensor:
        """The tokens (rows,) of scores (rows, vocab), by what is set."""
        self._copy.take(scores, None if self._temperature is None else self._temperature.values, uniforms)
        if not as_graph:
            self._launch()
            return self._tokens
        self._replay.run()
        return self._tokens.clone()

    def _launch(self) -> None:
        before, after = self._copy.sums, self._sums
        for part in self._parts:
            if part in NEAREST:
                self._search.launch(self._copy.scores, before, self._settings[part].values, part)
            is_last = part == self._parts[-1]
            self._launch_cut(part, before, after, is_last=is_last)
            if not is_last:
                before, after = after, before
        self._launch_draw(self._parts[-1], before)

    def _launch_cut(self, part: str, before: torch.Tensor, after: torch.Tensor, *, is_last: bool) -> None:
        launch(
            _cut,
            (self._rows, self._tiles),
            self._copy.scores,
            before,
            self._settings[part].values,
            self._search.facts,
            self._search.cuts,
            self._search.lasts,
            after,
            self._tops,
            self._weights,
            self._vocab,
            self._tiles,
            KIND=_CUTS.index(part),
            IS_LAST=is_last,
            NUM=SUMS,
            FACTS=FACTS,
            TILE=TILE,
            TILES=count_joined(self._tiles),
            num_warps=WARPS,
            **launch_options(),
        )

    def _launch_draw(self, part: str, before: torch.Tensor) -> None:
        launch(
            _draw,
            (self._rows,),
            self._copy.scores,
            before,
            self._settings[part].values,
            self._search.facts,
            self._search.cuts,
            self._search.lasts,
            self._tops,
            self._weights,
            self._copy.uniforms,
            self._tokens,
            self._vocab,
            self._tiles,
            KIND=_CUTS.index(part),
            NUM=SUMS,
            FACTS=FACTS,
            TILE=TILE,
            TILES=count_joined(self._tiles),
            num_warps=WARPS,
            **launch_options(),
        )


_kept: Final = KeptReplays[WholeTail]()


def draw_whole(scores: torch.Tensor, uniforms: torch.Tensor, settings: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The tokens (rows,) drawn by uniforms (rows,) float64 from what a tail leaves of scores (rows, vocab) float32.

    `settings` are "temperature" and those of PARTS, (rows or 1, 1) each, at least one of the latter; as the processors'
    columns: logarithms of "min_p", "top_a", "epsilon" and "eta". -1 if there is no token: no score is finite, or one of
    them is NaN.
    """
    scores = lay_in_rows(scores)
    rows, vocab = scores.shape
    device = scores.device
    parts = tuple(part for part in ("temperature", *PARTS) if part in settings)
    as_graph = can_replay(device) and rows * vocab <= MOST_KEPT_SCORES
    tail = (
        _kept.take((rows, vocab, parts), device, lambda: WholeTail(rows, vocab, parts, device))
        if as_graph
        else WholeTail(rows, vocab, parts, device)
    )
    tail.set(settings)
    return tail.draw(scores, uniforms, as_graph=as_graph)

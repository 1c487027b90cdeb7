"""Processors that keep the scores nearest to one until they reach a probability or a number, without a sort: typical
sampling, top-p and top-k.

Where that is, is found by the weight within eight distances, then within eight more between two of these, then once
more (`weigh`). What lies between the two that are left is gathered (`gather`) and searched by one program per row
(`find`). If there are no slots for all of it, that program searches the whole row: slower, with the same result.
"""

from __future__ import annotations

from typing import Final

import torch

from unspool.kernels.gpu.arguments import count_parts, find_step, lay_in_rows
from unspool.kernels.gpu.launching import launch, launch_options
from unspool.kernels.gpu.sampling.held_input import HeldInput
from unspool.kernels.gpu.sampling.nearest_kernels import cut_far, find, gather, weigh
from unspool.kernels.gpu.sampling.replays import KeptReplays, Replay, can_replay
from unspool.kernels.gpu.sampling.row_sums import SUMS, TILE, WARPS, ScoresCopy, count_joined, sum_rows

LEVELS: Final = 3
STEPS: Final = 8  # distances whose weight is found at a level: as many as `nearest_kernels.weigh` puts side by side
FACTS: Final = 4 + 4 * (LEVELS + 1)  # numbers of a row that the kernels pass on
FAR: Final = 32.0  # the distances of the first level end here, but for the last
MOST_SLOTS: Final = 256  # scores that are gathered per tile
MOST_GATHERED: Final = 8_192  # and per row
LANES: Final = 128 * WARPS  # scores that the threads of a program load at once
MOST_EACH: Final = 16  # times that a program which weighs loads so many, where there are many tiles
MANY_TILES: Final = 1_024  # of all rows
STAGES: Final = 3  # of its loop
FIND_WARPS: Final = 8
CHUNK: Final = 4_096  # scores that the last program reads at once
NEAREST: Final = ("top_p", "typical", "top_k")
MOST_CAPTURED: Final = 16  # rows: with more the device takes longer than the host


class NearestSearch:
    """Finds where rows of scores are cut, for a number of rows and of tokens; `facts`, `cuts` and `lasts` have it."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        self._rows, self._vocab = rows, vocab
        self._tiles = tiles = count_parts(vocab, TILE)
        self._joined = count_joined(tiles)
        self._each = MOST_EACH if rows * tiles >= MANY_TILES else TILE // LANES
        self._groups = count_parts(vocab, self._each * LANES)
        self._slots = min(MOST_SLOTS, MOST_GATHERED // self._joined)
        sizes = [rows * tiles * STEPS, rows * tiles * STEPS, rows * tiles * self._slots, rows]
        floats = torch.empty(sum(sizes), dtype=torch.float32, device=device).split(sizes)
        self._masses, self._others, self._found, self.cuts = floats
        numbers = [rows * tiles, rows * tiles * self._slots, rows]
        self._counts, self._tokens, self.lasts = torch.empty(sum(numbers), dtype=torch.int32, device=device).split(
            numbers
        )
        self.facts = torch.empty(rows * FACTS, dtype=torch.float64, device=device)

    def launch(self, scores: torch.Tensor, sums: torch.Tensor, wanted: torch.Tensor, kind: str) -> None:
        """Search scores (rows, vocab) whose partial results are `sums`, for what is `wanted` (rows or 1, 1)."""
        vocab, stride, tiles = self._vocab, scores.stride(0), self._tiles
        options = launch_options()
        groups = self._groups
        wide = {"GROUPS": count_joined(groups), "num_warps": WARPS, **options}
        number, masses, others = NEAREST.index(kind), self._masses, self._others
        for level in range(LEVELS):
            launch(
                weigh,
                (self._rows, groups),
                scores,
                sums,
                wanted,
                self.facts,
                masses,
                others,
                vocab,
                stride,
                find_step(wanted),
                tiles,
                FAR,
                KIND=number,
                LEVEL=level,
                NUM=SUMS,
                FACTS=FACTS,
                STEPS=STEPS,
                LANES=LANES,
                EACH=self._each,
                STAGES=STAGES,
                TILES=self._joined,
                **wide,
            )
            masses, others = others, masses
        launch(
            gather,
            (self._rows, tiles),
            scores,
            self.facts,
            others,
            self._counts,
            self._found,
            self._tokens,
            vocab,
            stride,
            tiles,
            groups,
            KIND=number,
            LEVEL=LEVELS,
            FACTS=FACTS,
            STEPS=STEPS,
            SLOTS=self._slots,
            TILE=TILE,
            **wide,
        )
        launch(
            find,
            (self._rows,),
            scores,
            self._found,
            self._tokens,
            self._counts,
            self.facts,
            self.cuts,
            self.lasts,
            vocab,
            stride,
            tiles,
            KIND=number,
            LEVELS=LEVELS,
            FACTS=FACTS,
            SLOTS=self._slots,
            TILES=self._joined,
            CHUNK=CHUNK,
            num_warps=FIND_WARPS,
            **options,
        )

    def cut(self, scores: torch.Tensor, kind: str, filler: float) -> torch.Tensor:
        """The scores that were searched, with what is beyond the cut at `filler`."""
        rows, vocab = self._rows, self._vocab
        out = torch.empty(rows, vocab, dtype=scores.dtype, device=scores.device)
        launch(
            cut_far,
            (rows, self._tiles),
            scores,
            out,
            self.facts,
            self.cuts,
            self.lasts,
            vocab,
            scores.stride(0),
            filler,
            KIND=NEAREST.index(kind),
            FACTS=FACTS,
            TILE=TILE,
            num_warps=WARPS,
            **launch_options(),
        )
        return out


class _CapturedSearch:
    """A search for a few rows, for which the host takes longer to launch kernels than the device to run them."""

    def __init__(self, rows: int, vocab: int, kind: str, device: torch.device) -> None:
        self._kind = kind
        self._copy = ScoresCopy(rows, vocab, device)
        with torch.inference_mode(False):
            self._search = NearestSearch(rows, vocab, device)
        self._wanted = HeldInput.of_rows(rows, torch.float64, device)
        self._replay = Replay(self._launch)

    def _launch(self) -> None:
        self._search.launch(self._copy.scores, self._copy.sums, self._wanted.values, self._kind)

    def run(self, scores: torch.Tensor, wanted: torch.Tensor, filler: float) -> torch.Tensor:
        """`cut_beyond` of so many rows."""
        self._wanted.give(wanted)
        self._copy.take(scores)
        self._replay.run()
        return self._search.cut(self._copy.scores, self._kind, filler)


_captured: Final = KeptReplays[_CapturedSearch]()


def cut_beyond(scores: torch.Tensor, wanted: torch.Tensor, kind: str, filler: float) -> torch.Tensor:
    """The scores (rows, vocab) float32 with all but the nearest of each row at `filler`.

    Nearest are the highest, until they reach a probability ("top_p", of equals the first ones) or a number ("top_k",
    all equals, 0 for all scores); or those whose surprise is nearest to the entropy, until they reach a probability
    ("typical"). `wanted` is (rows or 1, 1); a row that does not reach it stays as it is.
    """
    scores = lay_in_rows(scores)
    rows, vocab = scores.shape
    device = scores.device
    if rows <= MOST_CAPTURED and can_replay(device):
        search = _captured.take((rows, vocab, kind), device, lambda: _CapturedSearch(rows, vocab, kind, device))
        return search.run(scores, wanted, filler)
    own = NearestSearch(rows, vocab, device)
    own.launch(scores, sum_rows(scores)[0], wanted, kind)
    return own.cut(scores, kind, filler)

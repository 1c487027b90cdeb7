"""The places of a ring, so that memory is bounded: position `p` lies at place `p % size`.

The first positions may be pinned (attention sinks): they keep their places, and the ring begins after them. A ring is
the geometry that all layers of one kind share, worked out once a pass; `stores.RingStore` moves the keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unspool.cache.span import Mask, Span
from unspool.errors import UnsupportedError


@dataclass(slots=True)
class RingMove:
    """Where one pass writes in a ring, and which of its tokens."""

    rows: torch.Tensor  # (rows, 1)
    places: torch.Tensor  # (rows, new)
    positions: torch.Tensor  # (rows, new)
    is_real: torch.Tensor  # (rows, new) bool
    is_kept: torch.Tensor  # (rows, new) bool: real ones that no later one of the pass writes over

    def select(self, index: torch.Tensor) -> RingMove:
        """The same for rows that were kept, repeated or reordered."""
        index = index.to(self.places.device)
        rows = torch.arange(len(index), device=index.device)[:, None]
        return RingMove(rows, self.places[index], self.positions[index], self.is_real[index], self.is_kept[index])


@dataclass(slots=True)
class Trial:
    """What it takes to undo passes: where they wrote since each row had its length then."""

    lengths: list[int]
    moves: list[RingMove]


class Ring:
    """Rings of `size` places a row, the first `num_pinned` of which are never written over."""

    def __init__(self, size: int, num_pinned: int = 0) -> None:
        self.size = size
        self.num_pinned = num_pinned
        self.reach = size - num_pinned  # how many of the last positions are kept
        self.held = 0  # places in use before the pass
        self.is_single = False  # one real token a row: rings are written first and read as they lie
        self.place: int | None = None  # where that token goes, when it is one place for all rows
        self._move: RingMove | None = None
        self._late: Span | None = None  # the pass whose move nobody has asked for yet
        self.trial: Trial | None = None

    def begin(self, span: Span) -> None:
        """Work out where the span's tokens go."""
        self.held = min(max(span.starts), self.size)
        self.is_single = span.num_new == 1 and all(span.counts)
        self._move = self._late = None
        self.place = self._place(span.starts[0]) if self.is_single and span.is_uniform else None
        if self.trial is not None:
            self._move = self._plan_move(span)
            self.trial.moves.append(self._move)
        elif self.place is None:
            self._late = span

    @property
    def move(self) -> RingMove | None:
        """Where the pass writes; None if that is one place for all rows. Passes by address never ask."""
        if self._late is not None:
            self._move, self._late = self._plan_move(self._late), None
        return self._move

    def _plan_move(self, span: Span) -> RingMove:
        positions, device = span.positions, span.positions.device
        counts = torch.tensor(span.counts, device=device)[:, None]
        ends = torch.tensor(span.starts, device=device)[:, None] + counts
        is_last = (positions >= ends - self.reach) | (positions < self.num_pinned)
        is_real = torch.arange(span.num_new, device=device) < counts
        places = (positions - self.num_pinned) % self.reach + self.num_pinned
        places = torch.where(positions < self.num_pinned, positions, places)
        rows = torch.arange(len(span.starts), device=device)[:, None]
        return RingMove(rows, places, positions, is_real, is_real & is_last)

    def _place(self, position: int) -> int:
        pinned = self.num_pinned
        return position if position < pinned else (position - pinned) % self.reach + pinned

    def key_positions(self, span: Span) -> torch.Tensor:
        """The position of every key in view, -1 where a place is still empty: (rows or 1, keys)."""
        device = span.positions.device
        starts = torch.tensor(span.starts[:1] if span.is_uniform else span.starts, device=device)[:, None]
        if self.is_single:
            return self._find_positions(starts, min(self.held + 1, self.size))
        new = span.positions[:1] if span.is_uniform else span.positions
        return torch.cat((self._find_positions(starts - 1, self.held), new), dim=1)

    def _find_positions(self, last: torch.Tensor, num_places: int) -> torch.Tensor:
        """The position at each place of rows whose `last` (rows, 1) position was written last."""
        place = torch.arange(num_places, device=last.device)
        is_pinned = place < self.num_pinned
        position = torch.where(is_pinned, place, last - (last - place) % self.reach)
        is_held = (position <= last) & (is_pinned | (position >= self.num_pinned))
        return position.masked_fill(~is_held, -1)

    def mask(self, span: Span, window: int | None) -> Mask:
        """What the span's queries may see among the ring's keys and, after them, the pass's own."""
        reach = self.reach if window is None else min(window, self.reach)
        if self.is_single and reach == self.reach and (span.is_uniform or min(span.starts) + 1 >= self.size):
            return None
        if not self.held and span.num_new <= reach + self.num_pinned:
            return "causal"
        keys = self.key_positions(span)[:, None, None, :]
        queries = (span.positions[:1] if span.is_uniform else span.positions)[:, None, :, None]
        is_near = (keys > queries - reach) | (keys < self.num_pinned)
        return (keys >= 0) & (keys <= queries) & is_near

    # --- going back ----------------------------------------------------------------------------------
    def check_truncation(self, held: Sequence[int], lengths: Sequence[int]) -> None:
        """Raise where a row is to go back to what was written over."""
        for row, (old, new) in enumerate(zip(held, lengths, strict=True)):
            is_tried = self.trial is not None and new >= self.trial.lengths[row]
            # What the last token wrote over is what no query after a roll back of one sees.
            if 0 < new < old - 1 and old > self.size and not is_tried:
                raise UnsupportedError(
                    f"row {row} can't roll back from {old} positions to {new}: a window of {self.size} wrote over what "
                    "it would need. Call begin_trial() before tokens that may have to go, or keep every key with "
                    "cache_implementation='dynamic'"
                )

    def select(self, index: torch.Tensor) -> None:
        """Let what a trial keeps follow its rows."""
        if self.trial is not None:
            rows = index.tolist()
            self.trial = Trial([self.trial.lengths[i] for i in rows], [move.select(index) for move in self.trial.moves])

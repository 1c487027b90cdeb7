"""Rings, so that memory is bounded: position `p` lies at place `p % size`.

The first positions may be pinned (attention sinks): they keep their places, and the ring begins after them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unspool.cache.places import Places
from unspool.cache.span import Mask, Span
from unspool.cache.stores.memory import Room, split
from unspool.cache.stores.plain import PlainStore
from unspool.errors import SettingError, UnsupportedError


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


class RingStore(PlainStore):
    """Rings of `room.positions` places per row, the first `num_pinned` of which are never written over."""

    def __init__(self, room: Room, num_pinned: int = 0) -> None:
        super().__init__(room)
        self.size = size = room.positions
        self.num_pinned = num_pinned
        self.reach = size - num_pinned  # how many of the last positions are kept
        self.held_places = 0  # in use before the pass
        self.is_single = False  # one real token a row: rings are written first and read as they lie
        self.place: int | None = None  # where that token goes, when it is one place for all rows
        self._move: RingMove | None = None
        self._late: Span | None = None  # the pass whose move no reader has asked for yet
        self.trial: Trial | None = None
        self.tried: list[list[tuple[torch.Tensor, torch.Tensor]]] = []  # what passes wrote over, and wrote, by layer

    @property
    def is_trying(self) -> bool:
        return self.trial is not None

    # --- a pass --------------------------------------------------------------------------------------
    def reserve(self, starts: Sequence[int], stops: Sequence[int], stop: int) -> None:
        """Nothing to do: any position finds a place."""

    def begin(self, span: Span) -> None:
        """Work out where the span's tokens go."""
        self.held_places = min(max(span.starts), self.size)
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

    def write(self, layer: int, span: Span, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        self._ensure_layer(layer, kv.shape[0], kv)
        buffer, move = self.rows_of(layer, kv.shape[0]), self.move
        if move is None:
            assert self.place is not None
            buffer.narrow(1, self.place, 1).copy_(kv)
            return split(buffer.narrow(1, 0, min(self.held_places + 1, self.size)))
        if self.trial is not None:
            self.tried += [[] for _ in range(len(self.tried), layer + 1)]
            self.tried[layer].append((buffer[move.rows, move.places], kv.clone()))
        if self.is_single:
            buffer.index_put_((move.rows, move.places), kv)
            return split(buffer.narrow(1, 0, min(self.held_places + 1, self.size)))
        # The pass sees its own tokens even where the ring has no place for all of them.
        seen = torch.cat((buffer.narrow(1, 0, self.held_places), kv), dim=1) if self.held_places else kv
        rows, column = move.is_kept.nonzero(as_tuple=True)
        buffer[rows, move.places[rows, column]] = kv[rows, column]
        return split(seen)

    def count_steps(self, lengths: Sequence[int]) -> int | None:
        """Until a ring writes over keys: what is taken too much must leave all others as they were."""
        return max(1, self.size - max(lengths, default=0))

    # --- what is in view -----------------------------------------------------------------------------
    def is_in_order(self, window: int | None) -> bool:  # a ring has its own
        return False

    def key_positions(self, span: Span, window: int | None = None) -> torch.Tensor:
        return self.find_positions(span).clamp(min=0)

    def find_positions(self, span: Span) -> torch.Tensor:
        """The position of every key in view, -1 if a place is still empty: (rows or 1, keys)."""
        device = span.positions.device
        starts = torch.tensor(span.starts[:1] if span.is_uniform else span.starts, device=device)[:, None]
        if self.is_single:
            return self._find_positions(starts, min(self.held_places + 1, self.size))
        new = span.positions[:1] if span.is_uniform else span.positions
        return torch.cat((self._find_positions(starts - 1, self.held_places), new), dim=1)

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
        if not self.held_places and span.num_new <= reach + self.num_pinned:
            return "causal"
        keys = self.find_positions(span)[:, None, None, :]
        queries = (span.positions[:1] if span.is_uniform else span.positions)[:, None, :, None]
        is_near = (keys > queries - reach) | (keys < self.num_pinned)
        return (keys >= 0) & (keys <= queries) & is_near

    # --- rows ----------------------------------------------------------------------------------------
    def begin_trial(self, lengths: Sequence[int]) -> None:
        self.trial, self.tried = Trial(list(lengths), []), []

    def check_truncation(self, held: Sequence[int], lengths: Sequence[int]) -> None:
        for row, (old, new) in enumerate(zip(held, lengths, strict=True)):
            is_tried = self.trial is not None and new >= self.trial.lengths[row]
            # What the last token wrote over is what no query after a roll back of one sees.
            if 0 < new < old - 1 and old > self.size and not is_tried:
                raise UnsupportedError(
                    f"row {row} can't roll back from {old} positions to {new}: a window of {self.size} wrote over what "
                    "it would need. Call begin_trial() before tokens that may have to go, or keep every key with "
                    "cache_implementation='dynamic'"
                )

    def truncate(self, lengths: Sequence[int]) -> None:
        """Undo what a trial wrote, the last first, and write again what stays below the given lengths."""
        if self.trial is None:
            return
        moves, self.trial = self.trial.moves, None
        for buffer, tried in zip(self.buffers, self.tried, strict=False):
            ends = torch.tensor(list(lengths), device=buffer.device)[:, None]
            for move, (old, _) in zip(reversed(moves), reversed(tried), strict=True):
                rows, column = move.is_kept.nonzero(as_tuple=True)
                buffer[rows, move.places[rows, column]] = old[rows, column]
            for move, (_, new) in zip(moves, tried, strict=True):
                is_last = (move.positions >= ends - self.reach) | (move.positions < self.num_pinned)
                rows, column = (move.is_real & (move.positions < ends) & is_last).nonzero(as_tuple=True)
                buffer[rows, move.places[rows, column]] = new[rows, column]
        self.tried = []

    def select(self, index: Sequence[int], lengths: Sequence[int]) -> None:
        super().select(index, [min(length, self.size) for length in lengths])
        if self.trial is not None:
            chosen = torch.tensor(list(index), dtype=torch.int64)
            self.trial = Trial(
                [self.trial.lengths[row] for row in index], [move.select(chosen) for move in self.trial.moves]
            )
            self.tried = [
                [(old[chosen.to(old.device)], new[chosen.to(new.device)]) for old, new in tried] for tried in self.tried
            ]

    def join(self, other: PlainStore, mine: Sequence[int], theirs: Sequence[int]) -> None:
        if other.room.positions != self.size:
            raise SettingError(
                f"rows of windows of {other.room.positions} positions can't join those of {self.size}; make both "
                "caches for the same model and the same number of positions"
            )
        super().join(other, mine, [min(length, self.size) for length in theirs])

    def clone(self) -> RingStore:
        made = super().clone()
        if self.trial is not None:
            made.trial = Trial(list(self.trial.lengths), list(self.trial.moves))
            made.tried = [list(tried) for tried in self.tried]
        return made

    def clear(self) -> None:
        super().clear()
        self.trial, self.tried = None, []

    def _like(self) -> RingStore:
        return type(self)(Room(self.size, self.room.rows, self.room.take), self.num_pinned)

    # --- memory --------------------------------------------------------------------------------------
    def places(self) -> Places | None:
        """None during a trial, which keeps what its passes write over."""
        return super().places() if self.trial is None else None

    def _make_places(self) -> Places:
        return Places(list(self.buffers), rooms=[buffer.shape[1] for buffer in self.buffers])

    def read(self, layer: int, rows: int, length: int) -> torch.Tensor:
        """What is kept of rows of one length, oldest first, then empty places."""
        buffer = self.rows_of(layer, rows)
        if length <= self.size:
            return buffer
        pinned, recent = buffer[:, : self.num_pinned], buffer[:, self.num_pinned :]
        return torch.cat((pinned, recent.roll(-((length - self.num_pinned) % self.reach), dims=1)), dim=1)

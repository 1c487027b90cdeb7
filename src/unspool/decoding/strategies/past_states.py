"""The final hidden states of every row's past, as directions: kept once, grown in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from unspool.kernels.sending import send

CHUNK = 256  # positions by which the buffer grows


class PastStates:
    """A unit vector for each position of each row, and how near new states come to them."""

    def __init__(self) -> None:
        self._units: torch.Tensor | None = None  # (rows, room, hidden) float32
        self._lengths: list[int] = []
        self._ends: torch.Tensor | None = None  # (rows,): the lengths again, if rows differ

    def read(self, states: torch.Tensor, starts: Sequence[int], counts: Sequence[int]) -> None:
        """Take each row's first `counts[row]` states of (rows, new, hidden) for its positions from `starts[row]` on."""
        rows, num_new, hidden = states.shape
        if self._units is None:
            self._lengths = [0] * rows
            self._units = torch.zeros(rows, 0, hidden, dtype=torch.float32, device=states.device)
        self._reserve(max(starts) + num_new)
        units = F.normalize(states.float(), dim=-1)
        if min(starts) == max(starts):
            self._units[:, starts[0] : starts[0] + num_new] = units
        else:
            # What a short row writes past its end is overwritten before anyone may read it.
            columns = torch.tensor(list(starts), device=states.device)[:, None] + torch.arange(
                num_new, device=states.device
            )
            self._units[torch.arange(rows, device=states.device)[:, None], columns] = units
        self._set_lengths([start + count for start, count in zip(starts, counts, strict=True)])

    def offer(self) -> torch.Tensor:
        """The directions (rows, room, hidden), with room for one more a row: a pass may write it after a row's last."""
        assert self._units is not None
        self._reserve(max(self._lengths) + 1)
        return self._units

    def take_over(self) -> None:
        """Count one more direction a row, which a pass has written into what was offered."""
        self._lengths = [length + 1 for length in self._lengths]
        if self._ends is not None:
            self._ends = self._ends + 1

    def append(self, states: torch.Tensor) -> None:
        """Take one state a row (rows, hidden) for the position that follows."""
        self.offer()
        assert self._units is not None
        units = F.normalize(states.float(), dim=-1)
        if self._ends is None:
            self._units[:, self._lengths[0]] = units
        else:
            self._units[torch.arange(len(units), device=units.device), self._ends] = units
        self.take_over()

    def drop(self, count: int) -> None:
        """Take each row's last `count` states away again."""
        self._lengths = [length - count for length in self._lengths]
        if self._ends is not None:
            self._ends = self._ends - count

    def find_likeness(self, states: torch.Tensor) -> torch.Tensor:
        """The highest cosine of each state (rows, candidates, hidden) and one of its row's past: (rows, candidates)."""
        assert self._units is not None
        held = self._units[:, : max(self._lengths)]
        cosines = torch.matmul(F.normalize(states.float(), dim=-1), held.transpose(1, 2))  # (rows, candidates, past)
        if self._ends is not None:
            column = torch.arange(held.shape[1], device=held.device)
            cosines = cosines.masked_fill(column >= self._ends[:, None, None], -torch.inf)
        return cosines.amax(dim=-1)

    def admit(self, others: Sequence[PastStates]) -> None:
        """Take in other rows, after these."""
        parts = [one._units for one in (self, *others) if one._units is not None]
        room = max(one.shape[1] for one in parts)
        self._units = torch.cat([F.pad(one, (0, 0, 0, room - one.shape[1])) for one in parts])
        self._set_lengths([length for one in (self, *others) for length in one._lengths])

    def select_rows(self, index: Sequence[int]) -> None:
        """Keep rows, or let them change places."""
        assert self._units is not None
        self._units = self._units[send(index, self._units.device)]
        self._set_lengths([self._lengths[row] for row in index])

    def _set_lengths(self, lengths: list[int]) -> None:
        assert self._units is not None
        self._lengths = lengths
        is_ragged = min(lengths) != max(lengths)
        self._ends = send(lengths, self._units.device) if is_ragged else None

    def _reserve(self, stop: int) -> None:
        assert self._units is not None
        room = self._units.shape[1]
        if stop > room:
            grown = -(-stop // CHUNK) * CHUNK
            self._units = F.pad(self._units, (0, 0, 0, grown - room))

"""Counter-based randomness: a number depends on the row's seed and the position, and on nothing else.

So the same request gives the same tokens alone or in a batch, and a row that is rolled back draws the same again.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unspool.kernels.sending import send
from unspool.kernels.splitmix import MASK, STEP, as_signed, mix, mix_tensor, shift

AHEAD = 256  # positions whose numbers are worked out at once


def derive_seed(seed: int, index: int) -> int:
    """The seed of the `index`-th row that shares one seed; index 0 keeps it."""
    return seed if index == 0 else mix(seed + index * STEP) >> 1


def draw_seed() -> int:
    """A fresh seed from torch's global generator, so that `torch.manual_seed` makes a call repeatable."""
    return int(torch.randint(0, 2**63 - 1, (), dtype=torch.int64))


def draw_uniform(seeds: torch.Tensor, positions: torch.Tensor, stream: int = 0) -> torch.Tensor:
    """Numbers in [0, 1), float64, one for each (seed, position) pair: SplitMix64 over both (Steele et al., 2014)."""
    state = mix_tensor(seeds + as_signed(STEP * (stream + 1) & MASK))
    state = mix_tensor(state + positions * as_signed(STEP))
    return (state >> 11).bitwise_and((1 << 53) - 1).to(torch.float64) * 2.0**-53


class Uniforms:
    """`draw_uniform`'s numbers, worked out for many positions ahead, so that a step takes them from a table.

    Rows that leave, are repeated or come in take their columns with them.
    """

    def __init__(self, stream: int = 0) -> None:
        self._stream = stream
        self._seeds: torch.Tensor | None = None
        self._first: list[int] = []
        self._table: torch.Tensor | None = None  # (positions ahead, rows)

    def take(self, seeds: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """The numbers (rows,) of each row's position."""
        if self._table is not None and self._seeds is seeds:
            ahead = positions[0] - self._first[0]
            if 0 <= ahead < len(self._table) and all(
                position - first == ahead for position, first in zip(positions, self._first, strict=True)
            ):
                return self._table[ahead]
        self._seeds, self._first = seeds, list(positions)
        first = send(self._first, seeds.device)
        ahead_of_it = torch.arange(AHEAD, device=seeds.device)[:, None]
        self._table = draw_uniform(seeds, first + ahead_of_it, self._stream)
        return self._table[0]

    def select(self, index: Sequence[int], chosen: torch.Tensor, seeds: torch.Tensor) -> None:
        """Follow rows that stay or are repeated; `chosen` is the index on their device, `seeds` are theirs now."""
        if self._table is not None:
            self._table = self._table.index_select(1, chosen)
            self._first = [self._first[row] for row in index]
            self._seeds = seeds

    def admit(self, others: Sequence[Uniforms], seeds: torch.Tensor, positions: Sequence[Sequence[int]]) -> None:
        """Take in the numbers of other sets of rows; `positions` are the next ones of these and of each, `seeds` are
        all rows'."""
        found = [one._take_ahead(own) for one, own in zip((self, *others), positions, strict=True)]
        tables = [one for one in found if one is not None]
        self._table = None
        if len(tables) == len(found):
            ahead = min(map(len, tables))
            self._table = torch.cat([one[:ahead].to(seeds.device) for one in tables], dim=1)
            self._first, self._seeds = [position for own in positions for position in own], seeds

    def _take_ahead(self, positions: Sequence[int]) -> torch.Tensor | None:
        """The numbers from these positions on, if the table has them."""
        if self._table is None:
            return None
        steps = {position - first for position, first in zip(positions, self._first, strict=True)}
        ahead = min(steps)
        return self._table[ahead:] if len(steps) == 1 and 0 <= ahead < len(self._table) else None


class Positions:
    """Rows' positions where they are drawn for, sent for many steps ahead."""

    def __init__(self) -> None:
        self._first: list[int] = []
        self._table: torch.Tensor | None = None  # (positions ahead, rows)

    def take(self, positions: Sequence[int], device: torch.device) -> torch.Tensor:
        """The positions (rows,) on a device."""
        table, first = self._table, self._first
        if table is not None and len(first) == len(positions):
            ahead = positions[0] - first[0]
            if 0 <= ahead < AHEAD and all(one - own == ahead for one, own in zip(positions, first, strict=True)):
                return table[ahead]
        self._first = list(positions)
        self._table = send(self._first, device) + torch.arange(AHEAD, device=device)[:, None]
        return self._table[0]


def draw_gumbel(seeds: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    """Gumbel noise (rows, count), float32: adding it to log-probabilities and taking the k highest draws k without
    replacement (Kool et al., 2019)."""
    place = torch.arange(count, device=seeds.device)
    state = mix_tensor(seeds + as_signed(STEP))
    state = mix_tensor(state + positions * as_signed(STEP))
    bits = shift(mix_tensor(state[:, None] + place * as_signed(STEP)), 11)
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-53  # in (0, 1)
    return -torch.log(-torch.log(uniform)).to(torch.float32)

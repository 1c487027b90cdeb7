"""Conversion between padded rows, as callers give them, and right-filled rows, as models read them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from unspool.errors import InputError, UnsupportedError


@dataclass(slots=True)
class Arrangement:
    """The columns of each row's real tokens in a caller's input."""

    counts: list[int] | None  # real tokens among the new columns, one count per row; None if all are real
    shifts: list[int]  # new columns before the first real one
    fronts: list[int]  # columns before the first real one, those of the past included
    num_columns: int  # past and new together

    def pack(self, columns: torch.Tensor) -> torch.Tensor:
        """Columns (rows, new, …) as right-filled rows; after a row's end some real column is repeated."""
        if self.counts is None:
            return columns
        rows, places = self._places(columns, -1)
        return columns[rows, places.clamp_(max=columns.shape[1] - 1)]

    def unpack(self, filled: torch.Tensor) -> torch.Tensor:
        """Right-filled rows (rows, new, …) as the caller's columns, with zeros for padding."""
        if self.counts is None:
            return filled
        rows, places = self._places(filled, 1)
        is_real = (places >= 0) & (places < torch.tensor(self.counts, device=filled.device)[:, None])
        found = filled[rows, places.clamp_(min=0)]
        return found * is_real.view(*is_real.shape, *[1] * (filled.dim() - 2))

    def unpack_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """Attention weights (rows, heads, new, keys) with the caller's columns for queries and for keys."""
        if self.counts is None:
            return weights
        by_query = self.unpack(weights.transpose(1, 2)).transpose(1, 2)
        columns = torch.arange(self.num_columns, device=weights.device)
        places = columns - torch.tensor(self.fronts, device=weights.device)[:, None]  # (rows, columns)
        is_key = (places >= 0) & (places < weights.shape[-1])
        index = places.clamp(0, weights.shape[-1] - 1)[:, None, None, :].expand(*by_query.shape[:3], -1)
        return by_query.gather(-1, index) * is_key[:, None, None, :]

    def check_positions(self, positions: torch.Tensor, held: list[int]) -> None:
        """Raise if the positions that a caller gave are not those that the mask implies."""
        rows, num_new = len(self.shifts), positions.shape[-1]
        given = positions.reshape(-1, num_new).expand(rows, -1).tolist()
        counts = self.counts or [num_new] * rows
        for row, (shift, count) in enumerate(zip(self.shifts, counts, strict=True)):
            expected = list(range(held[row], held[row] + count))
            if given[row][shift : shift + count] != expected:
                raise UnsupportedError(
                    f"position_ids of row {row} are {given[row]} and the mask makes them {expected}: a key's "
                    "index is its position here, so leave position_ids out"
                )

    def _places(self, like: torch.Tensor, sign: int) -> tuple[torch.Tensor, torch.Tensor]:
        rows = torch.arange(like.shape[0], device=like.device)[:, None]
        columns = torch.arange(like.shape[1], device=like.device)
        return rows, columns - sign * torch.tensor(self.shifts, device=like.device)[:, None]


def read_mask(mask: torch.Tensor | None, rows: int, num_new: int, held: list[int]) -> Arrangement:
    """The arrangement that an attention mask over (past and) new columns describes.

    `held` is the number of positions that the cache holds, one per row. The ones of a row must be contiguous.
    """
    if mask is None:
        return Arrangement(None, [0] * rows, [0] * rows, max(held, default=0) + num_new)
    if mask.dim() != 2 or mask.shape[0] != rows:
        raise UnsupportedError(
            f"an attention mask of shape {list(mask.shape)} can't be read: give one of shape "
            f"(rows, columns) for {rows} rows, with 1 for what is real"
        )
    num_past = mask.shape[1] - num_new
    if num_past < 0 or (num_past > 0 and not any(held)):
        raise InputError(
            f"the attention mask has {mask.shape[1]} columns for {num_new} new tokens and a cache that holds {held}"
        )
    shifts, fronts, counts = [], [], []
    for row, line in enumerate(mask.ne(0).tolist()):
        if num_past and sum(line[:num_past]) != held[row]:
            raise InputError(
                f"row {row} of the mask has {sum(line[:num_past])} past tokens where the cache holds {held[row]}"
            )
        count = sum(line[num_past:])
        shift = line[num_past:].index(True) if count else 0
        has_past = any(line[:num_past]) if num_past else held[row] > 0
        if not all(line[num_past + shift : num_past + shift + count]) or (has_past and count and shift):
            raise InputError(f"row {row} of the attention mask has a hole: its ones must be one run")
        counts.append(count)
        shifts.append(shift)
        fronts.append(line.index(True) if any(line) and num_past else shift)
    if all(count == num_new for count in counts) and len(set(fronts)) == 1 and not any(fronts):
        return Arrangement(None, shifts, fronts, mask.shape[1])
    return Arrangement(counts, shifts, fronts, mask.shape[1])

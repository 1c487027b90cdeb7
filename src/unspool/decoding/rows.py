"""The rows being decoded: their history, their lengths, and who they are."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from unspool.decoding.prompts import Prompts
from unspool.decoding.randomness import Uniforms, draw_uniform

CHUNK = 64  # columns by which the history's buffer grows
NUM_STREAMS = 2  # independent numbers for one position: the draw's, and the processors'; speculation has its own


class Rows:
    """Sequences being decoded. Position `p` of a row stands in column `p + offset` of its history."""

    def __init__(self, prompts: Prompts, pad_token_id: int) -> None:
        device = prompts.ids.device
        self.numbers = list(range(prompts.num_rows))  # which row of the call each one is
        self.lengths = list(prompts.lengths)  # positions, prompt and emitted
        self.offsets = [prompts.width - length for length in prompts.lengths]
        self.pad_token_id = pad_token_id
        self.seeds = torch.zeros(prompts.num_rows, dtype=torch.int64, device=device)
        self._table = prompts.ids  # (rows, columns); `_ids` has all of it
        self._late: list[list[int]] = []  # columns that nobody has asked for yet
        self._hides_padding = prompts.hides_padding
        self._columns: list[int] = []
        self._padding: torch.Tensor | None = None
        self._uniforms = {stream: Uniforms(stream) for stream in range(NUM_STREAMS)}

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def ends(self) -> list[int]:
        """Columns taken, a row each."""
        return [length + offset for length, offset in zip(self.lengths, self.offsets, strict=True)]

    def pads(self) -> list[int]:
        """Columns before each row's first position, as they stand in a left-padded batch."""
        first = min(0, *self.offsets)  # below zero where a prompt of embeddings has no columns
        return [offset - first for offset in self.offsets]

    def padding(self, width: int | None = None) -> torch.Tensor | None:
        """Columns of the history that hold padding and no token of a row: (rows,); None where they count as tokens.

        A history of another `width` is that of `history(width)`.
        """
        if not self._hides_padding:
            return None
        width = max(self.ends) if width is None else width
        columns = [max(0, width - length) for length in self.lengths]
        if not any(columns):
            return None
        if columns != self._columns or self._padding is None:  # kept: a copy to the device makes the host wait
            self._columns, self._padding = columns, torch.tensor(columns, device=self.device)
        return self._padding

    def history(self, width: int | None = None) -> torch.Tensor:
        """What processors and stops see: (rows, width), left-padded.

        Rows that took different numbers of tokens end in different columns. A row that ends in the column `width`
        stands where it belongs; one that is longer shows its first columns, so that no row sees a false token.
        """
        ends = self.ends
        width = max(ends) if width is None else width
        if min(ends) >= width:
            return self._ids[:, :width]
        shift = torch.tensor([max(0, width - end) for end in ends], device=self.device)[:, None]
        column = torch.arange(width, device=self.device) - shift
        return self._ids.gather(1, column.clamp(min=0)).masked_fill(column < 0, self.pad_token_id)

    def unread(self, held: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        """The tokens after the first `held` positions of each row, right-filled, and how many they are."""
        counts = [length - n for length, n in zip(self.lengths, held, strict=True)]
        num_new, ends = max(counts), self.ends
        if min(counts) == num_new and min(ends) == max(ends):
            return self._ids[:, ends[0] - num_new : ends[0]], counts
        first = torch.tensor([end - count for end, count in zip(ends, counts, strict=True)], device=self.device)
        column = first[:, None] + torch.arange(num_new, device=self.device)
        return self._ids.gather(1, column.clamp_(max=max(ends) - 1)), counts

    def append(self, tokens: torch.Tensor, counts: Sequence[int] | None = None) -> None:
        """Add each row's first `counts[row]` tokens of (rows, new); all of them without counts."""
        num_new = tokens.shape[1]
        self._enter_late()
        ends = self.ends
        room = self._table.shape[1]
        if max(ends) + num_new > room:
            grown = max(ends) + num_new + CHUNK
            self._table = torch.nn.functional.pad(self._table, (0, grown - room), value=self.pad_token_id)
        if min(ends) == max(ends):
            # Where no token could be chosen one that can be read stands in: the call ends when that is seen.
            torch.clamp(tokens, min=0, out=self._table[:, ends[0] : ends[0] + num_new])
        else:
            column = torch.tensor(ends, device=self.device)[:, None] + torch.arange(num_new, device=self.device)
            self._table.scatter_(1, column, tokens)
        added = counts if counts is not None else [num_new] * len(self)
        self.lengths = [length + count for length, count in zip(self.lengths, added, strict=True)]

    def append_late(self, tokens: list[int]) -> None:
        """Add a token to each row, on the host: it is entered into the history once somebody looks there."""
        self._late.append(tokens)
        self.lengths = [length + 1 for length in self.lengths]

    def _enter_late(self) -> None:
        if self._late:
            late, self._late = self._late, []
            self.lengths = [length - len(late) for length in self.lengths]
            self.append(torch.tensor(late, device=self.device).t())

    @property
    def _ids(self) -> torch.Tensor:
        self._enter_late()
        return self._table

    def drop(self, count: int) -> None:
        """Take each row's last `count` tokens away again."""
        self._enter_late()
        self.lengths = [length - count for length in self.lengths]

    def select(self, index: Sequence[int]) -> None:
        """Keep, repeat or reorder rows."""
        chosen = torch.tensor(list(index), dtype=torch.int64, device=self.device)
        self._table = self._ids.index_select(0, chosen)
        self.seeds = self.seeds.index_select(0, chosen)
        self.numbers = [self.numbers[i] for i in index]
        self.lengths = [self.lengths[i] for i in index]
        self.offsets = [self.offsets[i] for i in index]

    def reorder(self, index: Sequence[int]) -> None:
        """Let beams go on from others of their prompt: histories move, what belongs to the place stays."""
        self._table = self._ids[torch.tensor(list(index), device=self.device)]

    @property
    def device(self) -> torch.device:
        """Where the histories are."""
        return self._table.device

    def repeat(self, index: Sequence[int]) -> None:
        """Continue prompts more than once: each copy is a row of the call of its own."""
        self.select(index)
        self.numbers = list(range(len(index)))

    def uniforms(self, stream: int = 0) -> torch.Tensor:
        """A number in [0, 1) for each row's next token, by its seed and position: (rows,)."""
        return self._uniforms[stream].take(self.seeds, self.lengths)

    def uniforms_from(self, first: Sequence[int], num_positions: int, stream: int = 0) -> torch.Tensor:
        """A number in [0, 1) for each of the positions from `first[row]` on: (rows, positions)."""
        start = torch.tensor(list(first), device=self.device)[:, None]
        return draw_uniform(self.seeds[:, None], start + torch.arange(num_positions, device=self.device), stream)

    def rewind(self, lengths: Sequence[int]) -> None:
        """Take tokens back: rows get the given lengths, which are not above those they have."""
        assert all(new <= held for new, held in zip(lengths, self.lengths, strict=True))
        self._enter_late()
        self.lengths = list(lengths)

    def tokens_from(self, place: int, first: int) -> list[int]:
        """A row's tokens from a position on, where the row has them as ids."""
        end = self.lengths[place] + self.offsets[place]
        return self._ids[place, max(0, first + self.offsets[place]) : end].tolist()

    def last_tokens(self) -> list[int]:
        """Every row's last token."""
        if self._late:
            return self._late[-1]
        ends = self.ends
        if min(ends) == max(ends):
            return self._ids[:, ends[0] - 1].tolist()
        return [int(self._ids[place, end - 1]) for place, end in enumerate(ends)]

    def positions(self) -> torch.Tensor:
        """The position of each row's next token: (rows,)."""
        return torch.tensor(self.lengths, device=self.device)

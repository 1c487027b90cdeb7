"""The rows being decoded: their tokens, their lengths, and who they are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from unspool.decoding.host_history import HostHistory
from unspool.decoding.prompts import Prompts, fill_right
from unspool.decoding.randomness import Uniforms, draw_uniform
from unspool.decoding.token_table import CHUNK, LateColumn, Moved, MovedColumn, TokenTable, enter
from unspool.kernels.sending import Fetched, send
from unspool.protocols import TokenLog

NUM_STREAMS = 2  # independent numbers for one position: the draw's, and the processors'; speculation has its own


@dataclass(frozen=True, slots=True)
class Joining:
    """How sets of rows have come together: an entry for those that were there, and for each that was taken in."""

    counts: Sequence[int]  # their rows
    firsts: Sequence[int]  # the number that their row 0 has now
    shifts: Sequence[int]  # how many columns they have moved to the right


class Rows:
    """Sequences being decoded, without padding: position `p` of a row stands in column `p` of its line.

    What processors and stops see is a view: `history()` shows the rows side by side, left-padded as the caller's
    batch was, with position `p` of a row in column `p + offset`. It is made when somebody first looks, and kept.
    """

    def __init__(self, prompts: Prompts, pad_token_id: int) -> None:
        device = prompts.ids.device
        self.numbers = list(range(prompts.num_rows))  # which row of the call each one is
        self.lengths = list(prompts.lengths)  # positions, prompt and emitted
        # Columns before a row's first position; below zero if a prompt of embeddings has no columns.
        self.offsets = [prompts.width - length for length in prompts.lengths]
        self._num_hidden = prompts.num_hidden
        self.pad_token_id = pad_token_id
        self.padded: list[int] = []  # places of rows that have ended and stay: their next tokens are padding
        self.seeds = torch.zeros(prompts.num_rows, dtype=torch.int64, device=device)
        self._table = TokenTable(_unpad(prompts, self.offsets, pad_token_id), pad_token_id)
        self._given: torch.Tensor | None = prompts.ids if any(self.offsets) else None  # what the view begins with
        self._view: torch.Tensor | None = None  # (rows, room): the history, if it is not the table itself
        self._on_host = HostHistory()  # of rows on a device
        self.hides_padding = prompts.hides_padding
        self._columns: list[int] = []
        self._padding: torch.Tensor | None = None
        self._uniforms = {stream: Uniforms(stream) for stream in range(NUM_STREAMS)}
        # What each row got last, if the host was told; of the rows while their lengths are these very ones.
        self._last: tuple[list[int], list[list[int]]] | None = None

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def device(self) -> torch.device:
        """Where the tokens are."""
        return self._table.device

    # --- tokens --------------------------------------------------------------------------------------
    def unread(self, held: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        """The tokens after the first `held` positions of each row, right-filled, and how many they are."""
        lengths = self.lengths
        counts = [length - n for length, n in zip(lengths, held, strict=True)]
        num_new = max(counts)
        if num_new == 1 and self._table.num_late and min(counts) == 1:
            return self._table.read_late(-1), counts
        if min(counts) == num_new and min(lengths) == max(lengths):
            return self._tokens[:, lengths[0] - num_new : lengths[0]], counts
        if not any(held):
            return self._tokens[:, :num_new], counts
        column = send(held, self.device)[:, None] + torch.arange(num_new, device=self.device)
        return self._tokens.gather(1, column.clamp_(max=max(lengths) - 1)), counts

    def append(self, tokens: torch.Tensor, counts: Sequence[int] | None = None) -> None:
        """Add each row's first `counts[row]` tokens of (rows, new); all of them without counts."""
        num_new = tokens.shape[1]
        # If no token could be chosen one that can be read stands in: the call ends when that is seen.
        tokens = tokens.clamp(min=0)
        if self._view is not None:
            self._view = enter(self._view, tokens, self.ends, self.pad_token_id)
        if counts is None and num_new == 1:
            if self._table.num_late == CHUNK:
                self._table.enter_late(self.lengths)
            self._add_late(tokens)
            return
        self._table.write(tokens, self.lengths)
        added = counts if counts is not None else [num_new] * len(self)
        self.lengths = [length + count for length, count in zip(self.lengths, added, strict=True)]

    def append_logged(self, log: TokenLog) -> None:
        """Add the token that the last step of a log chose for each row, without a look at it."""
        self._table.wait_for_log(log, self.lengths)
        self._view = None  # made anew for whoever looks
        self.lengths = [length + 1 for length in self.lengths]

    def append_steps(self, tokens: torch.Tensor) -> None:
        """Add what several steps chose, (steps, rows)."""
        if self._view is not None or self._table.num_late + len(tokens) > CHUNK:
            self.append(tokens.t())
            return
        self._add_late(*tokens.clamp(min=0)[:, :, None].unbind())

    @property
    def newest(self) -> torch.Tensor | None:
        """The column (rows, 1) that was appended last; None if rows have moved since, or it is on the host."""
        return self._table.newest

    def append_late(self, tokens: list[int]) -> None:
        """Add a token to each row, on the host: it is sent once somebody looks at it."""
        if self._view is not None:
            self.append(send(tokens, self.device)[:, None])
            return
        self._add_late(tokens)

    def append_moved(self, moved: Moved) -> None:
        """Let every row go on from another one, and add a column; the host knows neither."""
        if self._view is not None:
            followed = self._view.index_select(0, moved.parents)
            self._view = enter(followed, moved.column, self.ends, self.pad_token_id)
        self._on_host.forget()
        self._add_late(MovedColumn(moved))

    def _add_late(self, *columns: LateColumn) -> None:
        self._table.wait(*columns)
        self.lengths = [length + len(columns) for length in self.lengths]

    @property
    def _tokens(self) -> torch.Tensor:
        return self._table.read(self.lengths)

    def tokens_from(self, place: int, first: int) -> list[int]:
        """A row's tokens from a position on, if the row has them as ids."""
        first = max(first, -self.offsets[place])  # positions of embeddings have none
        if self._last is not None and self._last[0] is self.lengths:
            num_new, last = self.lengths[place] - first, self._last[1][place]
            if num_new <= len(last):
                return last[len(last) - num_new :]
        return self._tokens[place, first : self.lengths[place]].tolist()

    def note_last(self, tokens: Sequence[Sequence[int]]) -> None:
        """Note what each row got last, which the host knows: nobody has to look for it on the device."""
        self._last = self.lengths, [list(own) for own in tokens]

    def last_tokens(self) -> list[int]:
        """Every row's last token."""
        late = self._table.newest_on_host
        if late is not None:
            return late
        held = [length - 1 for length in self.lengths]
        tokens: list[int] = self.unread(held)[0][:, 0].tolist()
        return tokens

    def drop(self, count: int) -> None:
        """Take each row's last `count` tokens away again; rows that moved after a column that still waits move back."""
        if self._view is None and self._table.take_back(count):
            self.lengths = [length - count for length in self.lengths]
            return
        self.rewind([length - count for length in self.lengths])

    def rewind(self, lengths: Sequence[int]) -> None:
        """Take tokens back: rows get the given lengths, which are not above those they have."""
        assert all(new <= held for new, held in zip(lengths, self.lengths, strict=True))
        self._table.enter_late(self.lengths)
        self.lengths = list(lengths)
        self._on_host.cut(min(self.ends))

    # --- what processors and stops see ---------------------------------------------------------------
    @property
    def ends(self) -> list[int]:
        """Columns taken in the history, one number per row."""
        return [length + offset for length, offset in zip(self.lengths, self.offsets, strict=True)]

    def pads(self) -> list[int]:
        """Columns before each row's first position, as they stand in a left-padded batch."""
        first = min(-self._num_hidden, *self.offsets)
        return [offset - first for offset in self.offsets]

    def padding(self, width: int | None = None) -> torch.Tensor | None:
        """Columns of the history that hold padding and no token of a row: (rows,); None if they count as tokens.

        A history of another `width` is that of `history(width)`.
        """
        if not self.hides_padding:
            return None
        width = max(self.ends) if width is None else width
        columns = [max(0, width - length) for length in self.lengths]
        if not any(columns):
            return None
        if columns != self._columns or self._padding is None:  # kept: a copy to the device makes the host wait
            self._columns, self._padding = columns, send(columns, self.device)
        return self._padding

    def history(self, width: int | None = None) -> torch.Tensor:
        """What processors and stops see: (rows, width), left-padded.

        Rows that took different numbers of tokens end in different columns. A row that ends in the column `width`
        stands where it belongs; one that is longer shows its first columns, so that no row sees a false token.
        """
        ends = self.ends
        width = max(ends) if width is None else width
        shown = self._show()
        if min(ends) >= width:
            return shown[:, :width]
        shift = send([max(0, width - end) for end in ends], self.device)[:, None]
        column = torch.arange(width, device=self.device) - shift
        return shown.gather(1, column.clamp(min=0)).masked_fill(column < 0, self.pad_token_id)

    @property
    def expects_last(self) -> bool:
        """Whether all of the rows' tokens but the last are on the host: `expect_last` makes a difference then."""
        return self._on_host.expects(max(self.ends))

    def expect_last(self, tokens: Fetched) -> None:
        """Note that the rows' last tokens (rows,) are on their way to the host."""
        self._on_host.expect(tokens, max(self.ends))

    def know_history(self, history: torch.Tensor) -> None:
        """Note the rows' history (rows, width), which is on the host already."""
        if self.device.type != "cpu":
            self._on_host.know(history)

    def fetch_history(self) -> None:
        """Begin to copy to the host what `read_history` will be asked for, before more work is launched."""
        if self.device.type != "cpu" and min(self.ends) == max(self.ends):
            self._on_host.begin(self.history())

    def read_history(self, width: int | None = None) -> torch.Tensor:
        """`history` on the host, to look at until the rows change; waits for nothing launched since it was fetched."""
        history = self.history(width)
        if self.device.type == "cpu":
            return history
        ends = self.ends
        return self._on_host.read(history) if min(ends) == max(ends) == history.shape[1] else history.cpu()

    def _show(self) -> torch.Tensor:
        """The rows at their columns: (rows, room)."""
        if not any(self.offsets):
            return self._tokens
        if self._view is None:
            tokens, width = self._tokens, max(self.ends)
            offsets = send(self.offsets, self.device)[:, None]
            column = torch.arange(width + CHUNK, device=self.device) - offsets
            view = tokens.gather(1, column.clamp(0, tokens.shape[1] - 1)).masked_fill(column < 0, self.pad_token_id)
            if self._given is not None:
                view[:, : self._given.shape[1]] = self._given  # padding as the caller wrote it
            self._view = view
        return self._view

    # --- rows leave, move and come in ----------------------------------------------------------------
    def select(self, index: Sequence[int]) -> None:
        """Keep, repeat or reorder rows."""
        chosen = send(index, self.device)
        self._move(index, chosen)
        self._given = None if self._given is None else self._given.index_select(0, chosen)
        self.seeds = self.seeds.index_select(0, chosen)
        self.numbers = [self.numbers[i] for i in index]
        self.lengths = [self.lengths[i] for i in index]
        self.offsets = [self.offsets[i] for i in index]
        for uniforms in self._uniforms.values():
            uniforms.select(index, chosen, self.seeds)

    def reorder(self, index: Sequence[int]) -> None:
        """Let beams go on from others of their prompt: tokens move, what belongs to the place stays."""
        self._move(index, send(index, self.device))

    def _move(self, index: Sequence[int], chosen: torch.Tensor) -> None:
        self._last = None
        self._on_host.select(index)
        self._table.select(chosen, self.lengths)
        if self._view is not None:
            self._view = self._view.index_select(0, chosen)

    def repeat(self, index: Sequence[int]) -> None:
        """Continue prompts more than once: each copy is a row of the call of its own."""
        self.select(index)
        self.numbers = list(range(len(index)))

    def admit(
        self, others: Sequence[Rows], firsts: Sequence[int] | None = None, *, is_ragged: bool = False
    ) -> list[int]:
        """Take in the rows of other sets, after these; what was row 0 of each has the number in `firsts` from now on,
        or they are numbered through. The others are used up.

        Returns how many columns to the right these rows and those of each other set stand from now on: all end in one
        column, but for `is_ragged` rows, which keep their own. All sets must hide their padding, or rows would see
        another number of padding columns than alone.
        """
        sets = [self, *others]
        if not all(one.hides_padding for one in sets):
            raise ValueError("rows whose padding counts as tokens can't stand beside others: hide it (hides_padding)")
        ends = [set(one.ends) for one in sets]
        if not is_ragged and any(len(own) > 1 for own in ends):
            raise ValueError(f"rows that end in the columns {sorted(set().union(*ends))} can't be joined")
        last = max(map(max, ends))
        shifts = [0 if is_ragged else last - max(own) for own in ends]
        tables = [one._tokens.to(self.device) for one in sets]
        room = max(table.shape[1] for table in tables)
        joined = torch.cat([F.pad(one, (0, room - one.shape[1]), value=self.pad_token_id) for one in tables])
        self._table = TokenTable(joined, self.pad_token_id)
        self._given = self._view = None
        self._join_on_host(others, is_ragged=is_ragged)
        self.offsets = [offset + shift for one, shift in zip(sets, shifts, strict=True) for offset in one.offsets]
        self.seeds = torch.cat([one.seeds.to(self.device) for one in sets])
        positions = [one.lengths for one in sets]
        for stream, uniforms in self._uniforms.items():
            uniforms.admit([one._uniforms[stream] for one in others], self.seeds, positions)
        self.lengths, self._last = [length for own in positions for length in own], None
        if firsts is None:
            self.numbers = list(range(len(self.lengths)))
        else:
            self.numbers = [
                first + number for one, first in zip(sets, (0, *firsts), strict=True) for number in one.numbers
            ]
        return shifts

    def _join_on_host(self, others: Sequence[Rows], *, is_ragged: bool) -> None:
        if is_ragged:
            self._on_host.forget()
            return
        end = max(self.ends)
        for other in others:
            own, end = end, max(end, *other.ends)
            ends = (own, max(other.ends))
            self._on_host.join(other._on_host, ends, (end - ends[0], end - ends[1]), self.pad_token_id)

    # --- randomness ----------------------------------------------------------------------------------
    def uniforms(self, stream: int = 0) -> torch.Tensor:
        """A number in [0, 1) for each row's next token, by its seed and position: (rows,)."""
        return self._uniforms[stream].take(self.seeds, self.lengths)

    def uniforms_from(self, first: Sequence[int], num_positions: int, stream: int = 0) -> torch.Tensor:
        """A number in [0, 1) for each of the positions from `first[row]` on: (rows, positions)."""
        start = send(first, self.device)[:, None]
        return draw_uniform(self.seeds[:, None], start + torch.arange(num_positions, device=self.device), stream)


def _unpad(prompts: Prompts, offsets: Sequence[int], pad_token_id: int) -> torch.Tensor:
    """The prompts' ids by position: (rows, longest); pad tokens stand where a prompt has embeddings alone."""
    if not prompts.width:
        return prompts.ids.new_full((prompts.num_rows, max(prompts.lengths)), pad_token_id)
    return fill_right(prompts.ids, offsets, prompts.lengths)

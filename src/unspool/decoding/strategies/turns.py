"""One token per row per turn: what greedy search, sampling and their kin have in common."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from unspool.cache import Cache
from unspool.decoding.finish import Finish, JoinedFinish
from unspool.decoding.loop import Emitted, Result
from unspool.decoding.reader import Reader
from unspool.decoding.record import Record, read_logprobs
from unspool.decoding.rows import Joining, Rows
from unspool.decoding.select import NO_TOKEN
from unspool.decoding.strategies.base import Strategy
from unspool.kernels.sending import fetch_once, send


def check_shared(record: Record, *, rows_may_leave: bool) -> None:
    """Raise if rows can't be stepped with those of other runs."""
    if record.keeps_steps or record.is_seen or not rows_may_leave:
        raise ValueError("rows of which something is kept step by step stay with their own call")


@dataclass(slots=True)
class TokenTurns:
    """Rows, a strategy that chooses their next tokens, and what ends them."""

    rows: Rows
    strategy: Strategy
    finish: Finish
    record: Record
    rows_may_leave: bool
    reasons: dict[int, str] = field(default_factory=dict)  # why rows of the call have ended
    num_numbers: int = 0  # that rows have had, once others have come in

    def is_done(self) -> bool:
        """Whether every row has ended."""
        return all(number in self.reasons for number in self.rows.numbers)

    @property
    def reads_choice(self) -> bool:
        """Whether a token has been read when it is emitted."""
        return self.strategy.reads_choice

    def result(self) -> Result:
        """Nothing but what was emitted."""
        return Result()

    def close(self) -> None:
        """Nothing is left undone."""

    def turn(self) -> Emitted:
        """Choose every row's next token, and see who is done."""
        rows = self.rows
        done = [number in self.reasons for number in rows.numbers]
        rows.padded = [place for place, is_done in enumerate(done) if is_done]
        choice = self.strategy.step(rows)
        tokens = choice.tokens
        if any(done):  # rows that stay although they are done go on as padding
            tokens = tokens.masked_fill(send(done, tokens.device, torch.bool)[:, None], rows.pad_token_id)
        new_tokens: list[list[int]] = fetch_once(tokens).read_list()
        for place, chosen in enumerate(new_tokens):
            if NO_TOKEN in chosen:
                raise self.strategy.explain_no_token(rows, place)
        rows.append(tokens)
        rows.note_last(new_tokens)
        emitted = Emitted({}, {})
        if self.record.num_top is not None:
            found = read_logprobs(choice.logits, tokens[:, -1], self.record.num_top)
            emitted.logprobs = {
                number: [found[place]] for place, number in enumerate(rows.numbers) if number not in self.reasons
            }
        return self._enter(new_tokens, emitted)

    def _enter(self, new_tokens: list[list[int]], emitted: Emitted) -> Emitted:
        """Enter what the rows just got, see who is done with it, and let them leave."""
        reasons = self.finish.explain_rows(self.rows, new_tokens, self.record.scores)
        for number, chosen, reason in zip(self.rows.numbers, new_tokens, reasons, strict=True):
            if number in self.reasons:
                continue  # it ended before, and goes on as padding
            emitted.tokens[number] = chosen
            if reason is not None:
                emitted.finished[number] = self.reasons[number] = reason
        if self.rows_may_leave and emitted.finished:
            self._let_leave()
        return emitted

    def _let_leave(self) -> None:
        staying = [place for place, number in enumerate(self.rows.numbers) if number not in self.reasons]
        if staying:
            self.finish.forget([number for number in self.rows.numbers if number in self.reasons])
            self.rows.select(staying)
            self.strategy.keep_rows(staying)
        else:
            self.rows.numbers = []

    # --- rows of several runs ----------------------------------------------------------------------------
    @property
    def reader(self) -> Reader:
        """What reads the rows."""
        return self.strategy.scorer.reader

    def share(self) -> None:
        """Rows of other runs may come from now on."""
        check_shared(self.record, rows_may_leave=self.rows_may_leave)

    def settle(self) -> None:
        """Leave nothing half done: rows are about to come or to go."""

    def admit(self, others: Sequence[TokenTurns], cache: Cache) -> list[int]:
        """Take in the rows of other turns at work, after these; `cache` holds the keys of all. The others are used up.

        Returns the number that row 0 of each has among these.
        """
        sets = [self, *others]
        for one in sets:
            one.share()
            one.settle()
        numbers = [list(one.rows.numbers) for one in sets]
        firsts = list(accumulate([one.count_numbers() for one in sets], initial=0))
        self.num_numbers = firsts.pop()
        shifts = self.rows.admit([one.rows for one in others], firsts[1:])
        joining = Joining([len(own) for own in numbers], firsts, shifts)
        self.strategy.admit([one.strategy for one in others], cache, joining)
        self.finish = JoinedFinish.of([one.finish for one in sets], numbers, joining)
        self.reasons.clear()  # of rows that have left
        return firsts[1:]

    def count_numbers(self) -> int:
        """How many numbers rows have had."""
        return max(self.num_numbers, *(number + 1 for number in (*self.rows.numbers, *self.reasons)))

    def find_places(self, numbers: Collection[int]) -> list[int]:
        """The rows of the cache that rows of these numbers have."""
        return self.reader.spread([place for place, number in enumerate(self.rows.numbers) if number in numbers])

    def drop(self, numbers: Collection[int]) -> None:
        """Let rows go before they have ended; not all that there are."""
        self.settle()
        self.reasons |= dict.fromkeys(numbers, "dropped")
        self._let_leave()

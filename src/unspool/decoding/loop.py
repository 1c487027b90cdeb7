"""The loop: every strategy, stream and result goes through it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from unspool.decoding.finish import Finish
from unspool.decoding.record import Record, read_logprobs
from unspool.decoding.rows import Rows
from unspool.decoding.strategy import Strategy
from unspool.errors import SettingError
from unspool.outputs import Stats, TokenLogprob


@dataclass(slots=True)
class Emitted:
    """What one step added to the call's rows."""

    tokens: dict[int, list[int]]  # by row of the call
    finished: dict[int, str]  # rows that are done with this step, and why
    logprobs: dict[int, list[TokenLogprob]] = field(default_factory=dict)


@dataclass(slots=True)
class Loop:
    """Rows, a strategy and what ends them. What it gathers is kept by row of the call."""

    rows: Rows
    strategy: Strategy
    finish: Finish
    record: Record
    stats: Stats
    rows_may_leave: bool
    emitted: list[list[int]]
    reasons: list[str | None]
    logprobs: list[list[TokenLogprob]]

    def run(self, started: float) -> Iterator[Emitted]:
        """Decode until every row is done; closing the iterator stops the work."""
        while any(self.reasons[number] is None for number in self.rows.numbers):
            with torch.no_grad():  # not around the yield: the caller's own grad mode is the caller's
                emitted = self._turn()
            self.stats.total_seconds = time.perf_counter() - started
            self.stats.first_token_seconds = self.stats.first_token_seconds or self.stats.total_seconds
            yield emitted

    def _turn(self) -> Emitted:
        rows = self.rows
        choice = self.strategy.step(rows)
        done = [self.reasons[number] is not None for number in rows.numbers]
        tokens = choice.tokens
        if any(done):  # rows that stay although they are done go on as padding
            tokens = tokens.masked_fill(torch.tensor(done, device=tokens.device)[:, None], rows.pad_token_id)
        rows.append(tokens)
        emitted = Emitted({}, {})
        new_tokens = tokens.tolist()
        _check_chosen(new_tokens, choice.logits.shape[-1], rows.numbers)
        if self.record.num_top is not None:
            told = read_logprobs(choice.logits, tokens[:, -1], self.record.num_top)
        for place, (number, reason) in enumerate(
            zip(rows.numbers, self.finish.check(rows, self.record.scores), strict=True)
        ):
            if done[place]:
                continue
            emitted.tokens[number] = new_tokens[place]
            self.emitted[number] += new_tokens[place]
            self.stats.new_tokens += len(new_tokens[place])
            if self.record.num_top is not None:
                emitted.logprobs[number] = [told[place]]
                self.logprobs[number].append(told[place])
            if reason is not None:
                emitted.finished[number] = self.reasons[number] = reason
        if self.rows_may_leave and emitted.finished:
            self._let_leave()
        return emitted

    def _let_leave(self) -> None:
        staying = [place for place, number in enumerate(self.rows.numbers) if self.reasons[number] is None]
        if staying:
            self.rows.select(staying)
            self.strategy.keep_rows(staying)
        else:
            self.rows.numbers = []


def _check_chosen(tokens: list[list[int]], vocab_size: int, numbers: list[int]) -> None:
    """Refuse the token past the vocabulary that a draw ends at where no token has a probability."""
    for number, chosen in zip(numbers, tokens, strict=True):
        if max(chosen) >= vocab_size:
            raise SettingError(
                f"row {number} has no token to choose from: its scores are NaN, or a logits processor set all of "
                "them to -inf; leave at least one token possible"
            )

"""Tokens that a device keeps in a log come to their rows as if each had been appended."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.decoding.prompts import Prompts
from unspool.decoding.rows import Rows


class Log:
    """A log of a few steps, which are overwritten."""

    most_logged = 6

    def __init__(self, num_rows: int) -> None:
        self.num_logged = 0
        self._lines = torch.zeros(self.most_logged, num_rows, dtype=torch.int64)

    def note(self, tokens: torch.Tensor) -> None:
        self._lines[self.num_logged % self.most_logged] = tokens
        self.num_logged += 1

    def read_log(self, last: int, count: int) -> torch.Tensor:
        assert self.num_logged - last + count <= self.most_logged
        return self._lines[[step % self.most_logged for step in range(last - count, last)]].t()


def make(lengths: list[int]) -> Rows:
    ids = torch.arange(len(lengths) * max(lengths)).view(len(lengths), -1) + 100
    return Rows(Prompts(ids, lengths, hides_padding=True), 0)


@settings(max_examples=60)
@given(st.data())
def test_any_steps_with_and_without_a_log(data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    logged, plain = make(lengths), make(lengths)
    log = Log(len(lengths))
    for number in range(1, data.draw(st.integers(2, 100))):
        tokens = number * 10 + torch.arange(len(plain))
        tokens[0] = -1 if number % 7 == 0 else tokens[0]  # no token could be chosen
        kind = data.draw(st.sampled_from(["logged"] * 9 + ["plain", "select", "look", "late look"]))
        if kind == "plain":
            logged.append(tokens[:, None])
        else:
            log.note(tokens)
            if kind == "late look":  # a step is taken before rows are looked at, and then counted
                assert logged.history().tolist() == plain.history().tolist()
            logged.append_logged(log)
        plain.append(tokens[:, None])
        assert logged.lengths == plain.lengths
        if kind == "look":
            assert logged.history().tolist() == plain.history().tolist()
        if kind == "select":
            index = data.draw(st.lists(st.integers(0, len(plain) - 1), min_size=1, max_size=4))
            logged.select(index)
            plain.select(index)
            log = Log(len(index))
    held = [length - 1 for length in plain.lengths]
    assert logged.unread(held)[0].tolist() == plain.unread(held)[0].tolist()
    assert logged.history().tolist() == plain.history().tolist()

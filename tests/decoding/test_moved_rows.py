"""Tokens of rows that go on from others, which only the device knows, come to their rows as if each had been told."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.decoding.beams.moves import MovedTokens
from unspool.decoding.prompts import Prompts
from unspool.decoding.rows import Rows
from unspool.kernels.beam_choice import BeamMemory, BeamSizes, ChosenBeams


def move(parents: torch.Tensor, column: torch.Tensor, *, is_read: bool) -> MovedTokens | ChosenBeams:
    """What a pass chose, which the host has read if `is_read`: then its memory may be another's by now."""
    if not is_read:
        return MovedTokens(parents, column)
    memory = BeamMemory(len(parents), BeamSizes(1, 2, 0, -1.0), torch.device("cpu"))
    parts = memory.find_parts(len(parents))
    parts.parents.copy_(parents)
    parts.column.copy_(column)
    chosen = ChosenBeams(memory, len(parents))
    chosen.read()
    memory.held.fill_(-7)
    memory.num_runs += 1
    return chosen


@settings(max_examples=60)
@given(st.data())
def test_any_moves(data: st.DataObject) -> None:
    num_rows = data.draw(st.integers(1, 5))
    ids = torch.arange(num_rows * 3).view(num_rows, 3)
    moved, plain = (Rows(Prompts(ids, [3] * num_rows, hides_padding=True), 0) for _ in range(2))
    for number in range(1, data.draw(st.integers(2, 90))):
        column = 100 * number + torch.arange(num_rows)[:, None]
        kind = data.draw(st.sampled_from(["moved"] * 6 + ["read"] * 3 + ["plain", "look", "drop"]))
        if kind == "plain":
            moved.append(column)
            plain.append(column)
        else:
            index = data.draw(st.lists(st.integers(0, num_rows - 1), min_size=num_rows, max_size=num_rows))
            moved.append_moved(move(torch.tensor(index), column, is_read=kind == "read"))
            if kind == "drop":
                moved.drop(1)
                continue
            plain.reorder(index)
            plain.append(column)
        assert moved.lengths == plain.lengths
        if kind == "look":
            assert moved.history().tolist() == plain.history().tolist()
    assert moved.history().tolist() == plain.history().tolist()

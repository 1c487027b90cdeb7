"""A history on the host: whatever happens to its rows, it is the device's."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.decoding.host_history import HostHistory
from unspool.kernels.sending import fetch

STEPS = st.lists(st.sampled_from(["append", "expect", "begin", "read", "select", "cut", "forget"]), max_size=40)


@settings(max_examples=60)
@given(steps=STEPS, data=st.data())
def test_it_is_the_history_after_any_steps(steps: list[str], data: st.DataObject) -> None:
    held, history = HostHistory(), torch.arange(6).view(3, 2)
    for number, step in enumerate(steps):
        rows, width = history.shape
        if step in ("append", "expect"):
            tokens = torch.arange(rows) + 100 * number
            history = torch.cat((history, tokens[:, None]), dim=1)
            if step == "expect":
                held.expect(fetch(tokens), width + 1)
        elif step == "begin":
            held.begin(history)
        elif step == "read":
            assert torch.equal(held.read(history), history)
        elif step == "select":
            index = data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=4))
            held.select(index)
            history = history[index]
        elif step == "cut":
            width = data.draw(st.integers(1, width))
            held.cut(width)
            history = history[:, :width]
        else:
            held.forget()
    assert torch.equal(held.read(history), history)


def test_what_stands_for_no_token_is_entered_as_the_rows_enter_it() -> None:
    held = HostHistory()
    held.expect(fetch(torch.tensor([-1, 4])), 1)
    assert held.read(torch.tensor([[0], [4]])).tolist() == [[0], [4]]


@settings(max_examples=60)
@given(widths=st.tuples(st.integers(1, 5), st.integers(1, 5)), late=st.tuples(st.integers(0, 2), st.integers(0, 2)))
def test_joined_rows_are_known_as_they_stand_side_by_side(widths: tuple[int, int], late: tuple[int, int]) -> None:
    sets, ends = [], []
    for number, (width, num_late) in enumerate(zip(widths, late, strict=True)):
        history, held = torch.arange(2 * width).view(2, width) + 100 * number, HostHistory()
        held.know(history)
        for place in range(num_late):
            tokens = torch.tensor([place, place + 1])
            history = torch.cat((history, tokens[:, None]), dim=1)
            held.expect(fetch(tokens), width + place + 1)
        sets.append((held, history))
        ends.append(width + num_late)
    (one, own), (two, others) = sets
    shifts = (max(ends) - ends[0], max(ends) - ends[1])
    one.join(two, (ends[0], ends[1]), shifts, 7)
    whole = torch.cat([F.pad(table, (shift, 0), value=7) for table, shift in ((own, shifts[0]), (others, shifts[1]))])
    one.expect(fetch(torch.arange(4)), max(ends) + 1)
    whole = torch.cat((whole, torch.arange(4)[:, None]), dim=1)
    stale = torch.full_like(whole, -5)  # nothing of it is fetched: all of it is known
    assert torch.equal(one.read(stale), whole)


def test_rows_that_are_not_known_to_the_end_are_fetched_after_joining() -> None:
    one, two = HostHistory(), HostHistory()
    one.know(torch.tensor([[1]]))
    two.know(torch.tensor([[5, 6]]))
    one.join(two, (2, 2), (0, 0), 0)  # a token came that nobody sent to the host
    assert one.read(torch.tensor([[1, 2], [5, 6]])).tolist() == [[1, 2], [5, 6]]

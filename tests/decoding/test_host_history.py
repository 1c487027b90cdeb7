"""A history on the host: whatever happens to its rows, it is the device's."""

from __future__ import annotations

import torch
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

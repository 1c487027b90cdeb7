"""Rows and positions of what a pass returned, wherever a model's hidden states have their streams."""

from __future__ import annotations

import pytest
import torch

from unspool.decoding.forwards import select_rows, take_first_rows, take_position
from unspool.protocols import Forward

ROWS, COLUMNS, STREAMS, WIDTH = 2, 3, 4, 5


def make_forward(state_rows: int) -> tuple[Forward, torch.Tensor]:
    """A pass over two rows, one layer of which has streams, and that layer as (rows, columns, streams, width)."""
    streams = torch.randn(ROWS, COLUMNS, STREAMS, WIDTH)
    shown = streams if state_rows == 0 else streams.permute(2, 0, 1, 3)
    plain = streams.sum(dim=2)
    return Forward(torch.randn(ROWS, 7), (shown, plain), state_rows=state_rows), streams


def put_in_order(state: torch.Tensor, state_rows: int) -> torch.Tensor:
    return state if state_rows == 0 else state.permute(1, 2, 0, 3)


@pytest.mark.parametrize("state_rows", [0, 1])
def test_rows_are_picked_in_their_dimension(state_rows: int) -> None:
    forward, streams = make_forward(state_rows)
    index = torch.tensor([1, 1, 0, 1])
    made = select_rows(forward, index)
    assert made.hidden_states is not None
    torch.testing.assert_close(put_in_order(made.hidden_states[0], state_rows), streams[index])
    torch.testing.assert_close(made.hidden_states[1], streams[index].sum(dim=2))
    torch.testing.assert_close(made.logits, forward.logits[index])


@pytest.mark.parametrize("state_rows", [0, 1])
def test_a_position_is_picked_in_its_dimension(state_rows: int) -> None:
    forward, streams = make_forward(state_rows)
    made = take_position(forward, 1, COLUMNS)
    assert made.hidden_states is not None
    torch.testing.assert_close(put_in_order(made.hidden_states[0], state_rows), streams[:, 1:2])
    torch.testing.assert_close(made.hidden_states[1], streams[:, 1:2].sum(dim=2))


@pytest.mark.parametrize("state_rows", [0, 1])
def test_the_first_rows_are_picked_in_their_dimension(state_rows: int) -> None:
    """Guidance returns the states of the prompts' own rows."""
    forward, streams = make_forward(state_rows)
    made = take_first_rows(forward, [0], [COLUMNS])
    assert made.hidden_states is not None
    torch.testing.assert_close(put_in_order(made.hidden_states[0], state_rows), streams[:1])
    torch.testing.assert_close(made.hidden_states[1], streams[:1].sum(dim=2))

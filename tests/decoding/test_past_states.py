"""The likeness of new states to a row's past, beside cosines taken one by one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from unspool.decoding.strategies.past_states import CHUNK, PastStates


def expect(past: list[torch.Tensor], states: torch.Tensor) -> list[list[float]]:
    return [
        [max(float(F.cosine_similarity(state.float(), other.float(), dim=0)) for other in row) for state in new]
        for row, new in zip(past, states, strict=True)
    ]


@pytest.mark.parametrize("lengths", [[4, 4, 4], [4, 1, 3], [CHUNK, CHUNK - 1, 7]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_cosines_one_by_one(lengths: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    states = (torch.randn(3, max(lengths), 6) * 5).to(dtype)
    past, rows = PastStates(), [states[row, :length] for row, length in enumerate(lengths)]
    past.read(states, [0, 0, 0], lengths)
    for _ in range(3):
        new = torch.randn(3, 2, 6).to(dtype)
        torch.testing.assert_close(past.find_likeness(new), torch.tensor(expect(rows, new)))
        past.append(new[:, 1])
        rows = [torch.cat((row, new[place, 1:])) for place, row in enumerate(rows)]
    past.select_rows([2, 0])
    rows = [rows[2], rows[0]]
    new = torch.randn(2, 4, 6)
    torch.testing.assert_close(past.find_likeness(new), torch.tensor(expect(rows, new)))


def test_a_prompt_in_pieces() -> None:
    """Pieces of ragged rows, the last of them at each row's own end."""
    torch.manual_seed(2)
    states, lengths = torch.randn(2, 5, 6), [5, 3]
    whole, pieces = PastStates(), PastStates()
    whole.read(states, [0, 0], lengths)
    pieces.read(states[:, :3], [0, 0], [3, 2])
    pieces.read(torch.stack((states[0, 3:], states[1, 2:4])), [3, 2], [2, 1])
    new = torch.randn(2, 3, 6)
    assert torch.equal(whole.find_likeness(new), pieces.find_likeness(new))


def test_a_state_of_nothing_is_like_nothing() -> None:
    past = PastStates()
    past.read(torch.zeros(1, 2, 4), [0], [2])
    assert past.find_likeness(torch.ones(1, 1, 4)).tolist() == [[0.0]]

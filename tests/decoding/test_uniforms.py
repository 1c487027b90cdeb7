"""Numbers worked out ahead are the numbers of their positions."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.decoding.randomness import AHEAD, Uniforms, draw_uniform


@settings(max_examples=50)
@given(
    stream=st.integers(0, 1),
    starts=st.lists(st.integers(0, 200), min_size=3, max_size=3),
    moves=st.lists(st.sampled_from([1, 1, 1, 5, -3, AHEAD, "one row"]), max_size=30),
)
def test_taken_numbers_are_drawn_ones(stream: int, starts: list[int], moves: list[int | str]) -> None:
    seeds, ahead, positions = torch.tensor([5, 6, 2**62]), Uniforms(stream), list(starts)
    for move in moves:
        found = ahead.take(seeds, positions)
        assert torch.equal(found, draw_uniform(seeds, torch.tensor(positions), stream))
        steps = [1, 0, 0] if move == "one row" else [move] * 3
        positions = [max(0, position + step) for position, step in zip(positions, steps, strict=True)]
    fewer = seeds[1:]
    assert torch.equal(ahead.take(fewer, positions[1:]), draw_uniform(fewer, torch.tensor(positions[1:]), stream))

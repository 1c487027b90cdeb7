"""Rows whose tokens are chosen in the same way, among those of others."""

from __future__ import annotations

import pytest
import torch

from unspool.decoding.prompts import Prompts
from unspool.decoding.rows import Rows
from unspool.engine.chains import Chain, Step
from unspool.logits import LogitsProcessorList


def make_step(num_rows: int) -> Step:
    logits = torch.randn(num_rows, 9, generator=torch.Generator().manual_seed(num_rows))
    rows = Rows(Prompts(torch.ones(num_rows, 2, dtype=torch.int64), [2] * num_rows), 0)
    return Step(rows, logits, logits.argmax(-1))


def test_all_rows_of_a_greedy_step_get_the_very_tensor_that_the_pass_found() -> None:
    step = make_step(4)
    assert Chain(LogitsProcessorList(), False, range(4), 0).choose(step) is step.likeliest


@pytest.mark.parametrize("places", [[0, 1], [1, 2, 3], [3, 0]])
def test_some_rows_get_their_own(places: list[int]) -> None:
    step = make_step(4)
    assert step.likeliest is not None
    chosen = Chain(LogitsProcessorList(), False, places, 0).choose(step)
    assert chosen.tolist() == step.likeliest[places].tolist()

"""Rows whose tokens are chosen in the same way, among those of others."""

from __future__ import annotations

import pytest
import torch

from tests.engine.fakes import make_lm
from unspool.decoding.prompts import Prompts
from unspool.decoding.rows import Rows
from unspool.engine.chains import Chain, Step
from unspool.engine.passes import _divide
from unspool.engine.plain import PlainRows
from unspool.logits import LogitsProcessorList
from unspool.protocols import Forward


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


@pytest.mark.parametrize("parts", [[[0, 1, 2]], [[0, 1], [2]], [[2, 4], [0], [3, 1]]])
def test_tokens_of_chains_are_put_in_the_order_of_the_rows(parts: list[list[int]]) -> None:
    rows = PlainRows(make_lm().model, None, None)
    for number in (10, 20):  # the second time the order is known
        found = [(places, torch.tensor([number + place for place in places])) for places in parts]
        count = sum(map(len, parts))
        assert rows._put_in_order(found).tolist() == [number + place for place in range(count)]


def test_an_answer_is_divided_among_those_who_asked() -> None:
    shapes = [(2, 3), (1, 1), (3, 2)]
    logits, states = torch.randn(6, 3, 5), torch.randn(6, 3, 4)
    early = (torch.randn(6, 5), torch.randn(6, 5))
    whole = Forward(logits, last_states=states, early_logits=early, likeliest=logits.argmax(-1), path="captured")
    first = 0
    for (rows, num_new), part in zip(shapes, _divide(whole, shapes), strict=True):
        own = slice(first, first + rows)
        first += rows
        assert torch.equal(part.logits, logits[own, :num_new]) and part.path == "captured"
        assert part.likeliest is not None and torch.equal(part.likeliest, logits.argmax(-1)[own, :num_new])
        assert part.last_states is not None and torch.equal(part.last_states, states[own, :num_new])
        assert part.early_logits is not None
        assert all(torch.equal(one, two[own]) for one, two in zip(part.early_logits, early, strict=True))
    last = Forward(logits[:, 0])
    assert [part.logits.shape[0] for part in _divide(last, [(4, 1), (2, 1)])] == [4, 2]

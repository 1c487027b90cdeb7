"""Rows whose tokens are chosen in the same way, among those of others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.engine.fakes import make_engine, make_lm
from unspool.decoding.prompts import Prompts
from unspool.decoding.rows import Rows
from unspool.engine.chains import Chain, Step
from unspool.engine.passes import _divide
from unspool.engine.plain import PlainRows
from unspool.logits import LogitsProcessorList, TemperatureLogitsWarper
from unspool.protocols import Forward


def make_step(num_rows: int) -> Step:
    logits = torch.randn(num_rows, 9, generator=torch.Generator().manual_seed(num_rows))
    rows = Rows(Prompts(torch.ones(num_rows, 2, dtype=torch.int64), [2] * num_rows), 0)
    return Step(rows, [logits], logits.argmax(-1))


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


def test_logits_of_a_greedy_step_are_not_put_together() -> None:
    parts = [torch.randn(3, 9), torch.randn(1, 9)]
    whole = torch.cat(parts)
    rows = Rows(Prompts(torch.ones(4, 2, dtype=torch.int64), [2] * 4), 0)
    step = Step(rows, parts, whole.argmax(-1))
    assert Chain(LogitsProcessorList(), False, range(4), 0).choose(step) is step.likeliest
    assert step._logits is None
    assert torch.equal(step.logits, whole)


@given(st.permutations(range(5)), st.integers(1, 4))
def test_rows_that_stay_are_put_in_order_with_their_settings(places: list[int], num_staying: int) -> None:
    """The last rows take the places of those that leave: what a chain of all rows picks is still the pass's own."""
    step = make_step(num_staying)
    temperatures = torch.arange(1.0, 6.0)
    warper = TemperatureLogitsWarper(temperatures[list(places)])
    processors = LogitsProcessorList([warper])
    chain = Chain(processors, False, places, 0)
    staying = dict(zip(places[:num_staying], reversed(range(num_staying)), strict=True))  # from a place to another
    assert chain.keep(staying)
    assert chain.places == list(range(num_staying)) and chain.is_whole(num_staying)
    for old, new in staying.items():
        expected = step.logits[new] / temperatures[old]
        assert torch.equal(chain.score(step)[new], expected)


def test_passes_over_greedy_rows_stay_brief_when_rows_come_and_go() -> None:
    lm = make_lm()
    wants: list[tuple[int, bool]] = []
    forward = lm.model.forward

    def note(tokens: torch.Tensor, *args: Any, **named: Any) -> Forward:
        wants.append((tokens.shape[0], named["want"].is_brief))
        return forward(tokens, *args, **named)

    lm.model.forward = note  # type: ignore[method-assign]
    with make_engine(lm, max_rows=4) as engine:
        lengths = [3, 9, 5, 7, 4, 6, 8]
        asked = [engine.submit([5 + n, 6], max_new_tokens=n, eos_token_id=None) for n in lengths]
        assert [len(request.result().token_ids[0]) for request in asked] == lengths
        greedy, wants = wants, []
        drawn = [engine.submit([5, 6], max_new_tokens=n, eos_token_id=None, do_sample=True) for n in lengths]
        assert [len(request.result().token_ids[0]) for request in drawn] == lengths
    first = next(place for place, (_, is_brief) in enumerate(greedy) if is_brief)
    assert first <= 2 and all(is_brief for _, is_brief in greedy[first:])
    assert not any(is_brief for _, is_brief in wants)

"""The fused end of a chain beside the plain chain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from unspool import (
    EpsilonLogitsWarper,
    EtaLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopALogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)
from unspool.decoding.select import draw
from unspool.decoding.tails import draw_from_tail
from unspool.logits.fused import split_tail

INF = float("inf")
IDS = torch.tensor([[1, 2, 3]] * 4)


def chain(temperature: Any = None, top_k: Any = None, top_p: Any = None, min_p: Any = None) -> LogitsProcessorList:
    kinds = (
        (TemperatureLogitsWarper, temperature),
        (TopKLogitsWarper, top_k),
        (TopPLogitsWarper, top_p),
        (MinPLogitsWarper, min_p),
    )
    return LogitsProcessorList(kind(value) for kind, value in kinds if value is not None)


@settings(max_examples=60)
@example(45005750, 20_000, True, None, 1, [0.2, 1.0, 0.5, 0.99], None)  # two tie, and half of them is asked for
@given(
    seed=st.integers(0, 2**31),
    vocab=st.sampled_from([60, 300, 20_000]),
    coarse=st.booleans(),
    temperature=st.sampled_from([None, 0.3, 1.7, [0.5, 1.0, 2.0, 0.9]]),
    top_k=st.sampled_from([1, 5, 50, [3, 1, 50, 7]]),
    top_p=st.sampled_from([None, 0.0, 0.4, 0.9, [0.2, 1.0, 0.5, 0.99]]),
    min_p=st.sampled_from([None, 0.05, [0.0, 0.1, 0.9, 0.01]]),
)
def test_candidates_are_what_the_plain_chain_leaves(
    seed: int, vocab: int, coarse: bool, temperature: Any, top_k: Any, top_p: Any, min_p: Any
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(4, vocab, generator=generator) * 3
    if coarse:  # as bfloat16 leaves them: many tie
        scores = scores.bfloat16().float()
    processors = chain(temperature, top_k, top_p, min_p)
    head, tail = split_tail(processors)
    assert tail is not None
    assert head == []
    expected = processors(IDS, scores)
    found = tail.find_candidates(scores)
    if found is None:
        assert coarse  # too many ties for the fused way
        return
    tokens, values = found
    assert bool((tokens.diff(dim=-1) > 0).all())
    rebuilt = torch.full_like(scores, -INF).scatter(1, tokens, values)
    assert torch.equal(rebuilt, expected)
    uniforms = torch.rand(4, generator=generator, dtype=torch.float64)
    place = draw(values, uniforms)
    assert torch.equal(tokens.gather(1, place[:, None])[:, 0], draw(expected, uniforms))
    index = torch.tensor([2, 0])
    chosen = tail.select_rows(index).find_candidates(scores[index])
    assert chosen is not None
    assert torch.equal(torch.full((2, vocab), -INF).scatter(1, *chosen), expected[index])


@settings(max_examples=80)
@given(
    seed=st.integers(0, 2**31),
    vocab=st.sampled_from([1, 7, 60, 300, 5_000, 20_000]),
    coarse=st.booleans(),
    spread=st.sampled_from([0.1, 3.0, 12.0]),
    num_left_out=st.sampled_from([0, 3, 250]),
    temperature=st.sampled_from([None, 0.3, 1.7, [0.5, 1.0, 2.0, 0.9]]),
    top_k=st.sampled_from([None, 1, 5, 50, 3_000, [3, 0, 50, 700]]),
    top_p=st.sampled_from([None, 0.0, 0.4, 0.9, 0.99999, [0.2, 1.0, 0.5, 0.99]]),
    min_p=st.sampled_from([None, 0.05, [0.0, 0.1, 0.9, 0.01]]),
)
def test_a_tail_draws_what_the_plain_chain_draws(
    seed: int,
    vocab: int,
    coarse: bool,
    spread: float,
    num_left_out: int,
    temperature: Any,
    top_k: Any,
    top_p: Any,
    min_p: Any,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(4, vocab, generator=generator) * spread
    if coarse:
        scores = scores.bfloat16().float()
    scores[:2, : min(num_left_out, vocab - 1)] = -INF
    processors = chain(temperature, top_k, top_p, min_p)
    head, tail = split_tail(processors)
    assert head == []
    uniforms = torch.rand(4, generator=generator, dtype=torch.float64)
    tokens = draw(scores, uniforms) if tail is None else draw_from_tail(tail, scores, uniforms)
    probabilities = processors(IDS, scores).softmax(dim=-1, dtype=torch.float64)
    after = probabilities.cumsum(dim=-1).gather(1, tokens[:, None])[:, 0]
    before = after - probabilities.gather(1, tokens[:, None])[:, 0]
    assert bool((after > before).all())  # each is among those that are left
    assert bool((before <= uniforms + 1e-6).all() and (after >= uniforms - 1e-6).all())


def test_too_many_ties_are_left_to_the_plain_chain() -> None:
    scores = torch.zeros(1, 500)
    _, tail = split_tail(chain(top_k=5))
    assert tail is not None
    assert tail.find_candidates(scores) is None
    scores[0, 30:] = -1.0
    found = tail.find_candidates(scores)
    assert found is not None
    assert int((found[1] > -INF).sum()) == 30  # all that tie with the fifth


def test_only_a_known_end_is_fused() -> None:
    penalty, typical = RepetitionPenaltyLogitsProcessor(1.2), TypicalLogitsWarper(0.5)
    known = chain(0.7, 50, 0.9)
    head, tail = split_tail(LogitsProcessorList([penalty, *known]))
    assert head == [penalty]
    assert tail is not None
    assert (tail.temperature, tail.top_k, tail.top_p) == tuple(known)
    for processors in (
        LogitsProcessorList(),
        LogitsProcessorList([penalty]),
        LogitsProcessorList([*known, TypicalLogitsWarper(0.5, min_tokens_to_keep=2)]),
        LogitsProcessorList([*known, penalty]),
        LogitsProcessorList([TopKLogitsWarper(5, filter_value=-9.0)]),
    ):
        assert split_tail(processors) == (processors, None)
    for processors in (chain(temperature=0.7), chain(0.7, None, 0.9), chain(top_k=[0, 5]), chain(top_k=5000)):
        head, tail = split_tail(processors)
        assert head == [] and tail is not None
        assert not tail.can_be_ranked  # the plain chain, or the library, draws from what it leaves
    head, tail = split_tail(LogitsProcessorList([TopPLogitsWarper(0.5), typical, TemperatureLogitsWarper(0.5)]))
    assert (len(head), tail is not None and tail.top_p is None) == (2, True)
    head, tail = split_tail(LogitsProcessorList([TopPLogitsWarper(0.5), TopKLogitsWarper(5)]))
    assert (len(head), tail is not None and tail.top_p is None) == (1, True)


def test_cuts_after_min_p_are_of_the_candidates() -> None:
    cuts = [TopALogitsWarper(0.05), TypicalLogitsWarper([0.5, 0.7, 0.9, 1.0])]
    cuts += [EpsilonLogitsWarper(0.01), EtaLogitsWarper(0.02)]
    processors = LogitsProcessorList([*chain(1.3, 40, 0.95, 0.01), *cuts])
    head, tail = split_tail(processors)
    assert head == [] and tail is not None and tail.after == tuple(cuts)
    scores = torch.randn(4, 3_000, generator=torch.Generator().manual_seed(4)) * 3
    expected = processors(IDS, scores)
    assert torch.equal(tail.run_plainly(scores), expected)
    found = tail.find_candidates(scores)
    assert found is not None
    assert torch.equal(torch.full_like(scores, -INF).scatter(1, *found), expected)
    uniforms = torch.tensor([0.1, 0.4, 0.7, 0.95], dtype=torch.float64)
    assert torch.equal(draw_from_tail(tail, scores, uniforms), draw(expected, uniforms))
    index = torch.tensor([3, 1])
    assert torch.equal(tail.select_rows(index).run_plainly(scores[index]), expected[index])


@pytest.mark.parametrize("scores", [torch.full((1, 60), -INF), torch.full((1, 60), float("nan"))])
def test_nothing_possible_stays_nothing_possible(scores: torch.Tensor) -> None:
    _, tail = split_tail(chain(0.7, 5, 0.9))
    assert tail is not None
    found = tail.find_candidates(scores)
    assert found is not None
    assert draw(found[1], torch.tensor([0.5], dtype=torch.float64)).tolist() == [-1]


def test_one_score_that_is_no_number_leaves_nothing_as_in_the_plain_chain() -> None:
    scores = torch.randn(2, 60, generator=torch.Generator().manual_seed(0))
    scores[0, 7] = float("nan")
    uniforms = torch.tensor([0.5, 0.5], dtype=torch.float64)
    for processors in (chain(0.7, 5), chain(0.7, 5, 0.9), chain(0.7, 5, None, 0.1)):
        _, tail = split_tail(processors)
        assert tail is not None
        tokens, values = tail.find_candidates(scores) or (None, None)
        assert tokens is not None and values is not None
        found = draw(values, uniforms, tokens)
        assert found.tolist() == draw(processors(IDS[:2], scores), uniforms).tolist()
        assert found[0] == -1 and found[1] >= 0

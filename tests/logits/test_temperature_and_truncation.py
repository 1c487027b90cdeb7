from __future__ import annotations

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.errors import InputError
from unspool.logits import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

INF = float("inf")
IDS = torch.zeros(1, 1, dtype=torch.long)


def random_scores(seed: int, rows: int = 4, vocab: int = 50, ties: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, vocab, generator=generator) * 3
    return scores.round() if ties else scores


def test_temperature_divides() -> None:
    scores = torch.tensor([[1.0, 2.0, 4.0], [0.0, -3.0, 6.0]])
    halved = TemperatureLogitsWarper(2.0)(IDS, scores)
    assert halved.tolist() == [[0.5, 1.0, 2.0], [0.0, -1.5, 3.0]]
    assert TemperatureLogitsWarper([2.0, 0.5])(IDS, scores).tolist() == [[0.5, 1.0, 2.0], [0.0, -6.0, 12.0]]
    assert TemperatureLogitsWarper(2)(IDS, scores).tolist() == halved.tolist()
    assert TemperatureLogitsWarper(0.7).temperature == 0.7


def test_top_k_keeps_the_highest_and_what_ties_with_the_last() -> None:
    scores = torch.tensor([[1.0, 3.0, 2.0, 3.0, 0.0], [5.0, 4.0, 3.0, 2.0, 1.0]])
    kept = TopKLogitsWarper(1)(IDS, scores)
    assert kept.tolist() == [[-INF, 3.0, -INF, 3.0, -INF], [5.0, -INF, -INF, -INF, -INF]]
    per_row = TopKLogitsWarper([3, 2])(IDS, scores)
    assert per_row.tolist() == [[-INF, 3.0, 2.0, 3.0, -INF], [5.0, 4.0, -INF, -INF, -INF]]
    assert TopKLogitsWarper([0, 1])(IDS, scores)[0].tolist() == scores[0].tolist()
    assert TopKLogitsWarper(100)(IDS, scores).tolist() == scores.tolist()
    assert TopKLogitsWarper(1, filter_value=-9.0, min_tokens_to_keep=2)(IDS, scores)[1].tolist() == [
        5.0,
        4.0,
        -9.0,
        -9.0,
        -9.0,
    ]
    assert TopKLogitsWarper(1, min_tokens_to_keep=2).top_k == 2


def test_top_p_keeps_the_head() -> None:
    scores = torch.tensor([[0.3, 0.1, 0.1, 0.5], [0.15, 0.3, 0.3, 0.25]]).log()
    kept = TopPLogitsWarper(0.8)(IDS, scores).exp()
    assert torch.allclose(kept, torch.tensor([[0.3, 0.0, 0.0, 0.5], [0.0, 0.3, 0.3, 0.25]]), atol=1e-6)
    per_row = TopPLogitsWarper([0.2, 1.0])(IDS, scores).exp()
    assert torch.allclose(per_row, torch.tensor([[0.0, 0.0, 0.0, 0.5], [0.15, 0.3, 0.3, 0.25]]), atol=1e-6)
    two = TopPLogitsWarper(0.0, min_tokens_to_keep=2)(IDS, scores)
    assert (two > -INF).sum(-1).tolist() == [2, 2]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ties", [False, True])
def test_equals_the_reference_bit_for_bit(dtype: torch.dtype, ties: bool) -> None:
    scores = random_scores(0, rows=6, vocab=400, ties=ties).to(dtype)
    pairs: list[tuple[LogitsProcessor, object]] = [
        *((TemperatureLogitsWarper(t), transformers.TemperatureLogitsWarper(t)) for t in (0.3, 0.7, 1.9)),
        *((TopKLogitsWarper(k), transformers.TopKLogitsWarper(k)) for k in (1, 3, 17, 400, 5000)),
        *((TopPLogitsWarper(p), transformers.TopPLogitsWarper(p)) for p in (0.0, 0.2, 0.5, 0.95, 1.0)),
        (TopPLogitsWarper(0.1, -1.0, 5), transformers.TopPLogitsWarper(0.1, -1.0, 5)),
    ]
    for ours, theirs in pairs:
        result = ours(IDS, scores)
        assert result.dtype == dtype
        expected = theirs(IDS, scores)
        if isinstance(
            ours, TopPLogitsWarper
        ):  # which of equal scores goes is not the reference's to say: it sorts unstably
            result, expected = result.sort(dim=-1).values, expected.sort(dim=-1).values
        assert torch.equal(result, expected), ours


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    ties=st.booleans(),
    temperatures=st.lists(st.floats(0.05, 5), min_size=4, max_size=4),
    ks=st.lists(st.integers(1, 60), min_size=4, max_size=4),
    ps=st.lists(st.floats(0, 0.999), min_size=4, max_size=4),
)
def test_row_alone_equals_row_in_a_batch(
    seed: int, ties: bool, temperatures: list[float], ks: list[int], ps: list[float]
) -> None:
    scores = random_scores(seed, ties=ties)
    before = scores.clone()
    for kind, values in ((TemperatureLogitsWarper, temperatures), (TopKLogitsWarper, ks), (TopPLogitsWarper, ps)):
        batch = kind(values)(IDS, scores)
        for row, value in enumerate(values):
            alone = kind(value)(IDS, scores[row : row + 1])
            assert torch.equal(batch[row], alone[0])
            assert torch.equal(kind([value])(IDS, scores[row : row + 1])[0], alone[0])
    assert torch.equal(scores, before)


@pytest.mark.parametrize(
    "processor",
    [TemperatureLogitsWarper([0.5, 1.0, 2.0]), TopKLogitsWarper([0, 2, 5]), TopPLogitsWarper([0.3, 1, 0.8])],
)
def test_select_rows_follows_the_rows(processor: LogitsProcessor) -> None:
    scores = random_scores(1, rows=3)
    whole = processor(IDS, scores)
    index = torch.tensor([2, 0, 0, 1])
    assert torch.equal(processor.select_rows(index)(IDS, scores[index]), whole[index])
    nested = processor.select_rows(index).select_rows(torch.tensor([3]))
    assert torch.equal(nested(IDS, scores[1:2]), whole[1:2])
    with pytest.raises(InputError, match="3 rows, but there are 2"):
        processor(IDS, scores[:2])


def test_select_rows_of_one_number_is_the_same_processor() -> None:
    for processor in (TemperatureLogitsWarper(0.5), TopKLogitsWarper(3), TopPLogitsWarper(0.5)):
        assert processor.select_rows(torch.tensor([0])) is processor


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), INF, "0.5", True, None, [], [1.0, 0.0], [[1.0]]])
def test_temperature_refuses(bad: object) -> None:
    with pytest.raises(ValueError, match="temperature"):
        TemperatureLogitsWarper(bad)


@pytest.mark.parametrize("bad", [0, -1, 1.5, float("nan"), "3", True, None, [1, -1], [1.0]])
def test_top_k_refuses(bad: object) -> None:
    with pytest.raises(ValueError, match="top_k"):
        TopKLogitsWarper(bad)


@pytest.mark.parametrize("bad", [-0.1, 1.1, float("nan"), INF, "0.5", None, [0.5, 1.5]])
def test_top_p_refuses(bad: object) -> None:
    with pytest.raises(ValueError, match="top_p"):
        TopPLogitsWarper(bad)
    with pytest.raises(ValueError, match="min_tokens_to_keep"):
        TopPLogitsWarper(0.5, min_tokens_to_keep=0)


class AddsBias(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, bias: float) -> torch.Tensor:
        return scores + bias


class TakesAnything(LogitsProcessor):
    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, scale: float = 1.0, **kwargs: float
    ) -> torch.Tensor:
        return scores * scale + sum(kwargs.values())


def test_list_runs_in_turn_and_passes_arguments_on() -> None:
    scores = torch.tensor([[1.0, 2.0]])
    chain = LogitsProcessorList([TemperatureLogitsWarper(0.5), AddsBias(), lambda ids, scores: scores * 10])
    assert chain(IDS, scores, bias=1.0, unused=3).tolist() == [[30.0, 50.0]]
    with pytest.raises(ValueError, match="AddsBias needs bias"):
        chain(IDS, scores)
    assert LogitsProcessorList([TakesAnything()])(IDS, scores, bias=1.0, scale=2.0).tolist() == [[3.0, 5.0]]
    assert LogitsProcessorList([TakesAnything()])(IDS, scores).tolist() == [[1.0, 2.0]]
    assert LogitsProcessorList()(IDS, scores) is scores


def test_list_selects_rows_of_those_that_can() -> None:
    def user(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores + 1

    chain = LogitsProcessorList([TemperatureLogitsWarper([1.0, 0.5]), user]).select_rows(torch.tensor([1]))
    assert isinstance(chain, LogitsProcessorList)
    assert chain(IDS, torch.tensor([[1.0]])).tolist() == [[3.0]]

"""Log-probabilities and ranks by the CPU library beside torch's."""

from __future__ import annotations

import pytest
import torch

from unspool.kernels.cpu import find_library
from unspool.kernels.ranks import log_probabilities, rank_allowed, rank_rows

LIBRARY = find_library()
pytestmark = pytest.mark.skipif(LIBRARY is None, reason="the CPU library was not built")


@pytest.mark.parametrize("rows", [1, 2, 7])
@pytest.mark.parametrize("vocab", [1, 50, 4099])
def test_log_probabilities_are_those_of_torch(rows: int, vocab: int) -> None:
    scores = 5 * torch.randn(rows, vocab, generator=torch.Generator().manual_seed(rows))
    scores[0, vocab // 2 + 1 :] = -torch.inf
    torch.testing.assert_close(log_probabilities(scores), scores.double().log_softmax(-1).float())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_rows_that_are_not_finite_are_left_to_torch(bad: float) -> None:
    scores = torch.randn(2, 30)
    scores[1, 3] = bad
    assert torch.equal(log_probabilities(scores).isnan(), torch.log_softmax(scores, -1).isnan())
    assert rank_rows(scores, 4, normalises=True) is None
    scores[1] = -torch.inf
    assert rank_rows(scores, 1, normalises=False) is None


@pytest.mark.parametrize("normalises", [False, True])
@pytest.mark.parametrize(("vocab", "count"), [(1, 1), (40, 40), (4099, 8), (4099, 700)])
def test_ranks_are_the_highest(vocab: int, count: int, normalises: bool) -> None:
    scores = 5 * torch.randn(3, vocab, generator=torch.Generator().manual_seed(count))
    found = rank_rows(scores, count, normalises=normalises)
    expected, tokens = (scores.log_softmax(-1) if normalises else scores).topk(count)
    assert found is not None
    torch.testing.assert_close(found[0], expected)
    assert torch.equal(found[1], tokens)


def test_of_equals_the_earlier_token_comes_first() -> None:
    scores = torch.zeros(2, 100)
    scores[1, 60:] = 1
    found = rank_rows(scores, 3, normalises=False)
    assert found is not None and found[1].tolist() == [[0, 1, 2], [60, 61, 62]]


def test_too_few_finite_scores_have_no_ranks() -> None:
    scores = torch.full((1, 100), -torch.inf)
    scores[0, :2] = 1
    assert rank_rows(scores, 3, normalises=False) is None
    assert rank_rows(scores, 2, normalises=True) is not None


@pytest.mark.parametrize("forbidden", [(), (7,), (7, 7, 31, 4098), tuple(range(60)), (-1, 4099)])
def test_allowed_tokens_are_ranked_as_if_the_others_were_masked(forbidden: tuple[int, ...]) -> None:
    scores = torch.randn(3, 4099, generator=torch.Generator().manual_seed(5))
    scores[0, [token for token in forbidden if token in (7, 31)]] = 9.0  # most of the probability, no places
    inside = [token for token in forbidden if 0 <= token < 4099]
    masked = log_probabilities(scores).index_fill(1, torch.tensor(inside, dtype=torch.int64), -torch.inf)
    found, expected = rank_allowed(scores, 8, forbidden), rank_rows(masked, 8, normalises=False)
    assert found is not None and expected is not None
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def test_too_many_forbidden_tokens_are_not_ranked_beside_the_others() -> None:
    assert rank_allowed(torch.randn(2, 4099), 8, range(65)) is None
    assert rank_allowed(torch.randn(2, 10), 8, range(3)) is None

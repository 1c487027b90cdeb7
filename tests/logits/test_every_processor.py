"""What holds for every processor: the reference's values, purity, and rows that know nothing of each other."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.logits.cases import PAIRS, PER_ROW, ROWS, Pair, random_ids, random_scores, run

from unspool.errors import InputError
from unspool.logits import LogitsProcessor

WITH_REFERENCE = {name: pair for name, pair in PAIRS.items() if pair.theirs is not None}


@pytest.mark.parametrize("pair", WITH_REFERENCE.values(), ids=WITH_REFERENCE)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("width", [1, 2, 9, 16])
def test_equals_the_reference(pair: Pair, ties: bool, width: int) -> None:
    assert pair.theirs is not None
    for seed in range(4):
        ids, scores = random_ids(seed, width=width, vocab=6 if seed < 3 else 40), random_scores(seed, ties=ties)
        scores[:, 11] = -torch.inf  # what another processor may have forbidden
        expected = pair.theirs()(ids.clone(), scores.clone())
        found = pair.make()(ids, scores)
        if pair is PAIRS["top_p"]:  # the reference sorts unstably: equals may differ
            found, expected = found.sort(dim=-1).values, expected.sort(dim=-1).values
        assert torch.equal(found.isinf(), expected.isinf())
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
@settings(max_examples=12)
@given(seed=st.integers(0, 2**31), ties=st.booleans(), width=st.integers(1, 20))
def test_is_pure_and_a_row_alone_is_a_row_in_a_batch(pair: Pair, seed: int, ties: bool, width: int) -> None:
    processor = pair.make()
    ids, scores = random_ids(seed, width=width), random_scores(seed, ties=ties)
    before = ids.clone(), scores.clone()
    whole = run(processor, ids, scores, **pair.extra)
    assert torch.equal(ids, before[0])
    assert torch.equal(scores, before[1])
    assert whole.dtype == scores.dtype
    assert torch.equal(run(processor, ids, scores, **pair.extra), whole)  # the same call twice
    for row in range(ROWS):
        at = torch.tensor([row])
        extra = {name: value[at] for name, value in pair.extra.items()}
        alone = run(pair.make().select_rows(at), ids[at], scores[at], **extra)
        assert torch.equal(alone, whole[at])


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_select_rows_follows_the_rows(pair: Pair) -> None:
    processor = pair.make()
    ids, scores = random_ids(3), random_scores(3)
    whole = run(processor, ids, scores, **pair.extra)
    index = torch.tensor([2, 0, 0, 3])
    extra = {name: value[index] for name, value in pair.extra.items()}
    chosen = processor.select_rows(index)
    assert torch.equal(run(chosen, ids[index], scores[index], **extra), whole[index])
    again = torch.tensor([3, 1])
    extra = {name: value[again] for name, value in extra.items()}
    nested = chosen.select_rows(again)
    assert torch.equal(run(nested, ids[index][again], scores[index][again], **extra), whole[index][again])
    assert torch.equal(run(processor, ids, scores, **pair.extra), whole)  # unchanged by the selecting


@pytest.mark.parametrize("name", PER_ROW)
@settings(max_examples=10)
@given(seed=st.integers(0, 2**31), ties=st.booleans())
def test_one_value_a_row_is_each_row_alone_with_its_value(name: str, seed: int, ties: bool) -> None:
    make, values = PER_ROW[name]
    ids, scores = random_ids(seed), random_scores(seed, ties=ties)
    whole = make(values)(ids, scores)
    assert torch.equal(make(torch.tensor(values))(ids, scores), whole) or name == "temperature"  # float32 values
    for row, value in enumerate(values):
        at = slice(row, row + 1)
        assert torch.equal(whole[at], make(value)(ids[at], scores[at]))
        assert torch.equal(whole[at], make([value])(ids[at], scores[at]))
    index = torch.tensor([3, 1, 1])
    chosen = make(values).select_rows(index)
    assert torch.equal(chosen(ids[index], scores[index]), whole[index])
    with pytest.raises(InputError, match=r"holds a value for each of 3 rows, but there are 4"):
        copy.copy(chosen)(ids, scores)


@pytest.mark.parametrize(
    ("make", "neutral"),
    [
        (PER_ROW["top_k"][0], 0),
        (PER_ROW["top_p"][0], 1.0),
        (PER_ROW["typical_p"][0], 1.0),
        (PER_ROW["epsilon"][0], 0.0),
        (PER_ROW["eta"][0], 0.0),
        (PER_ROW["top_a"][0], 0.0),
        (PER_ROW["min_p"][0], 0.0),
        (PER_ROW["top_n_sigma"][0], 0.0),
        (PER_ROW["repetition"][0], 1.0),
        (PER_ROW["dry_multiplier"][0], 0.0),
        (PER_ROW["temperature"][0], 1.0),
    ],
)
def test_a_neutral_value_leaves_its_row_alone(make: Callable[[Any], LogitsProcessor], neutral: Any) -> None:
    ids, scores = torch.zeros(4, 9, dtype=torch.long), random_scores(1)  # repeats itself
    cutting = 0.5 if isinstance(neutral, float) else 3
    found = make([neutral, cutting, neutral, cutting])(ids, scores)
    assert torch.equal(found[[0, 2]], scores[[0, 2]])
    assert not torch.equal(found[1], scores[1])
    assert not torch.equal(found[3], scores[3])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_keeps_the_scores_number_format(pair: Pair, dtype: torch.dtype) -> None:
    ids, scores = random_ids(5), random_scores(5)
    found = run(pair.make(), ids, scores.to(dtype), **pair.extra)
    assert found.dtype == dtype
    exact = run(pair.make(), ids, scores.to(dtype).float(), **pair.extra)
    both = found.isfinite() & exact.isfinite()
    assert both.sum() >= min(int(found.isfinite().sum()), int(exact.isfinite().sum())) - ROWS  # but for one at the edge
    torch.testing.assert_close(found[both].float(), exact[both], rtol=0.05, atol=0.05)

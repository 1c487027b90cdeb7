"""Marks of step after step beside the processors that they stand for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from unspool.config import SynthIDTextWatermarkingConfig, WatermarkingConfig
from unspool.kernels.cpu import Library
from unspool.kernels.cpu.mark_calls import NO_MARK

VOCAB, ROWS, COLUMNS = 1003, 3, 40


@pytest.mark.parametrize("depth", [1, 3, 10, 30, 44])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_winner_is_drawn_from_what_the_tournament_leaves(library: Library, depth: int, threads: int) -> None:
    library.threads = threads
    generator = torch.Generator().manual_seed(depth)
    ids = torch.randint(1, 99, (ROWS, COLUMNS), generator=generator)
    ids[1, -4:] = ids[1, 2:6]  # a repeated context
    keys = torch.randint(1, 2**40, (depth,), generator=generator).tolist()
    processor = SynthIDTextWatermarkingConfig(5, keys).construct_processor(VOCAB, "cpu")
    call = processor.prepare_steps(ids, VOCAB, None)
    assert call is not None
    for _ in range(20):
        scores = 4 * torch.randn(ROWS, VOCAB, generator=generator)
        scores[0, :5] = scores[2, 500:] = -torch.inf
        numbers = torch.rand(ROWS, dtype=torch.float64, generator=generator)
        numbers[0] = 0.0
        drawn = call.draw(scores, COLUMNS, numbers.numpy())
        probs = torch.softmax(processor(ids, scores).double(), dim=-1)
        passed = probs.cumsum(-1)
        assert drawn is not None and drawn[0] >= 5 and drawn[2] < 500
        for row, token in enumerate(drawn):
            assert passed[row, token] - probs[row, token] - 1e-5 < numbers[row] < passed[row, token] + 1e-5


def test_a_table_that_tokens_share_leaves_the_draw_to_others(library: Library) -> None:
    ids = torch.randint(1, 99, (ROWS, COLUMNS))
    config = SynthIDTextWatermarkingConfig(5, [7, 8, 9], sampling_table_size=512)
    call = config.construct_processor(VOCAB, "cpu").prepare_steps(ids, VOCAB, None)
    assert library is not None and call is not None
    assert call.draw(torch.randn(ROWS, VOCAB), COLUMNS, np.full(ROWS, 0.5)) is None


def test_nothing_is_drawn_from_no_scores(library: Library) -> None:
    ids = torch.randint(1, 99, (ROWS, COLUMNS))
    call = SynthIDTextWatermarkingConfig(5, [7, 8, 9]).construct_processor(VOCAB, "cpu").prepare_steps(ids, VOCAB, None)
    scores = torch.randn(ROWS, VOCAB)
    scores[0], scores[1, 7] = -torch.inf, torch.nan
    assert library is not None and call is not None
    drawn = call.draw(scores, COLUMNS, np.full(ROWS, 0.5))
    assert drawn is not None and drawn[:2] == [NO_MARK, NO_MARK] and 0 <= drawn[2] < VOCAB


@pytest.mark.parametrize("scheme", ["lefthash", "selfhash"])
def test_green_lists_are_raised_where_the_scores_lie(library: Library, scheme: str) -> None:
    ids = torch.randint(1, 99, (ROWS, COLUMNS))
    config = WatermarkingConfig(seeding_scheme=scheme, context_width=3 if scheme == "selfhash" else 1)
    processor = config.construct_processor(VOCAB, "cpu")
    call = processor.prepare_steps(ids, VOCAB, None)
    assert library is not None and call is not None
    for columns in (COLUMNS - 1, COLUMNS, COLUMNS):  # the last time all lists are known
        scores = torch.randn(ROWS, VOCAB)
        expected = processor.raise_plainly(ids[:, :columns], scores, 40) if scheme == "selfhash" else None
        expected = processor(ids[:, :columns], scores) if expected is None else expected
        assert (expected != scores).any()
        assert torch.equal(call.mark(scores.clone(), columns), expected)

"""Processors that say which tokens they forbid do that, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unspool.logits.base import LogitsProcessor, LogitsProcessorList
from unspool.logits.bias import LogitBiasLogitsProcessor, NoBadWordsLogitsProcessor, SequenceBiasLogitsProcessor
from unspool.logits.forced import (
    ForcedBOSTokenLogitsProcessor,
    ForcedEOSTokenLogitsProcessor,
    SuppressTokensAtBeginLogitsProcessor,
    SuppressTokensLogitsProcessor,
)
from unspool.logits.length import MinLengthLogitsProcessor, MinNewTokensLengthLogitsProcessor
from unspool.logits.ngrams import NoRepeatNGramLogitsProcessor

VOCAB, WIDTHS = 40, range(1, 12)
INF = float("inf")
# What is made, and the widths at which it says what it forbids.
CASES: list[tuple[LogitsProcessor, Any]] = [
    (ForcedBOSTokenLogitsProcessor(3), range(2, 12)),
    (ForcedEOSTokenLogitsProcessor(8, [4, 5]), [*range(1, 7), *range(8, 12)]),
    (SuppressTokensLogitsProcessor([7, 9, 99]), WIDTHS),
    (SuppressTokensAtBeginLogitsProcessor([7, 9], 4), WIDTHS),
    (MinNewTokensLengthLogitsProcessor(2, 5, [3, -1]), WIDTHS),
    (MinNewTokensLengthLogitsProcessor(2, [5, 3], 3), ()),
    (MinLengthLogitsProcessor(6, 3), WIDTHS),
    (NoBadWordsLogitsProcessor([[3], [8], [9]], eos_token_id=8), WIDTHS),
    (NoBadWordsLogitsProcessor([[8]], eos_token_id=8), WIDTHS),
    (NoBadWordsLogitsProcessor([[3], [8, 9]]), ()),
    (SequenceBiasLogitsProcessor({(3,): -INF, (4,): 1.0}), ()),
    (LogitBiasLogitsProcessor({3: -INF}), WIDTHS),
    (NoRepeatNGramLogitsProcessor(2), ()),
]


@pytest.mark.parametrize("processor,telling", CASES, ids=lambda one: type(one).__name__)
def test_the_tokens_are_all_that_changes(processor: LogitsProcessor, telling: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    told = [width for width in WIDTHS if processor.find_forbidden(width) is not None]
    assert told == list(telling)
    for width in told:
        scores = torch.randn(2, VOCAB, generator=generator)
        ids = torch.randint(0, VOCAB, (2, width), generator=generator)
        forbidden = processor.find_forbidden(width)
        assert forbidden is not None
        expected = scores.index_fill(1, torch.tensor([one for one in forbidden if 0 <= one < VOCAB]).long(), -INF)
        assert torch.equal(processor(ids, scores), expected)


def test_a_list_tells_if_all_do() -> None:
    telling = [SuppressTokensLogitsProcessor([7, 9]), MinLengthLogitsProcessor(6, 3)]
    assert LogitsProcessorList(telling).find_forbidden(5) == (7, 9, 3)
    assert LogitsProcessorList(telling).find_forbidden(6) == (7, 9)
    assert LogitsProcessorList([]).find_forbidden(6) == ()
    assert LogitsProcessorList([*telling, NoRepeatNGramLogitsProcessor(2)]).find_forbidden(6) is None
    assert LogitsProcessorList([*telling, lambda _, scores: scores]).find_forbidden(6) is None
    assert LogitsProcessorList(telling, starts=[0, 2]).find_forbidden(6) is None  # rows have come together


class Halving(SuppressTokensLogitsProcessor):
    """Forbids tokens, and does more."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return super().__call__(input_ids, scores) / 2


class Named(SuppressTokensLogitsProcessor):
    """Has another name alone."""


def test_what_a_parent_forbids_is_not_all_that_a_call_of_ones_own_does() -> None:
    assert Halving([3]).find_forbidden(4) is None
    assert Named([3]).find_forbidden(4) == SuppressTokensLogitsProcessor([3]).find_forbidden(4) is not None

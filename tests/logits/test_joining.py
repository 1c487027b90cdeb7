"""Processors after rows of two calls have come together: one call for all rows gives what each had alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import unspool
from unspool.logits.base import LogitsProcessor, LogitsProcessorList, RowGroups

VOCAB = 24
Maker = Callable[[int], LogitsProcessor]

# Each makes the processor of a call whose prompt has so many columns.
ONCE: dict[str, Maker] = {
    "repetition": lambda width: unspool.RepetitionPenaltyLogitsProcessor(1.1 + width / 10),
    "repetition_of_new": lambda width: unspool.RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=width),
    "repetition_far": lambda width: unspool.RepetitionPenaltyLogitsProcessor(1.3, prompt_ignore_length=2 * width),
    "presence": lambda width: unspool.PresencePenaltyLogitsProcessor(0.5, prompt_ignore_length=width),
    "frequency": lambda width: unspool.FrequencyPenaltyLogitsProcessor(width / 8, prompt_ignore_length=width),
    "min_new_tokens": lambda width: unspool.MinNewTokensLengthLogitsProcessor(width, width - 1, [2, 3]),
    "min_length": lambda width: unspool.MinLengthLogitsProcessor(width + 3, 2),
    "decay": lambda width: unspool.ExponentialDecayLengthPenalty((1, 1.2), 2, width),
    "forced_bos": lambda width: unspool.ForcedBOSTokenLogitsProcessor(4),
    "forced_eos": lambda width: unspool.ForcedEOSTokenLogitsProcessor(width + 4, 2),
    "begin": lambda width: unspool.SuppressTokensAtBeginLogitsProcessor([5, 6], width + 3),
    "sequence_bias": lambda width: unspool.SequenceBiasLogitsProcessor({(7,): 1.5, (0, 8): -2.0, (0, 0, 0, 0, 9): 3.0}),
    "no_repeat": lambda width: unspool.NoRepeatNGramLogitsProcessor(2),
    "dry": lambda width: unspool.DRYLogitsProcessor(width / 4, 1.5, 1),
    "encoder_penalty": lambda width: unspool.EncoderRepetitionPenaltyLogitsProcessor(1.5, make_ids(2, width, 5)),
    "encoder_no_repeat": lambda width: unspool.EncoderNoRepeatNGramLogitsProcessor(2, make_ids(2, width, 5)),
}
ALONE: dict[str, Maker] = {
    "other_bias": lambda width: unspool.SequenceBiasLogitsProcessor({(width,): 1.0, (0, 0, 0, 3): 2.0}),
    "other_ngrams": lambda width: unspool.NoRepeatNGramLogitsProcessor(width),
    "mirostat": lambda width: unspool.MirostatLogitsWarper(1.0 + width),
}


def make_ids(rows: int, width: int, seed: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, width), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("prompts", [(3, 5), (5, 2), (4, 4)])
@pytest.mark.parametrize("name", [*ONCE, *ALONE])
def test_one_call_gives_what_each_set_had_alone(name: str, prompts: tuple[int, int]) -> None:
    make = {**ONCE, **ALONE}[name]
    lists = [LogitsProcessorList([make(width)]) for width in prompts]
    for num_new in (1, 3, 4):
        widths = [width + num_new for width in prompts]
        ids = [make_ids(2, width, width) for width in widths]
        ids[0][:, -2:] = 0  # ends that biases and n-grams know
        scores = torch.randn(4, VOCAB, generator=torch.Generator().manual_seed(num_new))
        alone = torch.cat([own(each, part) for own, each, part in zip(lists, ids, scores.split(2), strict=True)])
        widest = max(widths)
        shifts = (widest - widths[0], widest - widths[1])
        joined = lists[0].join_rows(lists[1], (2, 2), shifts)
        assert isinstance(joined[0], RowGroups) == (name in ALONE and (name == "mirostat" or prompts[0] != prompts[1]))
        history = torch.cat(
            [torch.nn.functional.pad(each, (shift, 0)) for each, shift in zip(ids, shifts, strict=True)]
        )
        pads = torch.tensor([shifts[0]] * 2 + [shifts[1]] * 2)
        extra: dict[str, Any] = {"pads": pads} if any(shifts) else {}
        torch.testing.assert_close(joined(history, scores, **extra), alone)
        few = torch.tensor([3, 1]) if name in ONCE else torch.tensor([1, 3])  # groups keep their order
        chosen = joined.select_rows(few)(history[few], scores[few], **{key: value[few] for key, value in extra.items()})
        torch.testing.assert_close(chosen, alone[few])


def test_sets_that_come_in_later_keep_their_own_columns() -> None:
    make = ONCE["forced_eos"]
    first = LogitsProcessorList([make(2)]).join_rows(LogitsProcessorList([make(4)]), (1, 1), (2, 0))
    again = first.join_rows(LogitsProcessorList([make(7)]), (2, 1), (3, 0))
    assert again.starts == [5, 3, 0]
    assert again[0].max_length.tolist() == [6, 8, 11]  # three columns each are left when the text has seven
    ids, scores = torch.zeros(3, 10, dtype=torch.int64), torch.zeros(3, VOCAB)
    assert [bool(row.isneginf().any()) for row in again(ids, scores)] == [True, True, True]
    assert not again(ids[:, 1:], scores).isneginf().any()


def test_one_processor_that_stays_alone_does_not_divide_the_others() -> None:
    lists = [LogitsProcessorList([ONCE["presence"](width), ALONE["other_bias"](width)]) for width in (3, 5)]
    joined = lists[0].join_rows(lists[1], (2, 2), (2, 0))
    assert [type(one) for one in joined] == [unspool.PresencePenaltyLogitsProcessor, RowGroups]
    third = joined.join_rows(LogitsProcessorList([ONCE["presence"](9), ALONE["other_bias"](9)]), (4, 1), (4, 0))
    assert [(count, shift) for _, count, shift in third[1].groups] == [(2, 6), (2, 4), (1, 0)]
    fewer = joined.join_rows(LogitsProcessorList([ONCE["presence"](9)]), (4, 1), (4, 0))
    assert type(fewer[0]) is unspool.PresencePenaltyLogitsProcessor and fewer[0].prompt_ignore_length.shape == (5,)
    assert [(len(own), count) for own, count, _ in fewer[1].groups] == [(1, 2), (1, 2), (0, 1)]


def test_unlike_processors_in_the_same_place_stay_apart() -> None:
    one = LogitsProcessorList([unspool.TemperatureLogitsWarper(0.7), unspool.TopKLogitsWarper(4)])
    two = LogitsProcessorList([unspool.TemperatureLogitsWarper(0.9), unspool.MinPLogitsWarper(0.1)])
    for shifts in ((0, 0), (0, 3)):
        joined = one.join_rows(two, (2, 1), shifts)
        assert [type(each) for each in joined] == [unspool.TemperatureLogitsWarper, RowGroups]
        ids, scores = make_ids(3, 6, 5), torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
        found = joined(ids, scores)
        torch.testing.assert_close(found[:2], one(ids[:2], scores[:2]))
        torch.testing.assert_close(found[2:], two(ids[2:], scores[2:]))

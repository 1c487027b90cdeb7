"""Rows that come into a running batch get the tokens that they get alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.decoding.greenlets import join_caches
from tests.fakes import FakeModel
from unspool.api.starting import start
from unspool.decoding.prompts import Prompts
from unspool.decoding.rows import Rows
from unspool.decoding.run import Run
from unspool.decoding.strategies.turns import TokenTurns
from unspool.logits.base import RowGroups

GREEDY: list[dict[str, Any]] = [
    {},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.8, "min_new_tokens": 4},
    {"no_repeat_ngram_size": 2, "suppress_tokens": [5, 6]},
    {"forced_eos_token_id": 2, "begin_suppress_tokens": [9, 10, 12]},
    {"bad_words_ids": [[5, 6], [7]], "min_length": 6, "frequency_penalty": 0.7},
]
SAMPLED: list[dict[str, Any]] = [
    {"do_sample": True, "seed": 3, "top_k": 8, "temperature": 1.4},
    {"do_sample": True, "seed": 4, "top_k": 5, "temperature": 0.7},
    {"do_sample": True, "seed": 5, "top_k": 0, "top_p": 0.8, "frequency_penalty": 0.5},
]


def begin(model: FakeModel, rows: list[list[int]], num_turns: int, **asked: Any) -> tuple[Run, list[dict[int, Any]]]:
    """A run after so many turns, and what those emitted."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    asked = {"eos_token_id": [2, 11], "pad_token_id": 0, "max_new_tokens": 8, **asked}
    run = start(model, ids, attention_mask=mask, hides_padding=True, **asked)
    turns: Iterator[Any] = iter(run)
    return run, [emitted.tokens for emitted in (next(turns, None) for _ in range(num_turns)) if emitted is not None]


def finish_alone(model: FakeModel, rows: list[list[int]], **asked: Any) -> list[list[int]]:
    run, _ = begin(model, rows, 99, **asked)
    return run.emitted


def decode_together(
    model: FakeModel, sets: list[tuple[list[list[int]], dict[str, Any]]], num_turns: list[int]
) -> list[list[int]]:
    """New tokens of all rows, of which each set comes in after so many turns of its own."""
    runs = [begin(model, rows, turns, **asked)[0] for (rows, asked), turns in zip(sets, num_turns, strict=True)]
    emitted = [list(tokens) for run in runs for tokens in run.emitted]
    turns = runs[0]._turns
    assert isinstance(turns, TokenTurns)
    for run in runs[1:]:
        other = run._turns
        assert isinstance(other, TokenTurns) and run.cache.held is not None
        cache = join_caches([turns.reader.cache, other.reader.cache])
        turns.admit([other], cache)
    with torch.no_grad():
        while not turns.is_done():
            for number, tokens in turns.turn().tokens.items():
                emitted[number] += tokens
    return emitted


PROMPTS = [[[3, 4, 5], [6, 7]], [[8, 9, 3, 4]], [[12], [5, 6, 5, 6, 5, 4]]]


@pytest.mark.parametrize("kinds", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_every_pair_of_settings(kinds: list[dict[str, Any]]) -> None:
    for one in kinds:
        for two in kinds:
            sets = [(PROMPTS[0], {**one, "eos_token_id": None}), (PROMPTS[1], {**two, "eos_token_id": None})]
            alone = [tokens for rows, asked in sets for tokens in finish_alone(FakeModel(), rows, **asked)]
            assert decode_together(FakeModel(), sets, [4, 1]) == alone


@settings(max_examples=30)
@given(st.data())
def test_rows_admitted_midway_get_their_own_tokens(data: st.DataObject) -> None:
    kinds = data.draw(st.sampled_from([GREEDY, SAMPLED]))
    rows = st.lists(st.lists(st.integers(3, 22), min_size=1, max_size=7), min_size=1, max_size=3)
    sets = [
        (
            data.draw(rows),
            {**data.draw(st.sampled_from(kinds)), "eos_token_id": None, "max_new_tokens": data.draw(st.integers(5, 9))},
        )
        for _ in range(data.draw(st.integers(2, 3)))
    ]
    alone = [tokens for rows, asked in sets for tokens in finish_alone(FakeModel(), rows, **asked)]
    assert decode_together(FakeModel(), sets, [data.draw(st.integers(1, 4)) for _ in sets]) == alone


def test_rows_that_end_leave_and_others_go_on() -> None:
    model = FakeModel()
    ends = list(range(0, 23, 3))
    sets = [(PROMPTS[0], {"eos_token_id": ends}), (PROMPTS[2], {"eos_token_id": [1, 4], "max_new_tokens": 12})]
    alone = [tokens for rows, asked in sets for tokens in finish_alone(model, rows, **asked)]
    lengths = [len(tokens) for tokens in alone]
    assert min(lengths) > 1 and len(set(lengths)) > 1  # they end at different turns, none at the first
    assert decode_together(model, sets, [1, 1]) == alone


def test_the_same_processors_become_one_with_values_per_row() -> None:
    model = FakeModel()
    one, _ = begin(model, PROMPTS[0], 1, **SAMPLED[0])
    two, _ = begin(model, PROMPTS[1], 1, **SAMPLED[1])
    own, other = one.parts.processors, two.parts.processors
    joined = own.join_rows(other, (2, 1), (0, 3))
    assert [type(processor) for processor in joined] == [type(processor) for processor in own]
    assert joined[0].temperature.tolist() == [1.4, 1.4, 0.7]
    assert [processor.largest for processor in joined if hasattr(processor, "largest")] == [8]


def test_processors_that_count_columns_keep_to_their_rows() -> None:
    model = FakeModel()
    one, _ = begin(model, PROMPTS[0], 1, **GREEDY[2])
    two, _ = begin(model, PROMPTS[1], 1, **GREEDY[4])
    joined = one.parts.processors.join_rows(two.parts.processors, (2, 1), (0, 3))
    assert isinstance(joined[0], RowGroups) and [count for _, count, _ in joined[0].groups] == [2, 1]
    few = joined.select_rows(torch.tensor([1, 2]))
    assert [(count, shift) for _, count, shift in few[0].groups] == [(1, 0), (1, 3)]


def test_rows_hold_no_padding() -> None:
    prompts = Prompts(torch.tensor([[0, 0, 7], [4, 5, 6]]), [1, 3], hides_padding=True)
    rows = Rows(prompts, pad_token_id=0)
    tokens, counts = rows.unread([0, 0])
    assert counts == [1, 3] and tokens[0, :1].tolist() == [7] and tokens[1].tolist() == [4, 5, 6]
    rows.append(torch.tensor([[8], [9]]))
    assert rows.tokens_from(0, 0) == [7, 8] and rows.tokens_from(1, 0) == [4, 5, 6, 9]
    assert rows.history().tolist() == [[0, 0, 7, 8], [4, 5, 6, 9]]
    assert rows.unread([1, 3])[0].tolist() == [[8], [9]]


def test_rows_whose_padding_counts_are_refused() -> None:
    rows = [Rows(Prompts(torch.tensor([[3, 4]]), [2]), 0) for _ in range(2)]
    with pytest.raises(ValueError, match="hides_padding"):
        rows[0].admit([rows[1]])

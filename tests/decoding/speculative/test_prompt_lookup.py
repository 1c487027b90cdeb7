"""The indexed lookup against the reference's scan, and against its own definition."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.decoding.prompts import Prompts
from unspool.decoding.rows import Rows
from unspool.decoding.speculative.drafters.prompt_lookup import NO_TOKEN, NgramIndex, PromptLookup

tokens = st.lists(st.integers(0, 4), min_size=2, max_size=40)


@given(tokens, st.integers(1, 4), st.integers(1, 6))
@settings(max_examples=150)
def test_candidates_are_the_references(text: list[int], size: int, num_tokens: int) -> None:
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    reference = PromptLookupCandidateGenerator(
        eos_token_id=torch.tensor([4]), num_output_tokens=num_tokens, max_matching_ngram_size=size, max_length=10_000
    )
    expected = reference.get_candidates(torch.tensor([text]))[0][0, len(text) :].tolist()
    rows = Rows(Prompts(torch.tensor([text]), [len(text)]), pad_token_id=0)
    draft = PromptLookup(rows, size, ends=[4]).propose(rows, [num_tokens])
    assert draft.tokens[0, : draft.counts[0]].tolist() == expected


@given(tokens, st.integers(1, 4), st.integers(0, 39))
@settings(max_examples=100)
def test_an_index_that_grows_is_one_made_at_once(text: list[int], size: int, cut: int) -> None:
    whole, grown = NgramIndex(size), NgramIndex(size)
    whole.extend(text)
    grown.extend(text[:cut])
    for token in text[cut:]:
        grown.extend([token])
    assert whole.find(5) == grown.find(5) and len(whole) == len(grown) == len(text)


def test_the_longest_ngram_wins_and_then_the_first_place() -> None:
    index = NgramIndex(3)
    index.extend([1, 2, 3, 9, 2, 3, 8, 5, 2, 3])
    assert index.find(2) == [9, 2]  # (2, 3) first came before 9; (5, 2, 3) never
    index.extend([8, 5, 2, 3])
    assert index.find(9) == [8, 5, 2, 3]  # now (5, 2, 3) has, and what followed ends with the text
    assert NgramIndex(2).find(3) == []


def test_a_source_is_looked_up_but_never_across_its_end() -> None:
    rows = Rows(Prompts(torch.tensor([[7], [1]]), [1, 1]), pad_token_id=0)
    lookup = PromptLookup(rows, 2, sources=[[6, 7], [1, 5, 6]])
    draft = lookup.propose(rows, [4, 4])
    assert draft.counts == [0, 2] and draft.tokens[1].tolist()[:2] == [5, 6]
    assert NO_TOKEN not in draft.tokens.tolist()[0]


def test_rows_are_followed() -> None:
    rows = Rows(Prompts(torch.tensor([[1, 2, 1], [3, 4, 3], [5, 6, 5]]), [3, 3, 3]), pad_token_id=0)
    lookup = PromptLookup(rows, 2)
    rows.select([2, 0])
    lookup.keep_rows([2, 0])
    assert lookup.propose(rows, [1, 1]).tokens.tolist() == [[6], [2]]
    rows.append(torch.tensor([[6, 5], [9, 0]]), [2, 1])
    lookup.observe(rows, lookup.propose(rows, [0, 0]), [0, 0])
    draft = lookup.propose(rows, [3, 3])
    assert draft.counts == [2, 0] and draft.tokens[0].tolist() == [6, 5]

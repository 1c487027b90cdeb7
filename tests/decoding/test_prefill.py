"""Reading prompts: how much one pass may read, and that parts say what the whole says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes import FakeModel
from unspool import generate
from unspool.decoding import reader as reader_module
from unspool.decoding.prompts import fit_columns

ROWS = [[5, 3, 8, 2, 9, 11, 4, 7, 6, 3, 2, 12], [4, 4, 6], [7], [9, 2, 2, 5, 6, 8, 3]]


def pad_left(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


class Counting(FakeModel):
    """Remembers how many real tokens each pass read."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens_of_passes: list[int] = []

    def forward(self, tokens: Any, cache: Any, *, counts: Any = None, **rest: Any) -> Any:
        given = tokens if tokens is not None else rest["embeds"]
        self.tokens_of_passes.append(sum(counts) if counts is not None else given.shape[0] * given.shape[1])
        return super().forward(tokens, cache, counts=counts, **rest)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 120))
def test_columns_hold_at_most_so_many_tokens(left: list[int], most: int) -> None:
    def count(columns: int) -> int:
        return sum(min(columns, one) for one in left)

    columns = fit_columns(left, most)
    assert 1 <= columns <= max(left)
    assert columns == 1 or count(columns) <= most
    assert columns == max(left) or count(columns + 1) > most


@pytest.mark.parametrize(
    "way",
    [
        {},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"num_beams": 2},
        {"do_sample": True, "seed": 3},
        {"guidance_scale": 1.5},
        {"penalty_alpha": 0.5, "top_k": 3},
    ],
    ids=str,
)
@pytest.mark.parametrize("most", [1, 5, 9])
def test_prompts_read_in_parts_are_continued_as_prompts_read_whole(
    way: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = generate(FakeModel(), **pad_left(ROWS), max_new_tokens=5, **way)
    monkeypatch.setattr(reader_module, "MOST_TOKENS_OF_A_PASS", most)
    model = Counting()
    assert torch.equal(generate(model, **pad_left(ROWS), max_new_tokens=5, **way), whole)
    if not way:  # a column is the least that is read
        assert max(model.tokens_of_passes) <= max(most, len(ROWS))


def test_a_pass_is_bounded_where_no_size_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "MOST_TOKENS_OF_A_PASS", 10)
    model = Counting()
    generate(model, **pad_left(ROWS), max_new_tokens=1)
    assert model.tokens_of_passes == [10, 10, 3]  # three columns, six of the two rows that are left, the rest
    model = Counting()
    generate(model, **pad_left(ROWS), max_new_tokens=1, prefill_chunk_size=6)  # what is asked for is done
    assert model.tokens_of_passes == [16, 7]
    model = Counting()
    whole = generate(model, **pad_left(ROWS), max_new_tokens=1, output_hidden_states=True, return_dict_in_generate=True)
    assert model.tokens_of_passes == [23] and whole.hidden_states[0][0].shape[1] == 12  # states are returned whole

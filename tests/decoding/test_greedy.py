"""Greedy decoding beside the loop everybody knows, whatever the batch, the cache and the chunks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fakes import FakeModel, decode_slowly, pad_left
from unspool import generate, stream

ROWS = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [11, 1]]
WAYS: list[dict[str, Any]] = [
    {},
    {"use_cache": False},
    {"cache_implementation": "dynamic"},
    {"cache_implementation": "static"},
    {"cache_implementation": "static", "max_cache_len": 40},
    *({"prefill_chunk_size": size} for size in (1, 2, 3, 7)),
    {"use_cache": False, "prefill_chunk_size": 3},
    {"cache_implementation": "static", "prefill_chunk_size": 2},
]


def expect(model: FakeModel, rows: list[list[int]], num_new: int, eos: tuple[int, ...] = (), pad: int = 0) -> Any:
    """What `generate` must return for left-padded rows, and the new tokens alone."""
    new = [decode_slowly(model, row, num_new, eos) for row in rows]
    longest = max(map(len, new))
    width = max(map(len, rows))
    sequences = [
        [0] * (width - len(row)) + row + tokens + [pad] * (longest - len(tokens))
        for row, tokens in zip(rows, new, strict=True)
    ]
    return sequences, new


def find_ends(model: FakeModel) -> tuple[int, ...]:
    """End tokens that the rows meet at different steps, and one row not at all."""
    new = [decode_slowly(model, row, 12) for row in ROWS]
    ends = (new[0][2], new[1][5])
    assert len({len(decode_slowly(model, row, 12, ends)) for row in ROWS}) > 2, "choose other ends"
    return ends


@pytest.mark.parametrize("way", WAYS, ids=str)
@pytest.mark.parametrize("pad", [0, 5])
def test_ragged_rows_equal_the_slow_loop(way: dict[str, Any], pad: int) -> None:
    model = FakeModel()
    ends = find_ends(model)
    found = generate(model, **pad_left(ROWS), max_new_tokens=12, eos_token_id=list(ends), pad_token_id=pad, **way)
    assert found.tolist() == expect(model, ROWS, 12, ends, pad)[0]


@settings(max_examples=60)
@given(
    rows=st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=9), min_size=1, max_size=4),
    eos=st.lists(st.integers(0, 12), max_size=3),
    num_new=st.integers(1, 6),
    way=st.sampled_from(WAYS),
    seed=st.integers(0, 3),
)
def test_any_batch_equals_the_slow_loop(
    rows: list[list[int]], eos: list[int], num_new: int, way: dict[str, Any], seed: int
) -> None:
    model = FakeModel(13, seed=seed)
    found = generate(model, **pad_left(rows), max_new_tokens=num_new, eos_token_id=eos or None, pad_token_id=0, **way)
    assert found.tolist() == expect(model, rows, num_new, tuple(eos))[0]


def test_one_end_token_or_several() -> None:
    model = FakeModel()
    new = decode_slowly(model, [1, 2], 8)
    for eos in (new[3], [new[3]], (22, new[3]), torch.tensor([new[3], 22]).tolist()):
        found = generate(model, torch.tensor([[1, 2]]), max_new_tokens=8, eos_token_id=eos)
        assert found.tolist() == [[1, 2, *new[: new.index(new[3]) + 1]]]


def test_without_end_tokens_rows_run_to_the_limit() -> None:
    model = FakeModel()
    for eos in (None, -1):
        found = generate(model, **pad_left(ROWS), max_new_tokens=9, eos_token_id=eos, pad_token_id=0)
        assert found.tolist() == expect(model, ROWS, 9)[0]


def test_padding_defaults_to_the_end_token() -> None:
    model = FakeModel()
    ends = find_ends(model)
    found = generate(model, **pad_left(ROWS), max_new_tokens=12, eos_token_id=list(ends))
    assert found.tolist() == expect(model, ROWS, 12, ends, pad=ends[0])[0]


def test_leading_pad_tokens_are_padding_without_a_mask() -> None:
    model = FakeModel()
    ids = pad_left(ROWS)["input_ids"]
    found = generate(model, ids, max_new_tokens=4, pad_token_id=0)
    assert found.tolist() == expect(model, ROWS, 4)[0]
    # A pad token that is also an end token says nothing: then every token is real.
    as_tokens = generate(model, ids, max_new_tokens=4, pad_token_id=0, eos_token_id=[0])
    assert as_tokens[2, 5:].tolist()[:1] == decode_slowly(model, ids[2].tolist(), 1)


def test_rows_alone_equal_rows_in_a_batch() -> None:
    model = FakeModel()
    whole = generate(model, **pad_left(ROWS, width=7), max_new_tokens=6, eos_token_id=None)
    for row, ids in enumerate(ROWS):
        alone = generate(model, torch.tensor([ids]), max_new_tokens=6)
        assert alone[0, len(ids) :].tolist() == whole[row, 7:].tolist()


# --- the stream ---------------------------------------------------------------------------------------------


def test_stream_is_what_generate_collects() -> None:
    model = FakeModel()
    ends = find_ends(model)
    sequences, new = expect(model, ROWS, 12, ends)
    told = list(stream(model, **pad_left(ROWS), max_new_tokens=12, eos_token_id=list(ends), pad_token_id=0))
    collected: dict[int, list[int]] = {row: [] for row in range(len(ROWS))}
    reasons: dict[int, str] = {}
    for step, emitted in enumerate(told):
        assert set(emitted.tokens) == {row for row, tokens in enumerate(new) if len(tokens) > step}
        for row, tokens in emitted.tokens.items():
            collected[row] += tokens
        reasons |= emitted.finished
        assert set(emitted.finished) == {row for row, tokens in enumerate(new) if len(tokens) == step + 1}
    assert list(collected.values()) == new
    assert reasons == {row: "eos" if tokens[-1] in ends else "length" for row, tokens in enumerate(new)}
    assert generate(model, **pad_left(ROWS), max_new_tokens=12, eos_token_id=list(ends)).shape[1] == len(sequences[0])


def test_closing_the_stream_stops_the_work() -> None:
    model = FakeModel()
    pieces = stream(model, torch.tensor([[1, 2]]), max_new_tokens=50)
    assert model.num_passes == 0  # everything is checked, nothing is computed
    next(pieces), next(pieces)
    assert model.num_passes == 2
    pieces.close()
    assert model.num_passes == 2
    with pytest.raises(StopIteration):
        next(pieces)


def test_the_caller_keeps_its_grad_mode() -> None:
    model = FakeModel()
    seen = []
    model.table.requires_grad_(True)
    for _ in stream(model, torch.tensor([[1, 2]]), max_new_tokens=3):
        seen.append(torch.is_grad_enabled())
    output = generate(model, [[1, 2]], max_new_tokens=2, output_logits=True, return_dict_in_generate=True)
    assert seen == [True] * 3 and not output.logits[0].requires_grad


# --- what it costs ------------------------------------------------------------------------------------------


def test_every_token_is_read_once_and_finished_rows_leave() -> None:
    model = FakeModel()
    ends = find_ends(model)
    _, new = expect(model, ROWS, 12, ends)
    generate(model, **pad_left(ROWS), max_new_tokens=12, eos_token_id=list(ends))
    assert model.num_tokens_read == sum(len(row) + len(tokens) - 1 for row, tokens in zip(ROWS, new, strict=True))
    assert model.num_passes == max(map(len, new))
    assert model.rows_of_passes == [sum(len(tokens) > step for tokens in new) for step in range(model.num_passes)]


def test_chunks_split_the_prompt_and_nothing_else() -> None:
    model = FakeModel()
    generate(model, **pad_left(ROWS), max_new_tokens=4, prefill_chunk_size=2)
    assert model.num_passes == 3 + 3  # five tokens by two, then a token a step
    assert model.num_tokens_read == sum(map(len, ROWS)) + 3 * len(ROWS)


def test_without_a_cache_everything_is_read_again() -> None:
    model = FakeModel()
    generate(model, torch.tensor([[1, 2, 3]]), max_new_tokens=4, use_cache=False)
    assert model.num_tokens_read == 3 + 4 + 5 + 6


def test_stats_say_what_a_call_cost() -> None:
    model = FakeModel()
    output = generate(model, **pad_left(ROWS), max_new_tokens=5, prefill_chunk_size=2, return_dict_in_generate=True)
    stats = output.stats
    assert (stats.prompt_tokens, stats.new_tokens, stats.forward_passes) == (11, 20, model.num_passes)
    assert 0 < stats.first_token_seconds <= stats.total_seconds
    expected = (stats.new_tokens - 1) / (stats.total_seconds - stats.first_token_seconds)
    assert stats.tokens_per_second == pytest.approx(expected)


def test_no_prompt_begins_with_the_start_token() -> None:
    model = FakeModel()
    assert generate(model, bos_token_id=4, max_new_tokens=3).tolist() == [[4, *decode_slowly(model, [4], 3)]]
    same = generate(model, bos_token_id=4, pad_token_id=4, max_new_tokens=3)  # it is no padding there
    assert same.tolist() == [[4, *decode_slowly(model, [4], 3)]]


def test_the_prompt_is_not_written_to() -> None:
    ids = torch.tensor([[1, 2, 3]])
    generate(FakeModel(), ids, max_new_tokens=3)
    assert ids.tolist() == [[1, 2, 3]]

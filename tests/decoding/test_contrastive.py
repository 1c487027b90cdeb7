"""Contrastive search beside the loop that recomputes everything, whatever the model, the batch and the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conformance.cases import load_model
from tests.decoding.contrastive import ASK, ROWS, WAYS, cut, expect_native, read_fake, read_native, search_slowly
from tests.fakes import FakeEncoderDecoder, FakeModel, pad_left
from unspool import DynamicCache, generate
from unspool.cache import FORK, Cache
from unspool.errors import ResourceError, SettingError, UnsupportedError

# --- the tokens ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_ragged_rows_equal_the_slow_loop(way: dict[str, Any]) -> None:
    model = FakeModel()
    free = [search_slowly(read_fake(model), row, 12) for row in ROWS]
    ends = [free[1][3], free[3][10]]
    new = [search_slowly(read_fake(model), row, 12, eos=ends) for row in ROWS]
    assert len(set(map(len, new))) > 2, "choose other ends"
    found = generate(model, **pad_left(ROWS), max_new_tokens=12, eos_token_id=ends, pad_token_id=0, **ASK, **way)
    assert cut(found, ROWS, new) == new
    assert found.shape[1] == 5 + 12


@settings(max_examples=25)
@given(
    rows=st.lists(st.lists(st.integers(0, 12), min_size=1, max_size=7), min_size=1, max_size=3),
    alpha=st.sampled_from([0.1, 0.5, 0.9, 1.0]),
    k=st.integers(2, 6),
    eos=st.lists(st.integers(0, 12), max_size=2),
    way=st.sampled_from(WAYS),
    seed=st.integers(0, 3),
)
def test_any_batch_equals_the_slow_loop(
    rows: list[list[int]], alpha: float, k: int, eos: list[int], way: dict[str, Any], seed: int
) -> None:
    model = FakeModel(13, seed=seed)
    new = [search_slowly(read_fake(model), row, 5, alpha, k, eos) for row in rows]
    found = generate(
        model,
        **pad_left(rows),
        max_new_tokens=5,
        eos_token_id=eos or None,
        pad_token_id=0,
        penalty_alpha=alpha,
        top_k=k,
        **way,
    )
    assert cut(found, rows, new) == new


NATIVE = ["llama", "gpt2", "gemma2", "mistral", "bloom", "opt", "phi", "qwen3"]


@pytest.mark.parametrize("name", NATIVE)
def test_native_models_equal_the_slow_loop(name: str) -> None:
    """Windows (mistral, gemma2), softcaps, ALiBi and learned positions, over one copy of each row's keys."""
    model = load_model(name).model
    rows = [[5, 9, 14, 3, 20, 31, 7, 8, 40], [6, 2, 33]]
    new = [expect_native(name, tuple(row), 8) for row in rows]
    greedy = generate(model, **pad_left(rows), max_new_tokens=8, eos_token_id=None)
    assert cut(greedy, rows, new) != new, "the penalty must matter"
    for way in WAYS if name in ("llama", "gemma2") else WAYS[:5:2]:
        found = generate(model, **pad_left(rows), max_new_tokens=8, eos_token_id=None, **ASK, **way)
        assert cut(found, rows, new) == new, way
    for row, tokens in zip(rows, new, strict=True):
        alone = generate(model, [row], max_new_tokens=8, eos_token_id=None, **ASK)
        assert alone.tolist() == [row + tokens]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_an_encoder_decoder_equals_the_slow_loop(way: dict[str, Any]) -> None:
    model = load_model("t5").model
    sources, begins = [[5, 9, 14, 3], [8, 2, 33, 7, 11, 30]], [[0, 4, 9], [0]]
    new = [expect_native("t5", tuple(begin), 6, tuple(source)) for source, begin in zip(sources, begins, strict=True)]
    found = generate(model, **pad_left(sources), max_new_tokens=6, eos_token_id=None, **ASK, **way)
    expected = expect_native("t5", (0,), 6, tuple(sources[0]))
    assert found.tolist() == [[0, *expected], [0, *new[1]]]
    begun = torch.tensor([begins[0]])
    found = generate(
        model, torch.tensor([sources[0]]), decoder_input_ids=begun, max_new_tokens=6, eos_token_id=None, **ASK, **way
    )
    assert found.tolist() == [begins[0] + new[0]]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_a_fake_encoder_decoder_equals_the_slow_loop(way: dict[str, Any]) -> None:
    model = FakeEncoderDecoder()
    new = [search_slowly(read_fake(model, source=source), [3], 7) for source in ROWS]
    found = generate(model, **pad_left(ROWS), max_new_tokens=7, decoder_start_token_id=3, **ASK, **way)
    assert found.tolist() == [[3, *tokens] for tokens in new]


def test_other_penalties_and_numbers_of_candidates() -> None:
    model = load_model("llama").model
    rows = [[5, 9, 14], [6, 2, 33, 41, 12]]
    for alpha, k in ((0.3, 2), (0.9, 7), (1.0, 3)):
        new = [search_slowly(read_native(model), row, 6, alpha, k) for row in rows]
        found = generate(model, **pad_left(rows), max_new_tokens=6, eos_token_id=None, penalty_alpha=alpha, top_k=k)
        assert cut(found, rows, new) == new


def test_hardly_any_penalty_is_greedy_search() -> None:
    for model in (FakeModel(), load_model("llama").model):
        greedy = generate(model, **pad_left(ROWS), max_new_tokens=10, eos_token_id=None)
        found = generate(model, **pad_left(ROWS), max_new_tokens=10, eos_token_id=None, penalty_alpha=1e-9, top_k=5)
        assert torch.equal(found, greedy)


def test_rows_may_have_their_own_number_of_candidates() -> None:
    for model in (FakeModel(), load_model("gpt2").model):
        whole = generate(
            model, **pad_left(ROWS), max_new_tokens=8, eos_token_id=2, penalty_alpha=0.8, top_k=[2, 5, 3, 9]
        )
        for row, (ids, k) in enumerate(zip(ROWS, (2, 5, 3, 9), strict=True)):
            alone = generate(model, [ids], max_new_tokens=8, eos_token_id=2, penalty_alpha=0.8, top_k=k)[0, len(ids) :]
            assert whole[row, 5 : 5 + len(alone)].tolist() == alone.tolist()


def test_prompts_as_embeddings() -> None:
    model = load_model("llama").model
    ids = torch.tensor([[5, 9, 14, 3, 20]])
    embeds = model.get_input_embeddings()(ids)
    expected = generate(model, ids, max_new_tokens=6, eos_token_id=None, **ASK)[:, 5:]
    for way in ({}, {"use_cache": False}, {"low_memory": True}, {"prefill_chunk_size": 2}):
        found = generate(model, inputs_embeds=embeds, max_new_tokens=6, eos_token_id=None, **ASK, **way)
        assert torch.equal(found, expected), way


# --- kinds of cache that share nothing ----------------------------------------------------------------------


class Unshared(DynamicCache):
    """A kind that can't fork."""

    can = DynamicCache.can - {FORK}


class Folded(DynamicCache):
    """A kind that can't roll back freely, as a recurrent state can't: only to where a trial began."""

    can = frozenset({"try_tokens", "select_rows", "ragged"})

    def __init__(self) -> None:
        super().__init__()
        self.began: list[int] | None = None

    def begin_trial(self) -> None:
        self.began = list(self.lengths)

    def truncate(self, lengths: Sequence[int]) -> None:
        assert list(lengths) == self.began, "only what a trial remembers can be taken back"
        self.lengths, self.began = list(lengths), None


@pytest.mark.parametrize("kind", [Unshared, Folded])
@pytest.mark.parametrize("low_memory", [False, True])
def test_kinds_that_share_nothing(kind: type[Cache], low_memory: bool) -> None:
    for model in (FakeModel(), load_model("llama").model):
        asked = {**pad_left(ROWS), "max_new_tokens": 7, "eos_token_id": None} | ASK
        found = generate(model, **asked, past_key_values=kind(), low_memory=low_memory)
        assert torch.equal(found, generate(model, **asked))


def test_a_failing_pass_leaves_the_cache_as_it_was() -> None:
    model, cache = FakeModel(), Unshared()
    forward = model.forward

    def fail_at_candidates(tokens: torch.Tensor, *rest: Any, **more: Any) -> Any:
        if tokens.shape == (8, 1):
            raise MemoryError("no room")
        return forward(tokens, *rest, **more)

    model.forward = fail_at_candidates  # the pass that fails
    with pytest.raises(ResourceError, match="memory ran out"):
        generate(model, [[1, 2, 3], [4, 5, 6]], max_new_tokens=3, past_key_values=cache, **ASK)
    assert cache.lengths == []


# --- what can't be ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"penalty_alpha": -0.1}, "`penalty_alpha` must be at least 0"),
        ({"penalty_alpha": 1.01}, "`penalty_alpha` must be at most 1"),
        ({"penalty_alpha": float("nan")}, "`penalty_alpha`"),
        ({"penalty_alpha": float("inf")}, "`penalty_alpha`"),
        ({"penalty_alpha": "much"}, "`penalty_alpha` must be a number"),
        ({"top_k": 1}, "`top_k` is 1; set `top_k` to 2 or more"),
        ({"top_k": 0}, "`top_k` is 0"),
        ({"top_k": None}, "`top_k` is None"),
        ({"top_k": [4, 1]}, "set `top_k` to 2 or more"),
        ({"top_k": [4, 4, 4]}, "3 values for 2 prompts"),
        ({"top_k": 24}, "`top_k`=24 candidates were asked for, and the vocabulary has 23 tokens"),
        ({"do_sample": True}, "`do_sample`=True, set in the call, for another way to decode; pass `do_sample=False`"),
        ({"num_beams": 2, "top_k": 50}, "`num_beams`=2, set in the call"),
        ({"num_return_sequences": 2}, "all would be the same"),
        ({"temperature": 0.5}, "only read when sampling"),
        ({"low_memory": True, "penalty_alpha": None, "top_k": 50}, "this is neither"),
        ({"low_memory": True, "penalty_alpha": 0.0, "top_k": 50}, "this is neither"),
        ({"penalty_alpha": 0.0}, "`top_k` is set to `4`, which is only read when sampling"),
    ],
    ids=str,
)
def test_what_cant_be_is_said_before_the_first_pass(asked: dict[str, Any], said: str) -> None:
    model = FakeModel()
    with pytest.raises(SettingError) as error:
        generate(model, [[1, 2], [3, 4]], max_new_tokens=3, **ASK | asked)
    assert said in str(error.value)
    assert model.num_passes == 0


def test_off_is_greedy_search() -> None:
    model = FakeModel()
    expected = generate(model, [[1, 2]], max_new_tokens=6)
    for off in (None, 0, 0.0):
        assert torch.equal(generate(model, [[1, 2]], max_new_tokens=6, penalty_alpha=off, low_memory=False), expected)


def test_rows_are_bounded() -> None:
    model = FakeModel(2_000)
    with pytest.raises(SettingError, match="`top_k`=1999 candidates for each of 40 prompts make 79960 rows"):
        generate(model, [[1, 2]] * 40, max_new_tokens=3, penalty_alpha=0.6, top_k=1_999)
    assert model.num_passes == 0


def test_a_filled_cache_has_no_states() -> None:
    model = load_model("llama").model
    kept = generate(model, [[5, 9, 14]], max_new_tokens=3, eos_token_id=None, return_dict_in_generate=True)
    with pytest.raises(SettingError, match="past_key_values hold keys and values of its first part, not its states"):
        generate(model, kept.sequences, max_new_tokens=3, past_key_values=kept.past_key_values, **ASK)


def test_a_model_without_states() -> None:
    model = FakeModel(can=frozenset({"hidden_states"}))
    with pytest.raises(UnsupportedError, match="compares hidden states, and a fake model does not return one"):
        generate(model, [[1, 2]], max_new_tokens=3, **ASK)
    assert model.num_passes == 0

"""Contrastive search beside the loop that recomputes everything, whatever the model, the batch and the cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.conformance.cases import load_model
from tests.fakes import FakeEncoderDecoder, FakeModel, make_tokenizer, pad_left
from unspool import DynamicCache, StaticCache, generate, stream
from unspool.api.calls import start
from unspool.cache import FORK, Cache
from unspool.errors import NoTokenLeftError, ResourceError, SettingError, UnsupportedError

Reading = Callable[[list[list[int]]], tuple[torch.Tensor, torch.Tensor]]
"""The logits (texts, vocab) that follow texts of one length, and the states (texts, length, hidden) they consist of."""

ROWS = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [11, 1]]
ASK: dict[str, Any] = {"penalty_alpha": 0.6, "top_k": 4}
WAYS: list[dict[str, Any]] = [
    {},
    {"low_memory": True},
    {"use_cache": False},
    {"use_cache": False, "low_memory": True},
    {"cache_implementation": "static"},
    {"cache_implementation": "static", "low_memory": True, "max_cache_len": 40},
    {"prefill_chunk_size": 1},
    {"prefill_chunk_size": 3},
]


def search_slowly(
    read: Reading,
    prompt: Sequence[int],
    num_new: int,
    alpha: float = 0.6,
    k: int = 4,
    eos: Sequence[int] = (),
    process: Callable[[list[int], torch.Tensor], torch.Tensor] = lambda _, logits: logits,
) -> list[int]:
    """The tokens after a prompt by the paper's words: no cache, no batch, every candidate's whole text read again."""
    ids = list(prompt)
    while len(ids) < len(prompt) + num_new:
        logits, past = (each[0] for each in read([ids]))
        probabilities = process(ids, logits).softmax(-1)
        best, chosen = -torch.inf, -1
        candidates = probabilities.topk(k).indices.tolist()
        states = read([[*ids, token] for token in candidates])[1][:, -1]
        for token, state in zip(candidates, states, strict=True):
            likeness = max(float(F.cosine_similarity(state, other, dim=0)) for other in past)
            value = (1 - alpha) * float(probabilities[token]) - alpha * likeness
            if value > best and probabilities[token] > 0:
                best, chosen = value, token
        ids.append(chosen)
        if chosen in eos:
            break
    return ids[len(prompt) :]


def read_fake(model: FakeModel, **score: Any) -> Reading:
    """A fake's reading, by its definition."""

    def read(texts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        logits = [model.score(ids, **score) for ids in texts]
        states = [[FakeModel.score(model, ids[: end + 1]) @ model.reading for end in range(len(ids))] for ids in texts]
        return torch.stack(logits), torch.stack([torch.stack(each) for each in states])

    return read


def read_native(model: Any, source: Sequence[int] = ()) -> Reading:
    """A native model's reading of a whole text, without a cache."""

    def read(texts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        name = "decoder_input_ids" if source else "input_ids"
        given = {"input_ids": torch.tensor([list(source)] * len(texts))} if source else {}
        output = model(**given, **{name: torch.tensor(texts)}, output_hidden_states=True, use_cache=False)
        states = output.decoder_hidden_states if source else output.hidden_states
        return output.logits[:, -1], states[-1]

    return read


@cache
def expect_native(name: str, prompt: tuple[int, ...], num_new: int, source: tuple[int, ...] = ()) -> list[int]:
    """What the slow loop finds with a reference model."""
    return search_slowly(read_native(load_model(name).model, source), prompt, num_new)


def cut(sequences: torch.Tensor, rows: Sequence[Sequence[int]], new: Sequence[Sequence[int]]) -> list[list[int]]:
    """The new tokens of each row, as many as are expected, of left-padded sequences."""
    width = max(map(len, rows))
    return [found[width : width + len(tokens)] for found, tokens in zip(sequences.tolist(), new, strict=True)]


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


@settings(max_examples=25, deadline=None)
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


# --- with everything else -----------------------------------------------------------------------------------


def test_one_pass_a_token_and_rows_that_are_done_leave() -> None:
    model = FakeModel()
    new = [search_slowly(read_fake(model), row, 12) for row in ROWS]
    ends = [new[0][2]]
    new = [search_slowly(read_fake(model), row, 12, eos=ends) for row in ROWS]
    generate(model, **pad_left(ROWS), max_new_tokens=12, eos_token_id=ends, pad_token_id=0, **ASK)
    live = [sum(len(tokens) > step for tokens in new) for step in range(12)]
    assert model.rows_of_passes == [4, *(4 * rows for rows in live)]


def test_processors_act_before_the_candidates_are_chosen() -> None:
    model = load_model("llama").model
    rows = [[5, 9, 14, 3, 20], [6, 2, 33]]

    def process(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        seen = torch.zeros_like(logits, dtype=torch.bool)
        seen[ids] = True
        scores = torch.where(seen, torch.where(logits < 0, logits * 1.5, logits / 1.5), logits)
        scores[[7, 12]] = -torch.inf
        return scores

    new = [search_slowly(read_native(model), row, 8, process=process) for row in rows]
    for way in WAYS[:2]:
        found = generate(
            model,
            **pad_left(rows, pad=rows[0][0]),
            max_new_tokens=8,
            eos_token_id=None,
            repetition_penalty=1.5,
            suppress_tokens=[7, 12],
            **ASK,
            **way,
        )
        assert cut(found[:1], rows[:1], new[:1]) == new[:1]
    alone = generate(
        model, [rows[1]], max_new_tokens=8, eos_token_id=None, repetition_penalty=1.5, suppress_tokens=[7, 12], **ASK
    )
    assert alone.tolist() == [rows[1] + new[1]]


def test_what_is_forbidden_is_never_taken_however_new_it_is() -> None:
    """The reference lets a token of probability zero win by its penalty alone."""
    model = FakeModel()
    allowed = [3, 5]
    found = generate(
        model,
        [[1, 2]],
        max_new_tokens=20,
        penalty_alpha=1.0,
        top_k=9,
        prefix_allowed_tokens_fn=lambda _row, _ids: allowed,
    )
    assert set(found[0, 2:].tolist()) <= set(allowed)
    forced = generate(model, [[1, 2]], max_new_tokens=6, forced_eos_token_id=7, eos_token_id=7, **ASK)
    assert forced[0, -1] == 7


def test_no_token_left_is_explained() -> None:
    model = FakeModel()
    with pytest.raises(NoTokenLeftError, match="row 1"):
        generate(
            model,
            **pad_left(ROWS),
            max_new_tokens=3,
            logits_processor=[lambda ids, scores: scores.masked_fill(ids[:, -1:] == 8, -torch.inf)],
            **ASK,
        )


@pytest.mark.parametrize("name", ["fake", "llama"])
def test_stream_is_collect(name: str) -> None:
    model = FakeModel() if name == "fake" else load_model(name).model
    ends = [search_slowly(read_fake(model), ROWS[1], 5)[-1]] if name == "fake" else None
    whole = generate(model, **pad_left(ROWS), max_new_tokens=9, eos_token_id=ends, pad_token_id=0, **ASK)
    rows: list[list[int]] = [[] for _ in ROWS]
    for emitted in stream(model, **pad_left(ROWS), max_new_tokens=9, eos_token_id=ends, pad_token_id=0, **ASK):
        for row, tokens in emitted.tokens.items():
            rows[row] += tokens
    assert cut(whole, ROWS, rows) == rows


def test_stops() -> None:
    model, tokenizer = FakeModel(160), make_tokenizer()
    free = generate(model, [[70, 71]], max_new_tokens=12, **ASK)[0, 2:].tolist()
    text = tokenizer.decode(free[4:5])
    first = next(n for n, token in enumerate(free) if text in tokenizer.decode([token]))
    stopped = generate(model, [[70, 71]], max_new_tokens=12, stop_strings=text, tokenizer=tokenizer, **ASK)
    assert stopped[0, 2:].tolist() == free[: first + 1]
    assert generate(model, [[70, 71]], max_new_tokens=12, max_time=0.0, **ASK)[0, 2:].tolist() == free[:1]

    def after_three(ids: torch.Tensor, _scores: Any) -> bool:
        return ids.shape[1] >= 5

    stopped = generate(model, [[70, 71]], max_new_tokens=12, stopping_criteria=[after_three], **ASK)
    assert stopped[0, 2:].tolist() == free[:3]


EVERYTHING = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}


@pytest.mark.parametrize("way", [{}, {"low_memory": True}, {"cache_implementation": "static"}], ids=str)
@pytest.mark.parametrize("name", ["llama", "gemma2", "bloom", "fake"])
def test_outputs_are_those_of_reading_the_text(name: str, way: dict[str, Any]) -> None:
    """Logits, states and weights of every step are what reading the finished text gives."""
    model = FakeModel() if name == "fake" else load_model(name).model
    rows = [[5, 9, 14, 3, 20], [6, 2, 13]]
    asked = {**pad_left(rows), "max_new_tokens": 6, "eos_token_id": None, "suppress_tokens": [4]}
    output = generate(model, **asked, **EVERYTHING, **ASK, **way)
    assert torch.equal(output.sequences, generate(model, **asked, **ASK))
    assert output.past_key_values.lengths == [5 + 6 - 1, 3 + 6 - 1]
    assert len(output.scores) == len(output.logits) == len(output.hidden_states) == len(output.attentions) == 6
    forced = generate(
        model,
        **asked | {"suppress_tokens": None},
        **EVERYTHING,
        prefix_allowed_tokens_fn=lambda row, ids: [int(output.sequences[row, len(ids)])],
    )  # greedy search made to write the same text
    assert torch.equal(forced.sequences, output.sequences)
    for step in range(6):
        torch.testing.assert_close(output.logits[step], forced.logits[step], atol=1e-4, rtol=1e-4)
        expected = output.logits[step].clone()
        expected[:, 4] = -torch.inf
        assert torch.equal(output.scores[step], expected)
        for kind in ("hidden_states", "attentions"):
            for mine, theirs in zip(getattr(output, kind)[step], getattr(forced, kind)[step], strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)
    for mine, theirs in zip(output.past_key_values, forced.past_key_values, strict=True):
        for found, expected in zip(mine, theirs, strict=True):
            for row, length in enumerate(output.past_key_values.lengths):
                torch.testing.assert_close(found[row, :, :length], expected[row, :, :length], atol=1e-4, rtol=1e-4)


def test_an_encoder_decoders_outputs() -> None:
    model = load_model("t5").model
    asked = {**pad_left([[5, 9, 14, 3], [6, 2]]), "max_new_tokens": 5, "eos_token_id": None}
    output = generate(model, **asked, **EVERYTHING, **ASK)
    forced = generate(
        model,
        **asked,
        **EVERYTHING,
        prefix_allowed_tokens_fn=lambda row, ids: [int(output.sequences[row, len(ids)])],
    )
    for step in range(5):
        for kind in ("decoder_hidden_states", "decoder_attentions", "cross_attentions"):
            for mine, theirs in zip(getattr(output, kind)[step], getattr(forced, kind)[step], strict=True):
                torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def test_a_returned_cache_can_be_continued() -> None:
    model = load_model("llama").model
    ids = torch.tensor([[5, 9, 14, 3, 20]])
    kept = {"eos_token_id": None, "return_dict_in_generate": True}
    first = generate(model, ids, max_new_tokens=6, **ASK, **kept)
    expected = generate(model, first.sequences, max_new_tokens=4, eos_token_id=None)
    found = generate(model, first.sequences, max_new_tokens=4, eos_token_id=None, past_key_values=first.past_key_values)
    assert torch.equal(found, expected)
    legacy = generate(model, ids, max_new_tokens=6, return_legacy_cache=True, **ASK, **kept).past_key_values
    assert legacy[0][0].shape[2] == 5 + 6 - 1
    broken_off = start(model, ids, max_new_tokens=6, **ASK, **kept)
    steps = iter(broken_off)
    for _ in range(2):
        next(steps)
    steps.close()
    assert broken_off.output().past_key_values.lengths == [5 + 2 - 1]


def test_an_empty_cache_of_the_callers() -> None:
    model = load_model("llama").model
    ids = torch.tensor([[5, 9, 14, 3, 20]])
    expected = generate(model, ids, max_new_tokens=6, eos_token_id=None, **ASK)
    for empty in (DynamicCache(), StaticCache(model.config, 1, 5 + 6 - 1 + 4)):
        found = generate(model, ids, max_new_tokens=6, eos_token_id=None, past_key_values=empty, **ASK)
        assert torch.equal(found, expected)
    with pytest.raises(SettingError, match="needs 14"):
        short = StaticCache(model.config, 1, 13)
        generate(model, ids, max_new_tokens=6, eos_token_id=None, past_key_values=short, **ASK)


@pytest.mark.parametrize("name", ["fake", "llama"])
def test_log_probabilities(name: str) -> None:
    model = FakeModel() if name == "fake" else load_model(name).model
    asked = {**pad_left(ROWS), "max_new_tokens": 5, "return_dict_in_generate": True, "eos_token_id": None} | ASK
    output = generate(model, **asked, logprobs=2, prompt_logprobs=1, output_logits=True)
    assert torch.equal(output.sequences, generate(model, **asked).sequences)  # the prompt's states are all there
    greedy = generate(model, **asked | {"penalty_alpha": None, "top_k": 50}, prompt_logprobs=1)
    assert output.prompt_logprobs == greedy.prompt_logprobs
    for row, told in enumerate(output.logprobs):
        for step, one in enumerate(told):
            assert one.token_id == output.sequences[row, 5 + step]
            expected = output.logits[step][row].log_softmax(-1)[one.token_id]
            assert abs(one.logprob - float(expected)) < 1e-5


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
        ({"do_sample": True}, "`do_sample`=True, set in the call, for another way to decode; pass do_sample=False"),
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
    with pytest.raises(UnsupportedError, match="compares hidden states, and a fake model returns none"):
        generate(model, [[1, 2]], max_new_tokens=3, **ASK)
    assert model.num_passes == 0

"""Contrastive search with processors, stops, streams, outputs and caches of the caller's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.conformance.cases import load_model
from tests.decoding.contrastive import ASK, ROWS, WAYS, cut, read_fake, read_native, search_slowly
from tests.fakes import FakeModel, make_tokenizer, pad_left
from unspool import DynamicCache, StaticCache, generate, stream
from unspool.api.starting import start
from unspool.errors import NoTokenLeftError, SettingError


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

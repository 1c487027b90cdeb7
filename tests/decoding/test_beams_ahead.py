"""Beam searches launched a step ahead give what searches step by step give. The device is played by the CPU here."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import unspool
from tests.conformance.cases import load_model
from unspool.cache.stores.plain import PlainStore
from unspool.decoding import choice, reader
from unspool.decoding.beams import ahead as beams_ahead
from unspool.decoding.beams.ahead import AheadBeamTurns
from unspool.decoding.beams.selection import Drawing, find_candidates, read_candidates, select_by_operators
from unspool.decoding.beams.settings import NEVER, BeamSettings
from unspool.errors import NoTokenLeftError
from unspool.kernels.beam_choice import BeamChoice, BeamMemory, ChosenBeams
from unspool.protocols import Ask, Forward


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Searches run ahead from now on; the turns that were made for them."""
    made: list[Any] = []
    start = AheadBeamTurns.__init__

    def note(self: AheadBeamTurns, *args: Any, **kwargs: Any) -> None:
        start(self, *args, **kwargs)
        made.append(self)

    launch = AheadBeamTurns._launch

    def count(self: Any) -> None:
        self.num_launched += 1
        launch(self)

    monkeypatch.setattr(AheadBeamTurns, "__init__", note)
    monkeypatch.setattr(AheadBeamTurns, "num_launched", 0, raising=False)
    monkeypatch.setattr(AheadBeamTurns, "_launch", count)
    monkeypatch.setattr(choice, "can_search_ahead", lambda *_, **__: True)
    monkeypatch.setattr(PlainStore, "can_follow", lambda store, _: bool(store.buffers))
    return made


@pytest.fixture
def choosing(monkeypatch: pytest.MonkeyPatch, ahead: list[Any]) -> list[BeamChoice]:
    """Passes choose beams at their end, as captured ones do; what they chose by."""
    asked: list[BeamChoice] = []
    answer = reader.answer_at_once

    def choose(ask: Ask) -> Forward:
        choice = ask.want.epilogue
        if not isinstance(choice, BeamChoice):
            return answer(ask)
        asked.append(choice)
        forward = answer(replace(ask, want=replace(ask.want, epilogue=None)))
        is_overwritten = len(asked) % 3 == 0
        forward.epilogue = choose_by_operators(forward.logits, choice, is_overwritten=is_overwritten)
        forward.logits = torch.full_like(forward.logits, torch.nan)  # nobody may look at them
        return forward

    monkeypatch.setattr(reader, "answer_at_once", choose)
    monkeypatch.setattr(beams_ahead, "fits_kernels", lambda *_: True)
    return asked


def choose_by_operators(logits: torch.Tensor, choice: BeamChoice, *, is_overwritten: bool = False) -> ChosenBeams:
    sizes, rows = choice.sizes, len(logits)
    assert choice.before is not None and choice.mask is not None
    settings = make_settings(num_beams=sizes.num_beams, eos_token_ids=tuple(choice.ends.tolist()))
    assert settings.num_candidates == sizes.num_candidates
    scores = logits.float().log_softmax(-1) + choice.mask
    found = select_by_operators(scores, choice.before.running, choice.ends, settings)
    memory = BeamMemory(rows + 3, sizes, logits.device)  # graphs are made for more rows
    parts = memory.find_parts(rows)
    for part, values in zip(parts, (found.packed, found.parents, found.column, found.running), strict=True):
        part.copy_(values)
    chosen = ChosenBeams(memory, rows)
    if is_overwritten:  # by another search's pass
        chosen._fetched._values = memory.held.clone()  # as it is copied on a device
        memory.held.fill_(-7)
        memory.num_runs += 1
    return chosen


PROMPTS = [[5, 17, 90, 4], [40, 41], [100, 7, 8, 9, 60, 3], [11, 12, 13]]
MANY_ENDS = list(range(2, 40))
SETTINGS: list[dict[str, Any]] = [
    {"num_beams": 4, "eos_token_id": None},
    {"num_beams": 3, "num_return_sequences": 2, "eos_token_id": MANY_ENDS},  # searches end at different steps
    {"num_beams": 3, "eos_token_id": MANY_ENDS, "early_stopping": True, "length_penalty": 2.0},
    {"num_beams": 2, "eos_token_id": [9, 18, 27], "early_stopping": "never", "length_penalty": -1.0},
    {"num_beams": 3, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2, "eos_token_id": 5},
    {"num_beams": 3, "do_sample": True, "seed": 3, "top_k": 20, "temperature": 1.5, "eos_token_id": MANY_ENDS},
    {"num_beams": 2, "guidance_scale": 1.5, "eos_token_id": 5},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("count", [2, 12])
def test_sequences_are_those_of_searches_step_by_step(settings: dict[str, Any], count: int, request: Any) -> None:
    lm = load_model("llama")
    expected = lm.generate(PROMPTS, max_new_tokens=count, **settings)
    made = request.getfixturevalue("ahead")
    found = lm.generate(PROMPTS, max_new_tokens=count, **settings)
    assert found.token_ids == expected.token_ids
    assert found.finish_reasons == expected.finish_reasons
    assert found.stats.forward_passes == expected.stats.forward_passes
    assert len(made) == 1 and not made[0]._flights and made[0]._unfollowed is None


FORBIDDING: list[dict[str, Any]] = [
    {"num_beams": 3, "suppress_tokens": list(range(20, 90)), "eos_token_id": MANY_ENDS},
    {"num_beams": 2, "bad_words_ids": [[7], [8], [9]], "forced_eos_token_id": 5, "eos_token_id": 5},
    {"num_beams": 3, "min_new_tokens": 6, "begin_suppress_tokens": [3, 4], "eos_token_id": MANY_ENDS},
]


@pytest.mark.parametrize("settings", [*SETTINGS[:4], *FORBIDDING], ids=str)
@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize("kind", [None, "paged"])
def test_passes_that_choose_give_the_same(settings: dict[str, Any], name: str, kind: str | None, request: Any) -> None:
    lm = load_model(name)
    told = {"max_new_tokens": 12, "cache_implementation": kind, **settings}
    expected = lm.generate(PROMPTS, **told)
    asked = request.getfixturevalue("choosing")
    found = lm.generate(PROMPTS, **told)
    assert found.token_ids == expected.token_ids
    assert found.finish_reasons == expected.finish_reasons
    assert found.stats.forward_passes == expected.stats.forward_passes
    assert len(asked) > 1


@pytest.mark.parametrize("settings", [SETTINGS[4], SETTINGS[5], SETTINGS[6]], ids=str)
def test_passes_do_not_choose_what_depends_on_more(settings: dict[str, Any], choosing: list[BeamChoice]) -> None:
    load_model("llama").generate(PROMPTS, max_new_tokens=4, **settings)
    assert not choosing


@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_logits_without_a_token_are_explained_from_the_candidates(
    value: float, choosing: list[BeamChoice], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = load_model("llama")
    answer = reader.answer_at_once

    def spoil(ask: Ask) -> Forward:
        forward = answer(ask)
        if len(choosing) == 4:
            assert isinstance(ask.want.epilogue, BeamChoice)
            forward.epilogue = choose_by_operators(torch.full_like(forward.logits, value), ask.want.epilogue)
        return forward

    monkeypatch.setattr(reader, "answer_at_once", spoil)
    cause = "logits are NaN"  # those of the candidates: a row of nothing but -inf has no other log-probabilities
    with pytest.raises(NoTokenLeftError, match=rf"row [01], at position 8.*{cause}"):
        lm.generate(PROMPTS[:1], num_beams=2, max_new_tokens=30, eos_token_id=None)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_cache_that_cannot_follow_is_told_every_step(settings: dict[str, Any], request: Any) -> None:
    lm = load_model("llama")
    expected = lm.generate(PROMPTS, max_new_tokens=12, cache_implementation="paged", **settings)
    made = request.getfixturevalue("ahead")
    found = lm.generate(PROMPTS, max_new_tokens=12, cache_implementation="paged", **settings)
    assert found.token_ids == expected.token_ids
    assert found.finish_reasons == expected.finish_reasons
    assert found.stats.forward_passes == expected.stats.forward_passes
    assert len(made) == 1 and not made[0].num_launched


@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize("ends", [None, MANY_ENDS], ids=["by length", "by an end"])
def test_scores_origins_and_cache_of_one_prompt(name: str, ends: list[int] | None, request: Any) -> None:
    lm = load_model(name)
    told: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 9, "eos_token_id": ends, "return_beam_trace": True}
    told |= {"return_dict_in_generate": True, "num_return_sequences": 3}
    expected = lm.generate(PROMPTS[:1], **told).output
    made = request.getfixturevalue("ahead")
    found = lm.generate(PROMPTS[:1], **told).output
    assert found.sequences.tolist() == expected.sequences.tolist()
    assert found.beam_indices.tolist() == expected.beam_indices.tolist()
    assert found.beam_trace.steps == expected.beam_trace.steps
    held, own = found.past_key_values, expected.past_key_values
    if name == "llama":
        assert held.lengths == own.lengths
        for layer in range(len(own)):
            for one, two in zip(held[layer], own[layer], strict=True):
                torch.testing.assert_close(one, two)
    assert len(made) == 1 and made[0].num_launched > 2


def test_a_stream_emits_the_same_and_can_be_closed(request: Any) -> None:
    lm = load_model("llama")
    told: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 12, "eos_token_id": MANY_ENDS}
    model, ids = lm.model, torch.tensor(PROMPTS[:1])
    expected = list(unspool.stream(model, ids, **told))
    made = request.getfixturevalue("ahead")
    assert list(unspool.stream(model, ids, **told)) == expected
    stream = unspool.stream(model, ids, **told)
    next(stream)
    stream.close()
    assert len(made) == 2 and not made[1]._flights


def test_no_token_left_is_explained_at_its_own_step(request: Any) -> None:
    lm = load_model("llama")
    vocab = lm.model.info.vocab_size
    # Each token may be written once: after so many steps none is left but those that were never allowed.
    told: dict[str, Any] = {"num_beams": 2, "max_new_tokens": 30, "no_repeat_ngram_size": 1, "eos_token_id": None}
    told["suppress_tokens"] = list(range(12, vocab))
    with pytest.raises(NoTokenLeftError) as expected:
        lm.generate([[1, 2, 3]], **told)
    made = request.getfixturevalue("ahead")
    with pytest.raises(NoTokenLeftError) as found:
        lm.generate([[1, 2, 3]], **told)
    assert str(found.value) == str(expected.value) and "NoRepeatNGram" in str(found.value)
    assert len(made) == 1


def make_settings(**more: Any) -> BeamSettings:
    told: dict[str, Any] = {"num_beams": 3, "num_returned": 1, "length_penalty": 1.0, "early_stopping": False}
    return BeamSettings(**{**told, "do_sample": False, "eos_token_ids": (2,), "max_new_tokens": 9, **more})


def test_beams_that_end_go_on_last() -> None:
    settings = make_settings(num_beams=2)
    scores = torch.full((2, 6), -20.0)
    scores[0, 2], scores[0, 4], scores[1, 2], scores[1, 5] = -0.1, -3.0, -0.2, -2.0
    found = select_by_operators(scores, torch.tensor([0.0, -0.5]), torch.tensor([2]), settings)
    assert found.tokens.tolist() == [5, 4] and found.parents.tolist() == [1, 0]
    assert found.running.tolist() == pytest.approx([-2.5, -3.0])
    tokens, beams, best = read_candidates(found.packed)
    assert (tokens, beams) == ([[2, 2, 5, 4]], [[0, 1, 1, 0]])
    assert best[0] == pytest.approx([-0.1, -0.7, -2.5, -3.0])


def test_with_too_few_others_a_beam_that_ends_stays_crossed_out() -> None:
    scores = torch.full((2, 4), -torch.inf)
    scores[0, 2], scores[1, 1] = -1.0, -4.0
    found = select_by_operators(scores, torch.zeros(2), torch.tensor([2]), make_settings(num_beams=2))
    assert found.tokens.tolist() == [1, 2] and found.parents.tolist() == [1, 0]
    assert found.running.tolist() == [-4.0, torch.tensor(-1.0 + NEVER, dtype=torch.float32).item()]


def test_drawn_candidates_are_no_twins() -> None:
    settings = make_settings(do_sample=True)
    drawing = Drawing(torch.tensor([3, 4]), torch.tensor([10, 10]))
    scores = torch.randn(6, 50, generator=torch.Generator().manual_seed(0)).log_softmax(-1)
    tokens, beams, best = find_candidates(scores, torch.zeros(6), settings, drawing)
    for prompt in range(2):
        pairs = list(zip(tokens[prompt].tolist(), beams[prompt].tolist(), strict=True))
        assert len(set(pairs)) == settings.num_candidates
        told = [scores[prompt * 3 + beam, token].item() for token, beam in pairs]
        assert best[prompt].tolist() == told

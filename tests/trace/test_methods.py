"""What events say of each method: checked against the method's own results."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
import torch

from tests.conformance.cases import load_model
from tests.engine.fakes import FakeWithLayers, make_lm
from tests.fakes import FakeModel
from tests.trace.test_same_tokens import PROMPT, REPEATING, find_lm
from unspool import (
    GumbelWatermarkingConfig,
    LanguageModel,
    SynthIDTextWatermarkingConfig,
    WatermarkDetector,
    WatermarkingConfig,
)
from unspool.decoding.loop import Emitted
from unspool.decoding.observer import DraftChecked, Scored
from unspool.decoding.strategies import stretch
from unspool.decoding.stretching import take_steps
from unspool.errors import SettingError
from unspool.trace import Tracer
from unspool.trace.methods import judge_draft

DRAWN: dict[str, Any] = {"do_sample": True, "seed": 5}


REPORTS = {
    "scorer": ("Scored", "ProcessorStep"),
    "readouts.dola": ("LayersContrasted",),
    "readouts.guidance": ("Guided",),
    "strategies.candidates": ("CandidatesCompared",),
    "speculative.turns": ("DraftChecked",),
    "beams.trace": ("TraceStep",),
}


def trace(lm: LanguageModel, prompt: Any = PROMPT, **settings: Any) -> list[dict[str, Any]]:
    return list(lm.trace(prompt, **{"max_new_tokens": 10, **settings}))


def take(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == kind]


# --- branches ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", ["llama", "t5"])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {**DRAWN, "top_p": 0.9, "presence_penalty": 0.4, "repetition_penalty": 1.2},
        {"repetition_penalty": 1.3, "repetition_penalty_ignores_prompt": True, "min_new_tokens": 9},
        {"encoder_repetition_penalty": 1.4, "encoder_no_repeat_ngram_size": 2, "begin_suppress_tokens": [31]},
        {"exponential_decay_length_penalty": (2, 1.2), "min_length": 9},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"regex": "(the|cat|and| ){2,20}"},
        {**DRAWN, "watermarking_config": SynthIDTextWatermarkingConfig(keys=[654, 400, 836], ngram_len=3)},
        {**DRAWN, "watermarking_config": GumbelWatermarkingConfig(context_width=2)},
        {"dola_layers": [1, 2]},
        {"guidance_scale": 1.5},
        {"guidance_scale": 1.5, "negative_prompt": [5, 6, 7]},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=str,
)
def test_a_texts_own_beginning_gives_its_rest(model: str, settings: dict[str, Any]) -> None:
    if model == "t5" and ("dola_layers" in settings or ("guidance_scale" in settings and len(settings) == 1)):
        pytest.skip("for decoders, or with a negative prompt")
    lm = find_lm(model)
    whole = trace(lm, **settings)
    ids = whole[-1]["sequences"][0]["ids"]
    num_written = min(4, len(ids) - 1)
    events = trace(lm, prefix_ids=ids[:num_written], **settings)
    assert [one["id"] for one in events[0]["prefix"]] == ids[:num_written]
    assert events[0]["prompt"] == whole[0]["prompt"]
    assert events[-1]["sequences"][0]["ids"] == ids and events[-1]["text"] == whole[-1]["text"]
    assert events[-1]["finish_reason"] == whole[-1]["finish_reason"]
    for one, other in zip(take(events, "token"), take(whole, "token")[num_written:], strict=True):
        for name in ("index", "id", "rank", "watermark", "grammar"):
            assert one.get(name) == other.get(name)
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-4)
        assert [step["left"] for step in one["steps"]] == [step["left"] for step in other["steps"]]


def test_beams_go_on_after_a_prefix() -> None:
    lm = find_lm("llama")
    events = trace(lm, prefix_ids=[7, 8], num_beams=3, num_return_sequences=2)
    assert [one["ids"][:2] for one in events[-1]["sequences"]] == [[7, 8]] * 2
    assert [event["step"] for event in take(events, "beams")] == list(range(2, 10))
    assert len(events[-1]["sequences"][0]["beams"]) == 8
    rest = lm.generate([*PROMPT, 7, 8], max_new_tokens=8, num_beams=3, num_return_sequences=2)
    assert [one["ids"][2:] for one in events[-1]["sequences"]] == rest.token_ids


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"prefix_ids": [5] * 10}, "counts them too"),
        ({"prefix_ids": [999]}, "outside the model's vocabulary"),
        ({"prefix_ids": [5], "token_healing": True}, "leave one out"),
        ({"output_scores": True}, "does not go with a trace"),
        ({"logprobs": 3}, "has its probabilities"),
        ({"return_beam_trace": True, "num_beams": 2}, "beams of every step"),
        ({"num_return_sequences": 2, "do_sample": True}, "follows one text"),
    ],
)
def test_what_a_trace_can_not_be(settings: dict[str, Any], told: str) -> None:
    with pytest.raises((SettingError, ValueError), match=told):
        trace(find_lm("llama"), **settings)


def test_one_prompt_is_traced() -> None:
    with pytest.raises(SettingError, match="follows one text"):
        trace(find_lm("llama"), [PROMPT, PROMPT])


# --- processors -------------------------------------------------------------------------------------------------
def test_where_the_lines_lie() -> None:
    events = trace(make_lm(has_tokenizer=False), [3, 4, 5], **DRAWN, temperature=0.8, top_k=6, top_p=0.8, min_p=0.05)
    for event in take(events, "token"):
        steps = {step["setting"]: step for step in event["steps"]}
        assert list(steps) == ["temperature", "top_k", "top_p", "min_p"]
        assert steps["temperature"]["removed"] == 0 and steps["temperature"]["line"] is None
        assert steps["temperature"]["changed"] == steps["temperature"]["left"] == 23
        assert steps["top_k"]["left"] == 6 and steps["top_k"]["removed"] == 17
        raw = torch.tensor([one["raw"] for one in event["top"][:20]])
        cooled = (raw**1.25)[:6] / (raw**1.25)[:6].sum()  # what top_p is given
        kept = int((cooled.cumsum(0) - cooled < 0.8).sum())
        assert steps["top_p"]["left"] == kept
        if kept < 6:
            assert steps["top_p"]["line"] == pytest.approx(float(cooled[kept - 1]), rel=1e-2)
        for place, one in enumerate(event["top"][:20]):
            by_k, by_p = place >= 6, kept <= place < 6
            assert (one["cut_by"] == "TopKLogitsWarper") == by_k and (one["cut_by"] == "TopPLogitsWarper") == by_p


def test_a_callers_processor_has_no_setting() -> None:
    def double(_: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.mul_(2)  # in place, as some are

    class Third:
        def __call__(self, _: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores.masked_fill(torch.arange(scores.shape[1]) % 3 != 0, -torch.inf)

    lm = make_lm()
    events = trace(lm, [3, 4, 5], logits_processor=[double, Third()])
    assert (
        events[-1]["sequences"][0]["ids"]
        == (lm.generate([3, 4, 5], max_new_tokens=10, logits_processor=[double, Third()]).token_ids[0])
    )
    for event in take(events, "token"):
        assert [(step["processor"], step["setting"]) for step in event["steps"]] == [("double", None), ("Third", None)]
        assert [step["removed"] for step in event["steps"]] == [0, 15]
        assert event["steps"][0]["changed"] == 23


def test_a_grammars_masks() -> None:
    lm = find_lm("llama")
    events = trace(lm, choice=["hello world", "hello cat"], max_new_tokens=20)
    tokens = take(events, "token")
    assert events[-1]["text"] in ("hello world", "hello cat")
    for event in tokens:
        assert event["grammar"]["forced"] == (event["grammar"]["allowed"] == 1)
        (step,) = [step for step in event["steps"] if step["processor"] == "GrammarLogitsProcessor"]
        assert step["setting"] == "choice" and step["left"] == event["grammar"]["allowed"]
    assert any(event["grammar"]["forced"] for event in tokens)
    assert not all(event["grammar"]["forced"] for event in tokens)


# --- watermarks -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "config",
    [
        WatermarkingConfig(bias=3.0, context_width=2),
        WatermarkingConfig(bias=3.0, seeding_scheme="selfhash", context_width=3),
        SynthIDTextWatermarkingConfig(keys=[654, 400, 836, 123], ngram_len=3),
        GumbelWatermarkingConfig(context_width=3),
    ],
    ids=lambda one: type(one).__name__,
)
def test_the_running_z_is_the_detectors(config: Any) -> None:
    lm = find_lm("llama")
    detector = WatermarkDetector({"vocab_size": 160, "bos_token_id": None}, "cpu", config)
    tokens = take(trace(lm, **DRAWN, watermarking_config=config, max_new_tokens=30, top_k=0), "token")
    ids = [event["id"] for event in tokens]
    first = detector.scorer.num_before
    assert [event["watermark"] for event in tokens[:first]] == [{"green": None, "scored": 0, "z": 0.0}] * first
    for place in range(first, len(ids)):
        told = detector(torch.tensor([ids[: place + 1]]), return_dict=True)
        assert tokens[place]["watermark"]["z"] == pytest.approx(told.z_score[0], rel=1e-4, abs=1e-5)
        assert tokens[place]["watermark"]["scored"] == told.num_tokens_scored[0]
        green = [event["watermark"]["green"] for event in tokens[first : place + 1]]
        assert sum(green) == told.num_green_tokens[0]


# --- readouts, candidates ---------------------------------------------------------------------------------------
def test_dolas_layers() -> None:
    model = FakeWithLayers(vocab=23)
    lm = make_lm(model)
    tokens = take(trace(lm, [3, 4, 5], dola_layers=[0, 2, 4]), "token")
    expected = lm.generate([3, 4, 5], max_new_tokens=10, dola_layers=[0, 2, 4])
    assert expected.dola_layers is not None
    assert [event["dola"]["layer"] for event in tokens] == expected.dola_layers[0]
    ids = [3, 4, 5]
    for event in tokens:
        values = {one["layer"]: one["value"] for one in event["dola"]["divergences"]}
        assert max(values, key=values.__getitem__) == event["dola"]["layer"] and list(values) == [0, 2, 4]
        for guess in event["dola"]["guesses"]:
            probabilities = torch.softmax(model.score_layer(ids, guess["layer"]), -1)
            assert guess["id"] == int(probabilities.argmax())
            assert guess["p"] == pytest.approx(float(probabilities.max()), rel=1e-4)
        assert event["steps"][0]["processor"] == "DoLa" and event["steps"][0]["setting"] == "dola_layers"
        ids.append(event["id"])


def test_guidance_with_and_without() -> None:
    model = FakeModel(23)
    lm = make_lm(model)
    ids, other = [3, 4, 5], [7, 8]
    for event in take(trace(lm, ids, guidance_scale=1.8, negative_prompt=other), "token"):
        own, negative = (torch.log_softmax(model.score(row), -1) for row in (ids, other))
        expected = {
            "without": own,
            "negative": negative,
            "with": torch.log_softmax(negative + 1.8 * (own - negative), -1),
        }
        for name, logprobs in expected.items():
            told = event["guidance"][name]
            assert [one["p"] for one in told] == pytest.approx(logprobs.topk(10).values.exp().tolist(), rel=1e-3)
            assert told[0]["id"] == int(logprobs.argmax())
        ids, other = [*ids, event["id"]], [*other, event["id"]]


def test_contrastive_candidates() -> None:
    for event in take(trace(find_lm("llama"), penalty_alpha=0.6, top_k=4), "token"):
        told = event["contrastive"]
        assert told["alpha"] == 0.6 and len(told["candidates"]) == 4
        best = max(told["candidates"], key=lambda one: one["score"])
        assert best["chosen"] and best["id"] == event["id"]
        assert sum(one["chosen"] for one in told["candidates"]) == 1
        for one in told["candidates"]:
            assert one["score"] == pytest.approx(0.4 * one["p"] - 0.6 * one["penalty"], abs=1e-5)
            assert -1.001 <= one["penalty"] <= 1.001
        assert [one["id"] for one in told["candidates"]] == [one["id"] for one in event["top"][:4]]


# --- drafts -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("drawn", [{}, {**DRAWN, "top_k": 12}])
def test_a_draft_models_guesses(drawn: dict[str, Any]) -> None:
    lm, assistant = find_lm("llama"), load_model("llama_draft")
    settings = {"assistant_model": assistant, "max_new_tokens": 16, **drawn}
    events = trace(lm, REPEATING, **settings)
    expected = lm.generate(REPEATING, **settings)
    assert [event["id"] for event in take(events, "token")] == expected.token_ids[0]
    drafts, stats = take(events, "draft"), events[-1]["stats"]
    assert drafts and events[0]["drafter"] == "draft_model"
    assert stats["drafted"] == drafts[-1]["total_drafted"] and stats["accepted"] == drafts[-1]["total_accepted"]


@pytest.mark.parametrize(
    ("num_drafted", "accepted", "taken", "verdicts", "kinds"),
    [
        (3, 3, 4, "aaa", "aaab"),
        (3, 1, 2, "aru", "ac"),
        (3, 0, 1, "ruu", "c"),
        (3, 2, 2, "aau", "aa"),  # the second ended the text
        (1, 1, 1, "a", "a"),
    ],
)
def test_verdicts(num_drafted: int, accepted: int, taken: int, verdicts: str, kinds: str) -> None:
    words = {"a": "accepted", "r": "rejected", "u": "unused", "b": "bonus", "c": "corrected"}
    found = judge_draft(DraftChecked([5] * num_drafted, accepted), taken)
    assert found == ([words[one] for one in verdicts], [words[one] for one in kinds])


# --- beams ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("words", [[[124], [127, 156, 32]], [[5, 6], [5, 6]], [[[68, 46], [19]]]], ids=str)
def test_constraints_fill_up(words: Any) -> None:
    lm = find_lm("llama")
    events = trace(lm, num_beams=5, force_words_ids=words, max_new_tokens=12)
    steps, end = take(events, "beams"), events[-1]
    beams = end["sequences"][0]["beams"]
    path = [step["live"][index]["progress"] for step, index in zip(steps, beams, strict=False) if index is not None]
    assert all(one["done"] == one["of"] for one in path[-1])
    assert [len(told) for told in path] == [len(words)] * len(path)
    for told in path:
        assert all(0 <= one["done"] <= one["of"] for one in told)
    assert path[-1][0]["phrase"].startswith(lm.tokenizer.decode(words[0][0] if words[0][0] != 5 else [5, 6])[:1])


def test_diverse_groups_are_told_apart() -> None:
    for event in take(trace(find_lm("llama"), num_beams=6, num_beam_groups=3, diversity_penalty=1.0), "beams"):
        assert [one["group"] for one in event["live"]] == [0, 0, 1, 1, 2, 2]
        assert [one["beam"] for one in event["live"]] == list(range(6))


def test_sound_is_traced() -> None:
    lm = load_model("whisper")
    shape = lm.model.info.features
    assert shape is not None
    prompt = {"input_features": torch.randn(1, shape.channels, shape.frames)}
    events = list(lm.trace(prompt, max_new_tokens=5))
    assert events[0]["prompt"] == []
    assert [event["id"] for event in take(events, "token")] == lm.generate(prompt, max_new_tokens=5).token_ids[0]


# --- cost -------------------------------------------------------------------------------------------------------
def test_steps_are_not_taken_at_once_in_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = find_lm("llama")
    expected = lm.generate(PROMPT, max_new_tokens=10).token_ids
    calls = []
    monkeypatch.setattr(stretch, "take_steps", lambda *given: calls.append(1) or take_steps(*given))
    events = trace(lm)
    assert not calls and [events[-1]["sequences"][0]["ids"]] == expected
    assert "one by one" in events[-1]["stats"]["path_reason"]
    lm.generate(PROMPT, max_new_tokens=10)
    if "stretches" in lm.model.info.can:
        assert calls  # without an observer the fast path is there


@pytest.mark.parametrize(
    "settings",
    [
        {"repetition_penalty": 1.2},
        {**DRAWN, "top_k": 5},
        {"num_beams": 3},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"dola_layers": [1, 2]},
        {"guidance_scale": 1.5},
        {"prompt_lookup_num_tokens": 3},
    ],
    ids=str,
)
def test_nothing_is_reported_if_nobody_observes(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("a report was made")

    for module, names in REPORTS.items():
        for name in names:
            monkeypatch.setattr(f"unspool.decoding.{module}.{name}", fail)
    find_lm("llama").generate(REPEATING, max_new_tokens=8, **settings)
    with pytest.raises(AssertionError, match="a report was made"):
        trace(find_lm("llama"), REPEATING, **settings)


def test_closing_ends_the_work() -> None:
    model = FakeModel(23)
    events = make_lm(model).trace([3, 4, 5], max_new_tokens=100, eos_token_id=None)
    assert model.num_passes == 0
    for _ in range(4):
        next(events)
    events.close()
    assert model.num_passes <= 4


def test_a_long_trace_keeps_nothing_large() -> None:
    lm, tracer = make_lm(FakeModel(300)), Tracer()
    lm.start([3, 4, 5], observer=tracer, max_new_tokens=2000, **DRAWN)
    generator = torch.Generator().manual_seed(0)

    def step() -> int:
        logits = torch.randn(1, 300, generator=generator)
        tracer.see(Scored(logits, logits, logits, ()))
        (event,) = tracer.sum_up(Emitted({0: [int(logits.argmax())]}, {}))
        return len(json.dumps(event))

    assert max(step() for _ in range(200)) < 4096
    tracemalloc.start()
    largest = max(step() for _ in range(300))
    grown, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert largest < 4096 and grown < 64 << 10


def test_beams_keep_the_last_step_alone() -> None:
    lm, tracer = find_lm("llama"), Tracer()
    answer = lm.start(PROMPT, observer=tracer, num_beams=4, num_beam_groups=2, diversity_penalty=0.5, max_new_tokens=9)
    for emitted in answer.run:
        assert emitted.seen[0]["type"] == "beams"
    assert answer.run.beam_trace is not None and len(answer.run.beam_trace.steps) == 2

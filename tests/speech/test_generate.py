"""generate() on a tiny Whisper of random weights: token for token what transformers answers."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

import unspool
from tests.speech.models import FIRST_STAMP, WINDOW, draw_features, make_whisper
from unspool.errors import InputError, SettingError, UnsupportedError

PROMPT = torch.tensor([58, 5, 6, 7])
STAMPS = {"return_timestamps": True, "language": "en"}
SHORT: dict[str, dict[str, Any]] = {
    "plain": {},
    "language": {"language": "de"},
    "languages by name, translated": {"language": ["french", "<|en|>"], "task": "translate"},
    "task": {"task": "transcribe"},
    "timestamps": STAMPS,
    "segments": {**STAMPS, "return_segments": True},
    "beams": {"language": "en", "num_beams": 3},
    "prompt": {"language": "en", "prompt_ids": PROMPT},
    "times of beams": {
        **STAMPS,
        "num_beams": 2,
        "max_new_tokens": 12,
        "return_segments": True,
        "return_token_timestamps": True,
    },
}
LONG: dict[str, dict[str, Any]] = {
    "plain": STAMPS,
    "language found": {"return_timestamps": True},
    "prompt": {**STAMPS, "prompt_ids": PROMPT},
    "conditioned": {**STAMPS, "condition_on_prev_tokens": True},
    "conditioned, prompt": {**STAMPS, "condition_on_prev_tokens": True, "prompt_ids": PROMPT},
    "prompt for all": {
        **STAMPS,
        "condition_on_prev_tokens": True,
        "prompt_ids": PROMPT,
        "prompt_condition_type": "all-segments",
    },
    "beams": {**STAMPS, "num_beams": 2},
    "thresholds": {
        **STAMPS,
        "temperature": (0.0,),
        "compression_ratio_threshold": 1.0,
        "logprob_threshold": -3.0,
        "no_speech_threshold": 0.02,
    },
    "silence": {**STAMPS, "temperature": (0.0,), "logprob_threshold": -0.1, "no_speech_threshold": 0.001},
    "few tokens": {**STAMPS, "max_new_tokens": 9},
    "times": {**STAMPS, "return_token_timestamps": True},
}


TEXT_ONLY = {"suppress_tokens": [1, *range(FIRST_STAMP, FIRST_STAMP + WINDOW // 2 + 1)]}


def ask_reference(model: Any, **inputs: Any) -> Any:
    """The reference writes into its settings: it gets a copy."""
    transformers.logging.set_verbosity_error()
    return copy.deepcopy(model).generate(**inputs)


def assert_same(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        assert found.tolist() == expected.tolist()
        return
    assert found["sequences"].tolist() == expected["sequences"].tolist()
    for mine, theirs in zip(found["segments"], expected["segments"], strict=True):
        for one, other in zip(mine, theirs, strict=True):
            assert one["tokens"].tolist() == other["tokens"].tolist() and one["idxs"] == other["idxs"]
            assert float(one["start"]) == pytest.approx(float(other["start"]))
            assert float(one["end"]) == pytest.approx(float(other["end"]))
            if "token_timestamps" in other:
                assert one["token_timestamps"].tolist() == pytest.approx(other["token_timestamps"].tolist())


@pytest.mark.parametrize("name", SHORT)
def test_one_window(name: str) -> None:
    model, features = make_whisper(0), draw_features(2, WINDOW)
    assert_same(
        unspool.generate(model, input_features=features, **SHORT[name]),
        ask_reference(model, input_features=features, **SHORT[name]),
    )


@pytest.mark.parametrize(("name", "seed"), [*((name, 1) for name in LONG), ("plain", 2), ("conditioned, prompt", 2)])
def test_windows(name: str, seed: int) -> None:
    model, features = make_whisper(seed), draw_features(1, 140, seed)
    settings = {**LONG[name], "return_segments": True}
    found = unspool.generate(model, input_features=features, **settings)
    assert_same(found, ask_reference(model, input_features=features, **settings))
    assert any(found["segments"]) or name == "silence"


@pytest.mark.parametrize("num_rows", [1, 2])
def test_an_encoders_states_stand_beside_times_of_tokens(num_rows: int) -> None:
    model, features = make_whisper(0), draw_features(num_rows, WINDOW, 0)
    model.set_attn_implementation("eager")
    told = {"output_hidden_states": True, "output_attentions": True}
    asked = {**told, "return_dict_in_generate": True, "return_token_timestamps": True, "language": "en"}
    found = unspool.generate(model, input_features=features, **asked, max_new_tokens=5)
    with torch.no_grad():
        expected = model.get_encoder()(features, **told)
    for name in ("hidden_states", "attentions"):
        for one, other in zip(found[f"encoder_{name}"], expected[name], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3)


def test_token_times_are_those_of_the_whole_sound() -> None:
    """The reference begins anew with every window in `token_timestamps`, and not in its segments."""
    model, features = make_whisper(1), draw_features(1, 140, 1)
    found = unspool.generate(model, input_features=features, **LONG["times"], return_segments=True)
    told = [time for segment in found["segments"][0] for time in segment["token_timestamps"].tolist()]
    assert found["token_timestamps"][0].tolist() == pytest.approx(told)


@pytest.mark.parametrize("settings", [{}, {"condition_on_prev_tokens": True}], ids=["alone", "conditioned"])
def test_rows_alone_are_rows_in_the_batch(settings: dict[str, Any]) -> None:
    model, features, ends = make_whisper(2), draw_features(3, 200, 2), [200, 130, 171]
    mask = (torch.arange(200) < torch.tensor(ends)[:, None]).long()
    common = {**STAMPS, **settings, "return_segments": True}
    whole = unspool.generate(model, input_features=features, attention_mask=mask, **common)
    for row, end in enumerate(ends):
        alone = unspool.generate(model, input_features=features[row : row + 1, :, :end], **common)
        assert_same({**whole, "segments": [whole["segments"][row]], "sequences": alone["sequences"]}, alone)


def test_falling_back_to_higher_temperatures() -> None:
    model, features = make_whisper(1), draw_features(1, WINDOW, 1)
    tried = {"temperature": (0.0, 0.4, 0.8), "logprob_threshold": 0.0, "max_new_tokens": 12}
    found = unspool.generate(model, input_features=features, **STAMPS, **tried, seed=3)
    last = unspool.generate(model, input_features=features, **STAMPS, temperature=(0.8,), max_new_tokens=12, seed=3)
    first = unspool.generate(model, input_features=features, **STAMPS, max_new_tokens=12)
    assert found.tolist() == last.tolist() != first.tolist()
    content = {**tried, "logprob_threshold": -100.0}
    assert unspool.generate(model, input_features=features, **STAMPS, **content).tolist() == first.tolist()


def test_an_output_object_is_of_one_window() -> None:
    model, features = make_whisper(1), draw_features(2, WINDOW, 1)
    # With a timestamp in a text the reference goes on, and returns the last window's output.
    common = {"input_features": features, "language": "en", "max_new_tokens": 6, "return_dict_in_generate": True}
    common |= TEXT_ONLY
    found, expected = unspool.generate(model, **common), ask_reference(model, **common)
    assert found.sequences.tolist() == expected.sequences.tolist()
    tokens = unspool.generate(model, input_features=features, language="en", max_new_tokens=6, **TEXT_ONLY)
    assert tokens.tolist() == [row[4:] for row in found.sequences.tolist()]


def test_two_lengths_of_a_call_both_hold() -> None:
    """`max_length` counts what is written, also beside `max_new_tokens`; a file's gives way to the call's."""
    model, features = make_whisper(3), draw_features(1, WINDOW)

    def count(**lengths: int) -> int:
        never = {"suppress_tokens": [*TEXT_ONLY["suppress_tokens"], 50]}  # nor an end
        return int(unspool.generate(model, input_features=features, language="en", **never, **lengths).shape[1])

    assert count(max_length=9, max_new_tokens=13) == count(max_length=9) == 9
    assert count(max_length=13, max_new_tokens=9) == count(max_new_tokens=9) == 9
    model.generation_config.max_length = 5
    assert count(max_new_tokens=9) == 9


@pytest.mark.parametrize("frames", [WINDOW, 26])
def test_one_run_takes_masks_and_short_features(frames: int) -> None:
    """A language that is found, a mask of frames and features that end before the window, all in one run."""
    model, features = make_whisper(1), draw_features(2, frames, 1)
    common = {"return_dict_in_generate": True, "output_attentions": True, "output_hidden_states": True, **TEXT_ONLY}
    filled = torch.nn.functional.pad(features, (0, WINDOW - frames))  # to find a language in, which the reference can't
    expected = ask_reference(model, input_features=filled, **common)
    mask = torch.ones(2, frames, dtype=torch.long)
    for native in (True, False):
        found = unspool.generate(model, input_features=features, attention_mask=mask, native=native, **common)
        assert isinstance(found, type(expected)) and isinstance(found.past_key_values, type(expected.past_key_values))
        assert found.sequences.tolist() == expected.sequences.tolist() and found.keys() == expected.keys()
        for mine, theirs in zip(found.encoder_hidden_states, expected.encoder_hidden_states, strict=True):
            assert torch.allclose(mine, theirs, atol=1e-4)


@pytest.mark.parametrize("settings", [{}, {"return_dict_in_generate": True}, {"num_beams": 2}], ids=str)
def test_a_temperature_says_whether_tokens_are_drawn(settings: dict[str, Any]) -> None:
    model, features = make_whisper(1), draw_features(1, WINDOW, 1)
    common = {"input_features": features, "language": "en", "max_new_tokens": 8, "top_k": 1, **TEXT_ONLY, **settings}
    for temperature in (0.0, 0.7):
        found = unspool.generate(model, **common, temperature=temperature)
        expected = ask_reference(model, **common, temperature=temperature)
        assert type(found) is type(expected)
        sequences = [one if isinstance(one, torch.Tensor) else one.sequences for one in (found, expected)]
        assert sequences[0].tolist() == sequences[1].tolist()


@pytest.mark.parametrize(
    "settings", [STAMPS, {**STAMPS, "num_beams": 2}, {**STAMPS, "return_token_timestamps": True}], ids=str
)
def test_results_of_segments(settings: dict[str, Any]) -> None:
    """Each segment brings the row's part of what its run returned."""
    model, features = make_whisper(1), draw_features(1, 140, 1)
    common = {"input_features": features, **settings, "return_dict_in_generate": True, "output_scores": True}
    found, expected = unspool.generate(model, **common), ask_reference(model, **common)
    assert_same(found, expected)
    for mine, theirs in zip(found["segments"][0], expected["segments"][0], strict=True):
        one, other = mine["result"], theirs["result"]
        assert one["sequences"].tolist() == other["sequences"].tolist()
        steps = zip(one["scores"], other["scores"], strict=True)
        assert all(torch.allclose(step, expected_step, atol=1e-3) for step, expected_step in steps)
        if "token_timestamps" in other:
            assert one["token_timestamps"].tolist() == pytest.approx(other["token_timestamps"].tolist())


def test_times_of_tokens_beside_an_output() -> None:
    model, features = make_whisper(1), draw_features(1, WINDOW, 1)
    common = {"input_features": features, "language": "en", "max_new_tokens": 9, **TEXT_ONLY}
    common |= {"return_dict_in_generate": True, "return_token_timestamps": True}
    found, expected = unspool.generate(model, **common), ask_reference(model, **common)
    assert type(found) is type(expected) is dict and len(found["scores"]) == len(expected["scores"])
    for name in ("sequences", "token_timestamps"):
        assert found[name][0].tolist() == pytest.approx(expected[name][0].tolist())


def test_beams_are_judged_as_other_texts() -> None:
    """A threshold reads the mean log-probability of a beam's tokens, not its score under `length_penalty`."""
    model, features = make_whisper(1), draw_features(1, 140, 1)
    common = {**STAMPS, "num_beams": 2, "length_penalty": 0.0, "return_segments": True, "temperature": (0.0, 1e-5)}
    common |= {"logprob_threshold": -4.0, "no_speech_threshold": 1e-9}
    found = unspool.generate(model, input_features=features, **common)
    assert_same(found, ask_reference(model, input_features=features, **common))
    assert any(found["segments"])


def test_states_instead_of_features() -> None:
    model, features = make_whisper(0), draw_features(2, WINDOW)
    states = model.get_encoder()(features).last_hidden_state
    common = {"language": "en", "max_new_tokens": 8, "return_dict_in_generate": True}
    expected = unspool.generate(model, input_features=features, **common).sequences
    assert unspool.generate(model, encoder_outputs=states, **common).sequences.tolist() == expected.tolist()
    steps = list(unspool.stream(model, encoder_outputs=states, language="en", max_new_tokens=8))
    assert [step.tokens[0][0] for step in steps if 0 in step.tokens] == expected[0, 4 : 4 + len(steps)].tolist()


def test_progress_is_told() -> None:
    seen: list[list[list[int]]] = []
    features = draw_features(1, 200)
    unspool.generate(
        make_whisper(0), input_features=features, **STAMPS, monitor_progress=lambda at: seen.append(at.tolist())
    )
    assert [row[0][1] for row in seen] == [200] * len(seen)
    assert [row[0][0] for row in seen] == sorted({row[0][0] for row in seen}) and seen[0][0][0] == 0
    seen.clear()
    once = {"return_dict_in_generate": True, "monitor_progress": lambda at: seen.append(at.tolist())}
    unspool.generate(make_whisper(0), input_features=draw_features(2, WINDOW), language="en", **once)
    assert seen == [[[0, WINDOW], [0, WINDOW]]]
    with pytest.raises(SettingError, match="`monitor_progress`=3 can't be called"):
        unspool.generate(make_whisper(0), input_features=features, **STAMPS, monitor_progress=3)


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"language": "klingon"}, SettingError, r"'klingon' is not one of the 3.*en \(english\), de \(german\)"),
        ({"language": 3}, SettingError, "is a code"),
        ({"language": ["en", None]}, SettingError, "names one for every sound"),
        ({"language": ["en", "de", "fr"]}, SettingError, "3 entries for 2 sounds"),
        ({"task": "sing"}, SettingError, "'sing' is not known.*transcribe, translate"),
        ({"is_multilingual": False, "language": "en"}, SettingError, "knows English only"),
        ({"return_timestamps": "yes"}, SettingError, "neither True nor False"),
        ({"prompt_condition_type": "always"}, SettingError, "first-segment or all-segments"),
        ({"prompt_condition_type": "all-segments"}, SettingError, "needs condition_on_prev_tokens"),
        ({"no_speech_threshold": 0.5}, SettingError, "needs `logprob_threshold`"),
        ({"logprob_threshold": float("nan")}, SettingError, "is no number"),
        ({"temperature": (0.0, -1.0)}, SettingError, "at least 0"),
        ({"prompt_ids": [1] * 40}, InputError, "up to 24 token ids"),
        ({"max_new_tokens": 47}, SettingError, "exceed the 48 positions"),
        ({"force_unique_generate_call": True, "return_segments": True}, SettingError, "the text of one run as it is"),
        ({"temperature": 0.7, "do_sample": False}, SettingError, "are at odds"),
        ({"time_precision": 0.5}, SettingError, "steps of 0.02 s"),
        ({**STAMPS, "num_return_sequences": 2, "do_sample": True}, UnsupportedError, "num_return_sequences"),
    ],
)
def test_what_cannot_be_asked_for(settings: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        unspool.generate(make_whisper(0), input_features=draw_features(2, WINDOW), **settings)


@pytest.mark.parametrize(
    ("features", "settings", "words"),
    [
        (draw_features(1, 200), {"return_timestamps": False}, "more than 60 frames"),
        (draw_features(2, 200), {}, "need an attention_mask"),
        (torch.full((1, 16, 200), torch.nan), {}, "NaN"),
        (torch.zeros(1, 15, 200), {}, r"give \(rows, 16, frames\)"),
    ],
)
def test_long_features_that_cannot_be_read(features: torch.Tensor, settings: dict[str, Any], words: str) -> None:
    with pytest.raises((InputError, SettingError), match=words):
        unspool.generate(make_whisper(0), input_features=features, language="en", **settings)

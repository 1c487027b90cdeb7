"""Random calls of models of speech: one window or several, batches of uneven sounds, and what Whisper's call takes."""

from __future__ import annotations

from random import Random
from typing import Any

from tests.fuzz.beside.families import SPEECH
from tests.fuzz.beside.models import VOCAB, WINDOW

FIRST_STAMP = 61
LANGUAGES = ("en", "german", "<|fr|>", "de")
MOST_FRAMES = 3 * WINDOW


def draw_sounds(rng: Random) -> tuple[list[int], bool]:
    """The frames of every row, and whether a mask says so: without one all are as long as the longest."""
    num_rows = rng.choice([1, 1, 1, 2, 3])
    longest = rng.choice([WINDOW, WINDOW, rng.randint(8, WINDOW), rng.randint(WINDOW + 1, MOST_FRAMES), MOST_FRAMES])
    if longest > WINDOW and num_rows > 1:
        return [longest, *(rng.randint(8, longest) for _ in range(num_rows - 1))], True
    return [longest] * num_rows, rng.random() < 0.2


def draw_settings(rng: Random, name: str, sounds: list[int]) -> dict[str, Any]:
    """What is asked of a model of speech."""
    settings: dict[str, Any] = {}
    for part in rng.sample(PARTS, rng.choice([0, 1, 2, 3, 4, 5])):
        settings |= part(rng)
    if SPEECH[name].get("is_multilingual") is not False:
        settings |= _draw_language(rng, len(sounds))
    if max(sounds) > WINDOW and not settings.get("return_timestamps"):
        settings["return_timestamps"] = True
    if settings.get("return_timestamps"):
        settings.pop("max_length", None)  # transformers lets it grow with every window
    elif "return_dict_in_generate" in settings or "max_length" in settings:
        # Where a text has timestamps all the same there is another window, and transformers returns its output.
        settings["suppress_tokens"] = [1, *range(FIRST_STAMP, VOCAB)]
    if settings.get("temperature") in (0.7, (0.7,)):
        settings.pop("do_sample", None)  # transformers samples all the same
    if settings.get("prompt_condition_type") == "all-segments":
        settings |= {"condition_on_prev_tokens": True}
    return settings


def _draw_language(rng: Random, num_rows: int) -> dict[str, Any]:
    chosen: dict[str, Any] = {}
    if rng.random() < 0.6:
        chosen["language"] = rng.choice(LANGUAGES)
        if rng.random() < 0.2:
            chosen["language"] = [rng.choice(LANGUAGES) for _ in range(num_rows)]
    if rng.random() < 0.3:
        chosen["task"] = rng.choice(["transcribe", "translate"])
    return chosen


def _draw_temperature(rng: Random) -> dict[str, Any]:
    """Those that draw leave one token to be drawn, or make the others too unlikely."""
    return rng.choice(
        [
            {"temperature": 0.0},
            {"temperature": (0.0,)},
            {"temperature": (0.0, 1e-5)},
            {"temperature": (0.0, 1e-5, 2e-5)},
            {"temperature": (0.0, 0.4, 0.8), "top_k": 1},
            {"temperature": (0.7,), "top_k": 1},
            {"temperature": 0.7, "top_k": 1},
        ]
    )


def _draw_thresholds(rng: Random) -> dict[str, Any]:
    chosen: dict[str, Any] = {"temperature": (0.0, *rng.choice([(), (1e-5,), (1e-5, 2e-5)]))}
    if rng.random() < 0.6:
        chosen["compression_ratio_threshold"] = rng.choice([0.5, 0.8, 1.0, 1.35])
    if rng.random() < 0.7:
        chosen["logprob_threshold"] = rng.choice([-6.0, -3.0, -2.0, -1.5, -1.0, -0.5])
        if rng.random() < 0.7:
            chosen["no_speech_threshold"] = rng.choice([1e-4, 0.005, 0.02, 0.1, 0.6])
    return chosen


def _draw_beams(rng: Random) -> dict[str, Any]:
    chosen: dict[str, Any] = {"num_beams": rng.randint(2, 4)}
    if rng.random() < 0.3:
        chosen["length_penalty"] = rng.choice([0.0, 0.5, 2.0])
    if rng.random() < 0.3:
        chosen["early_stopping"] = rng.choice([True, False, "never"])
    return chosen


def _draw_outputs(rng: Random) -> dict[str, Any]:
    chosen: dict[str, Any] = {"return_dict_in_generate": True}
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if rng.random() < 0.35:
            chosen[name] = True
    return chosen


def _draw_prompt(rng: Random) -> dict[str, Any]:
    ids = [58, *(rng.randrange(3, 50) for _ in range(rng.randint(1, 6)))]
    return {"prompt_ids": ids if rng.random() < 0.8 else ids[1:]}


def _draw_processor(rng: Random) -> dict[str, Any]:
    return rng.choice(
        [
            {"repetition_penalty": rng.choice([0.8, 1.3])},
            {"no_repeat_ngram_size": rng.randint(1, 3)},
            {"suppress_tokens": sorted(rng.sample(range(50), 20))},
            {"suppress_tokens": list(range(FIRST_STAMP, VOCAB))},
            {"begin_suppress_tokens": sorted(rng.sample(range(50), 20))},
            {"min_new_tokens": rng.randint(2, 8)},
            {"bad_words_ids": [[rng.randrange(50)] for _ in range(10)]},
        ]
    )


PARTS: list[Any] = [
    lambda rng: {"return_timestamps": rng.random() < 0.9},
    lambda rng: {"return_timestamps": True},
    lambda rng: {"return_segments": True},
    lambda rng: {"return_token_timestamps": True},
    lambda rng: {"condition_on_prev_tokens": rng.random() < 0.9},
    lambda rng: {"prompt_condition_type": rng.choice(["first-segment", "all-segments"])},
    lambda rng: {"max_new_tokens": rng.randint(1, 20)},
    lambda rng: {"max_length": rng.randint(6, 40)},
    lambda rng: {"cache_implementation": "static"},
    lambda rng: {"force_unique_generate_call": True},
    lambda rng: {"do_sample": False},
    _draw_prompt,
    _draw_temperature,
    _draw_thresholds,
    _draw_thresholds,
    _draw_beams,
    _draw_outputs,
    _draw_processor,
    _draw_processor,
]

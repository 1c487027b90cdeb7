"""The arguments that generate() takes for a model of speech beside the settings of every model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from unspool.config import GenerationConfig
from unspool.config.speech import ONE_WINDOW, WINDOWS
from unspool.errors import InputError, SettingError
from unspool.numeric import is_number
from unspool.protocols import ModelInfo
from unspool.speech.decoder import Thresholds
from unspool.speech.languages import find_language
from unspool.speech.markers import Markers, check_choice, read_markers

_CONDITIONS = ("first-segment", "all-segments")
_FIXED = {"time_precision": 0.02, "time_precision_features": 0.01}
_MOST_TEMPERATURES = 32


@dataclass(frozen=True)
class SpeechArguments:
    """What a call asks of a model of speech."""

    markers: Markers
    languages: tuple[str | None, ...]  # one for every sound, or one for all
    task: str | None
    has_timestamps: bool
    temperatures: tuple[float | None, ...]
    thresholds: Thresholds
    conditions: bool
    prompt_ids: tuple[int, ...] | None
    prompts_all: bool
    wants_times: bool
    wants_segments: bool
    is_single: bool  # one window, returned whole
    max_length: int | None

    @property
    def needs_windows(self) -> bool:
        """Whether one plain run can't give what is asked for."""
        return not self.is_single and (self.has_timestamps or self.has_parts or len(self.temperatures) > 1)

    @property
    def has_parts(self) -> bool:
        """Whether a text is judged, or returned in parts."""
        return self.thresholds != Thresholds() or self.wants_times or self.wants_segments

    @property
    def is_plain(self) -> bool:
        """Whether every sound is written once, and nothing but its text says where it is read on."""
        return not self.has_timestamps and len(self.temperatures) == 1 and self.thresholds == Thresholds()

    def spread(self, num_rows: int) -> tuple[str | None, ...]:
        """The language of each sound."""
        if len(self.languages) not in (1, num_rows):
            raise SettingError(
                f"`language` has {len(self.languages)} entries for {num_rows} sounds; give one, or one for each"
            )
        return self.languages if len(self.languages) == num_rows else self.languages * num_rows


def take_arguments(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Take the arguments of speech out of a call's."""
    asked: dict[str, Any] = {name: kwargs.pop(name) for name in (*ONE_WINDOW, *WINDOWS) if name in kwargs}
    if isinstance(kwargs.get("temperature"), list | tuple):
        asked["temperature"] = kwargs.pop("temperature")
    return asked


def read_arguments(asked: Mapping[str, Any], settings: GenerationConfig, info: ModelInfo) -> SpeechArguments:
    """Check the arguments, with the model's own settings behind them."""

    def find(name: str) -> Any:
        value = asked.get(name)
        return getattr(settings, name, None) if value is None else value

    if asked.get("is_multilingual") is not None:
        settings.is_multilingual = asked["is_multilingual"]
    markers = read_markers(settings, info)
    language, task = find("language"), find("task")
    check_choice(markers, language, task)
    languages = tuple(language) if isinstance(language, list | tuple) else (language,)
    for one in languages:
        if one is None and len(languages) > 1:
            raise SettingError("a list of languages names one for every sound; leave `language` out to find them all")
        if one is not None:
            find_language(one, markers.languages)
    has_timestamps = find("return_timestamps")
    if has_timestamps not in (None, True, False):
        raise SettingError(
            f"`return_timestamps`={has_timestamps!r:.40} is neither True nor False; times of words come from "
            "lm.transcribe(…, return_timestamps='word'), and those of tokens from return_token_timestamps=True"
        )
    if has_timestamps:
        markers.require_timestamps()
    for name, fixed in _FIXED.items():
        if asked.get(name) not in (None, fixed):
            raise SettingError(f"`{name}`={asked[name]!r:.40} can't be: a model's timestamps have steps of {fixed} s")
    conditions = bool(find("condition_on_prev_tokens"))
    speech = SpeechArguments(
        markers=markers,
        languages=languages,
        task=task,
        has_timestamps=bool(has_timestamps),
        temperatures=read_temperatures(asked.get("temperature")),
        thresholds=read_thresholds({name: find(name) for name in WINDOWS}, markers),
        conditions=conditions,
        prompt_ids=_read_prompt(asked.get("prompt_ids"), info),
        prompts_all=_read_condition(asked.get("prompt_condition_type"), conditions),
        wants_times=bool(asked.get("return_token_timestamps")),
        wants_segments=bool(asked.get("return_segments")),
        is_single=bool(asked.get("force_unique_generate_call")),
        max_length=settings.max_length if "max_length" in settings.explicit else None,
    )
    if speech.is_single and (speech.has_parts or len(speech.temperatures) > 1):
        raise SettingError(
            "`force_unique_generate_call` returns the text of one run as it is: without thresholds, fall-back "
            "temperatures, segments and times of tokens; leave these out, or it"
        )
    return speech


def read_thresholds(asked: Mapping[str, Any], markers: Markers) -> Thresholds:
    """The thresholds of a call, by their names."""
    values = []
    for name in ("compression_ratio_threshold", "logprob_threshold", "no_speech_threshold"):
        value = asked.get(name)
        if value is not None and not is_number(value):
            raise SettingError(f"`{name}`={value!r:.40} is no number; give one, or None to do without it")
        values.append(None if value is None else float(value))
    limits = Thresholds(*values)
    if limits.no_speech is not None and (limits.logprob is None or markers.no_speech is None):
        raise SettingError(
            "`no_speech_threshold` drops what is also unlikely: it needs `logprob_threshold` (-1.0, for instance) and "
            "a model with `no_timestamps_token_id`"
        )
    return limits


def read_temperatures(given: Any) -> tuple[float | None, ...]:
    """The temperatures that are tried one after the other; None leaves the choice to the other settings."""
    if given is None:
        return (None,)
    given = tuple(given) if isinstance(given, list | tuple) else (given,)
    if not 0 < len(given) <= _MOST_TEMPERATURES or not all(is_number(one) and one >= 0 for one in given):
        raise SettingError(
            f"`temperature`={given!r:.80} is no tuple of 1 to {_MOST_TEMPERATURES} numbers of at least 0, such as "
            "(0.0, 0.2, 0.4, 0.6, 0.8, 1.0)"
        )
    return tuple(float(one) for one in given)


def check_draws(do_sample: Any, temperature: Any) -> None:
    """Raise where `do_sample` says something else than the first temperature."""
    first = read_temperatures(temperature)[0]
    if do_sample is not None and bool(do_sample) != bool(first):
        raise SettingError(
            f"`do_sample`={do_sample!r:.40} and a first temperature of {first} are at odds: 0 takes the likeliest "
            "token, numbers above it draw; leave `do_sample` out, or change `temperature`"
        )


def _read_condition(given: Any, conditions: bool) -> bool:
    if given not in (None, *_CONDITIONS):
        raise SettingError(f"`prompt_condition_type`={given!r:.40} is not known; use {' or '.join(_CONDITIONS)}")
    if given == "all-segments" and not conditions:
        raise SettingError("prompt_condition_type='all-segments' needs condition_on_prev_tokens=True")
    return bool(given == "all-segments")


def _read_prompt(given: Any, info: ModelInfo) -> tuple[int, ...] | None:
    if given is None:
        return None
    ids = given.tolist() if isinstance(given, torch.Tensor) else list(given)
    most = (info.max_context or 448) // 2
    if len(ids) > most or not all(isinstance(one, int) and 0 <= one < info.vocab_size for one in ids):
        raise InputError(f"`prompt_ids` is one list of up to {most} token ids; tokenizer.get_prompt_ids(text) makes it")
    return tuple(ids)

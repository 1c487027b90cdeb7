"""Whisper's special tokens, as a model's generation settings name them, and what a transcript begins with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from unspool.config import GenerationConfig
from unspool.errors import SettingError
from unspool.protocols import ModelInfo
from unspool.speech.languages import find_language

TASKS = ("transcribe", "translate")
_MOST_ENTRIES = 1024


@dataclass(frozen=True)
class Markers:
    """The tokens between which Whisper writes."""

    start: int
    ends: tuple[int, ...]
    pad: int
    no_timestamps: int | None = None  # timestamps are the ids after it, silence is the one before
    previous: int | None = None  # what stands before a text that came earlier
    languages: Mapping[str, int] = field(default_factory=dict)
    tasks: Mapping[str, int] = field(default_factory=dict)
    is_multilingual: bool | None = None  # None: the settings don't say
    first_limit: int | None = None  # the latest first timestamp, in steps of 0.02 s
    alignment_heads: tuple[tuple[int, int], ...] = ()  # layers and heads whose cross-attention follows the sound
    forced: tuple[tuple[int, int | None], ...] = ()  # places and tokens of an older way to choose language and task

    @property
    def first_timestamp(self) -> int | None:
        """The id of the timestamp 0.00; None if the settings name none."""
        return None if self.no_timestamps is None else self.no_timestamps + 1

    @property
    def no_speech(self) -> int | None:
        """The token for a window without speech."""
        return None if self.no_timestamps is None else self.no_timestamps - 1

    def require_timestamps(self) -> int:
        """The id of the timestamp 0.00; raises if there is none."""
        if self.first_timestamp is None:
            raise SettingError(
                "timestamps need `no_timestamps_token_id` in the model's generation_config.json, which has none; use "
                "the file that came with the model"
            )
        return self.first_timestamp


def read_markers(settings: GenerationConfig, info: ModelInfo) -> Markers:
    """The markers of a model, checked: every id lies in its vocabulary."""
    start, pad = settings.decoder_start_token_id, settings.pad_token_id
    ends = settings.eos_token_id
    ends = () if ends is None else tuple(ends) if isinstance(ends, list | tuple) else (ends,)
    if not isinstance(start, int):
        raise SettingError("a model of speech begins with decoder_start_token_id, which is not set; pass it")
    multilingual = getattr(settings, "is_multilingual", None)
    return Markers(
        start=start,
        ends=ends,
        pad=pad if isinstance(pad, int) else ends[0] if ends else 0,
        no_timestamps=_read_id(settings, "no_timestamps_token_id", info),
        previous=_read_id(settings, "prev_sot_token_id", info),
        languages=_read_ids(settings, "lang_to_id", info),
        tasks=_read_ids(settings, "task_to_id", info),
        is_multilingual=None if multilingual is None else bool(multilingual),
        first_limit=_read_id(settings, "max_initial_timestamp_index", info),
        alignment_heads=_read_heads(settings, info),
        forced=tuple((int(place), token) for place, token in settings.forced_decoder_ids or ()),
    )


def check_choice(markers: Markers, language: Any, task: Any) -> None:
    """Raise for a language or a task that the model does not have."""
    if task is not None and task not in TASKS:
        raise SettingError(f"`task`={task!r:.40} is not known; it is one of {', '.join(TASKS)}")
    if markers.is_multilingual is False and (language is not None or task is not None):
        name, value = ("language", language) if language is not None else ("task", task)
        raise SettingError(
            f"`{name}`={value!r:.40} can't be chosen: this model knows English only. Leave it out, or use a "
            "multilingual model"
        )
    if task is not None and task not in markers.tasks:
        has = ", ".join(markers.tasks) or "none: its generation_config.json has no task_to_id"
        raise SettingError(f"`task`={task!r:.40} can't be chosen: this model has {has}")
    if language is not None and not markers.languages:
        raise SettingError("`language` needs `lang_to_id` in the model's generation_config.json, which has none")


def begin(
    markers: Markers, language: str | None, detected: int | None, task: str | None, has_timestamps: bool
) -> list[int]:
    """What a transcript begins with: the start, a language, a task, and whether timestamps follow."""
    tokens: list[int | None] = [markers.start]
    if language is None and task is None:
        tokens += _follow_forced(markers)
    chosen = detected if language is None else markers.languages[find_language(language, markers.languages)]
    if chosen is not None:
        tokens[1:2] = [chosen]
    if task is not None:
        tokens.append(markers.tasks[task])
    elif language is not None and markers.tasks and not set(markers.tasks.values()) & set(tokens):
        tokens.append(markers.tasks["transcribe"])
    if markers.no_timestamps is not None:
        if not has_timestamps and tokens[-1] != markers.no_timestamps:
            tokens.append(markers.no_timestamps)
        elif has_timestamps and tokens[-1] == markers.no_timestamps:
            tokens.pop()
    return [token for token in tokens if token is not None]


def needs_detection(markers: Markers, language: str | None, task: str | None) -> bool:
    """Whether the language has to be found from the sound."""
    if language is not None or not markers.languages or markers.is_multilingual is False:
        return False
    forced = _follow_forced(markers) if task is None else []
    return not forced or forced[0] is None


def _follow_forced(markers: Markers) -> list[int | None]:
    tokens: list[int | None] = []
    for place, token in markers.forced:
        if place != len(tokens) + 1:
            raise SettingError(
                f"forced_decoder_ids {list(markers.forced)!r:.200} must name the places 1, 2, 3 … in this order; use "
                "`language` and `task` instead"
            )
        tokens.append(token)
    return tokens


def _read_id(settings: GenerationConfig, name: str, info: ModelInfo) -> int | None:
    value = getattr(settings, name, None)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < info.vocab_size:
        raise SettingError(f"`{name}`={value!r:.40} is not below the model's vocabulary of {info.vocab_size}")
    return value


def _read_ids(settings: GenerationConfig, name: str, info: ModelInfo) -> dict[str, int]:
    table = getattr(settings, name, None) or {}
    if not isinstance(table, Mapping) or len(table) > _MOST_ENTRIES:
        raise SettingError(f"`{name}` is a table of up to {_MOST_ENTRIES} names and token ids, not {table!r:.80}")
    for key, value in table.items():
        if not isinstance(key, str) or isinstance(value, bool) or not isinstance(value, int):
            raise SettingError(f"`{name}` has {key!r:.40}: {value!r:.40}, which is no name with a token id")
        if not 0 <= value < info.vocab_size:
            raise SettingError(f"`{name}` has {key!r:.40}: {value}, outside the vocabulary of {info.vocab_size}")
    return dict(table)


def _read_heads(settings: GenerationConfig, info: ModelInfo) -> tuple[tuple[int, int], ...]:
    heads = getattr(settings, "alignment_heads", None) or ()
    if not isinstance(heads, Sequence) or len(heads) > _MOST_ENTRIES:
        raise SettingError(f"`alignment_heads` is a list of pairs of a layer and a head, not {heads!r:.80}")
    for pair in heads:
        is_pair = isinstance(pair, Sequence) and len(pair) == 2 and all(isinstance(one, int) for one in pair)
        if not is_pair or not 0 <= pair[0] < info.num_layers or not 0 <= pair[1] < info.num_heads:
            raise SettingError(
                f"`alignment_heads` has {pair!r:.40}, which is no layer and head of a decoder with {info.num_layers} "
                f"layers of {info.num_heads} heads"
            )
    return tuple((int(layer), int(head)) for layer, head in heads)

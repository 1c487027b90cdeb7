"""Sound in, text out: `lm.transcribe()` and its segments as they are written."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Protocol

import numpy as np

from unspool.api.assistant import find_drafting
from unspool.api.calls import generate
from unspool.api.opening import read_config
from unspool.api.speech import merge_speech
from unspool.api.starting import start
from unspool.callbacks import check_callback
from unspool.config import GenerationConfig
from unspool.config.parameters import ARGUMENTS
from unspool.config.structures import find_structure
from unspool.errors import InputError, SettingError, UnsupportedError
from unspool.outputs import Generation, Stats
from unspool.plan.origins import refuse_unknown
from unspool.protocols import FeatureShape, Model
from unspool.speech.arguments import check_draws, read_temperatures, read_thresholds
from unspool.speech.decoder import WindowDecoder
from unspool.speech.features import FRAMES_PER_SECOND, Frames
from unspool.speech.languages import find_language
from unspool.speech.markers import check_choice, read_markers
from unspool.speech.results import Segment, Transcription, Word
from unspool.speech.sound import Sound, measure_sound, open_sound
from unspool.speech.windows import Course, SoundCursor, WindowResult, decode_windows
from unspool.speech.words import group_words, trim_edges
from unspool.text import Tokenizer

_SEARCHES = ("penalty_alpha", "num_beam_groups", "force_words_ids", "constraints")
TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MOST_SOUNDS = 100_000
Progress = Callable[[int, float, float | None], None]
"""Called with a sound's index, the seconds that were read, and the seconds in all if that is known."""


class SpeechModel(Protocol):
    """What a transcription needs from a language model."""

    name: str
    model: Any
    tokenizer: Tokenizer | None


@dataclass(frozen=True)
class Options:
    """What transcribe() is asked for, beside generate()'s settings."""

    language: str | Sequence[str] | None = None
    task: str = "transcribe"
    return_timestamps: bool | str = False
    prompt: str | None = None
    temperature: float | Sequence[float] = TEMPERATURES
    compression_ratio_threshold: float | None = 1.35
    logprob_threshold: float | None = -1.0
    no_speech_threshold: float | None = 0.6
    condition_on_prev_tokens: bool = False
    batch_size: int = 8
    sampling_rate: int | None = None
    generation_config: GenerationConfig | None = None


@dataclass
class Transcriber:
    """One call: sounds, a model of speech, and the segments that come out."""

    lm: SpeechModel
    sounds: Sequence[Sound]
    options: Options
    settings: Mapping[str, Any]
    progress: Progress | None = None
    frames: dict[int, Frames] = field(default_factory=dict)  # of the sounds that were begun
    languages: dict[int, str | None] = field(default_factory=dict)  # found or given

    def __post_init__(self) -> None:
        core: Model = self.lm.model
        if core.info.features is None:
            raise UnsupportedError(
                f"{self.lm.name} reads text, not sound; load a model of speech, such as Whisper, to transcribe"
            )
        if self.lm.tokenizer is None:
            raise InputError(f"{self.lm.name} came without a tokenizer, which writes the text; add its tokenizer.json")
        self._tokenizer = self.lm.tokenizer
        self._shape: FeatureShape = core.info.features
        self._check()
        settings = merge_speech(core, read_config(self.options.generation_config, self.lm), self.settings)
        if find_structure(settings) is not None:  # it describes the text of one window, so a length must be known
            longest = self._shape.frames / FRAMES_PER_SECOND
            self.sounds = [measure_sound(sound, longest) for sound in self.sounds]
        self._markers = read_markers(settings, core.info)
        self._markers.require_timestamps()
        self._course = self._plan_course()
        self._decoder = WindowDecoder(
            core,
            partial(start, self.lm),
            self._markers,
            self._needs_timestamps(),
            self._choose_settings(),
            settings.max_length if "max_length" in settings.explicit else None,
            read_thresholds(vars(self.options), self._markers),
            self._take_processors(),
            None if (drafts := self.settings.get("assistant_model")) is None else find_drafting(drafts, core),
        )

    def _check(self) -> None:
        options = self.options
        check_callback("progress", self.progress, "index, seconds_done, seconds")
        if options.return_timestamps not in (True, False, "word"):
            raise SettingError(f"return_timestamps={options.return_timestamps!r:.40} is not True, False or 'word'")
        size = options.batch_size
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= 1024:
            raise SettingError(f"batch_size={size!r:.40} is no number from 1 to 1024")
        if not isinstance(options.condition_on_prev_tokens, bool | None):
            raise SettingError(
                f"condition_on_prev_tokens={options.condition_on_prev_tokens!r:.40} is not True, False or None"
            )
        check_draws(self.settings.get("do_sample"), options.temperature)
        self._check_searches()
        for name in ("num_return_sequences", "input_features", "encoder_outputs", "decoder_input_ids"):
            if self.settings.get(name) is not None:
                raise SettingError(
                    f"`{name}` is an argument of generate(); transcribe() writes one text for each sound"
                )

    def _check_searches(self) -> None:
        """Raise for a search that draws nothing beside temperatures that do: a window may fall back to any of them."""
        searches = [name for name in _SEARCHES if self.settings.get(name) not in (None, 0, 1)]
        if searches and any(read_temperatures(self.options.temperature)):
            raise SettingError(
                f"`{searches[0]}` asks for a search that draws no tokens, and a window whose text is refused is drawn "
                "anew at the next `temperature`; pass temperature=0"
            )

    def _plan_course(self) -> Course:
        options, markers = self.options, self._markers
        language, task = options.language, options.task
        languages: list[str | None] = [None] * len(self.sounds)
        chosen: str | None = None
        if markers.is_multilingual is False or not markers.languages:  # it writes English, whatever it hears
            asked = language if isinstance(language, list | tuple) else [language]
            is_english = all(one is None or (isinstance(one, str) and one.lower() in _ENGLISH) for one in asked)
            check_choice(markers, None if is_english else language, None if task == "transcribe" else task)
            self._check_languages(language)
        else:
            check_choice(markers, language, task)
            languages, chosen = self._spread(language), task
        return Course(
            languages,
            chosen,
            read_temperatures(options.temperature),
            bool(options.condition_on_prev_tokens),
            self._encode_prompt(),
            wants_times=options.return_timestamps == "word",
            batch_size=options.batch_size,
        )

    def _spread(self, language: Any) -> list[str | None]:
        self._check_languages(language)
        languages = list(language) if isinstance(language, list | tuple) else [language] * len(self.sounds)
        return [None if one is None else find_language(one, self._markers.languages) for one in languages]

    def _check_languages(self, language: Any) -> None:
        if isinstance(language, list | tuple) and len(language) != len(self.sounds):
            raise SettingError(
                f"`language` has {len(language)} entries for {len(self.sounds)} sounds; give one for all, or one each"
            )

    def _encode_prompt(self) -> tuple[int, ...] | None:
        if self.options.prompt is None:
            return None
        if not isinstance(self.options.prompt, str) or not self.options.prompt.strip():
            raise SettingError("`prompt` is a text that might have come before, such as names to be spelled; give one")
        ids = self._tokenizer.encode(" " + self.options.prompt.strip(), add_special_tokens=False)
        most = (self.lm.model.info.max_context or 448) // 2 - 1
        before = () if self._markers.previous is None else (self._markers.previous,)
        return (*before, *ids[-most:])

    def _needs_timestamps(self) -> bool:
        """A sound of several windows is followed by its timestamps, whatever is returned."""
        longest = self._shape.frames / FRAMES_PER_SECOND
        return bool(self.options.return_timestamps) or any(
            sound.seconds is None or sound.seconds > longest for sound in self.sounds
        )

    def _choose_settings(self) -> dict[str, Any]:
        given = {name: value for name, value in self.settings.items() if name != "logits_processor"}
        if self.options.generation_config is not None:
            given["generation_config"] = self.options.generation_config
        return {"seed": 0, **given}  # the same sound gives the same text

    def _take_processors(self) -> Sequence[Any]:
        given = self.settings.get("logits_processor")
        return () if given is None else tuple(given) if isinstance(given, list | tuple) else (given,)

    # --- the work ----------------------------------------------------------------------------------------
    def segments(self) -> Generator[Segment, None, None]:
        """Segments as their windows are done; those of a batch's sounds come interleaved."""
        for result in decode_windows(self._decoder, self._open_all(), self._course, self._report):
            yield from self._read(result)
            self._report_end(result)

    def transcriptions(self) -> Generator[tuple[int, Transcription], None, None]:
        """Each sound's index and transcription when it is whole."""
        found: dict[int, list[Segment]] = {}
        for result in decode_windows(self._decoder, self._open_all(), self._course, self._report):
            found.setdefault(result.index, []).extend(self._read(result))
            self._report_end(result)
            if result.is_last:
                language, seconds = self.languages[result.index], self.frames[result.index].seconds
                yield result.index, Transcription(found.pop(result.index), language, seconds)

    def _open_all(self) -> Iterator[Frames]:
        for index, sound in enumerate(self.sounds):
            self.frames[index] = Frames(sound, self._shape)
            yield self.frames[index]

    def _report(self, cursors: Sequence[SoundCursor]) -> None:
        if self.progress is not None:
            for cursor in cursors:
                frames = self.frames[cursor.index]
                self.progress(cursor.index, cursor.seek / FRAMES_PER_SECOND, frames.sound.seconds)

    def _report_end(self, result: WindowResult) -> None:
        if self.progress is not None and result.is_last:
            frames = self.frames[result.index]
            self.progress(result.index, frames.seconds, frames.sound.seconds)

    def _read(self, result: WindowResult) -> Iterator[Segment]:
        self.languages[result.index] = code = self._name_language(result)
        written, duration = result.written, self.frames[result.index].seconds
        for one in result.slices:
            assert written is not None
            tokens = written.tokens[one.first : one.stop]
            segment = Segment(
                start=round(max(0.0, min(one.start, duration)), 3),
                end=round(max(0.0, min(one.end, duration)), 3),
                text=self._decode(tokens),
                tokens=tokens,
                temperature=written.temperature,
                avg_logprob=written.avg_logprob,
                compression_ratio=written.compression_ratio,
                no_speech_prob=written.no_speech_prob,
                index=result.index,
            )
            if self._course.wants_times:
                segment.words = self._place_words(result, one.first, one.stop, code)
                if segment.words:  # they are more exact than the model's timestamps
                    segment.start, segment.end = segment.words[0].start, segment.words[-1].end
            yield segment

    def _place_words(self, result: WindowResult, first: int, stop: int, code: str | None) -> list[Word]:
        """The words of a window's tokens. A token's time is when it was over: it began with the one before."""
        written, duration = result.written, self.frames[result.index].seconds
        assert written is not None
        offset = result.seek / FRAMES_PER_SECOND
        ends = [round(min(offset + at, duration), 3) for at in written.times]
        starts = [round(offset, 3), *ends]
        limit = min(self._markers.require_timestamps(), *self._markers.ends)
        spoken = [place for place in range(first, stop) if written.tokens[place] < limit]
        spans = [(starts[place], ends[place]) for place in spoken]
        return trim_edges(group_words([written.tokens[place] for place in spoken], spans, self._decode, code))

    def _decode(self, tokens: Sequence[int]) -> str:
        first = self._markers.require_timestamps()
        return self._tokenizer.decode([token for token in tokens if token < first], skip_special_tokens=True)

    def _name_language(self, result: WindowResult) -> str | None:
        given = self._course.languages[result.index]
        if given is not None:
            return given.strip("<|>")
        if result.language is not None:
            named = {token: name for name, token in self._markers.languages.items()}
            return named[result.language].strip("<|>")
        return "en" if self._markers.is_multilingual is False else None


_ENGLISH = ("en", "english", "<|en|>")


def generate_windows(lm: Any, prompt: Any, settings: Mapping[str, Any], streamer: Any) -> Generation:
    """`lm.generate()` for features that are read window by window."""
    if streamer is not None:
        raise SettingError("a streamer follows one window; use lm.stream_segments() for the segments of several")
    given = dict(prompt) if isinstance(prompt, Mapping) else {}
    began = time.perf_counter()
    made: Any = generate(lm, **given, **{**settings, "return_segments": True})
    rows = [[int(token) for one in row for token in one["tokens"]] for row in made["segments"]]
    first = read_markers(
        merge_speech(lm.model, read_config(settings.get("generation_config")), settings), lm.model.info
    )
    limit = first.require_timestamps()
    stats = Stats(new_tokens=sum(map(len, rows)), total_seconds=time.perf_counter() - began)
    return Generation(
        texts=[
            lm.tokenizer.decode([token for token in row if token < limit], skip_special_tokens=True)
            if lm.tokenizer is not None
            else ""
            for row in rows
        ],
        token_ids=rows,
        prompt_token_ids=[],
        finish_reasons=["eos"] * len(rows),
        stats=stats,
        segments=made["segments"],
    )


def split_options(settings: Mapping[str, Any], **given: Any) -> tuple[Options, dict[str, Any]]:
    """The options among a call's arguments, and the rest."""
    names = {one.name for one in fields(Options)}
    refuse_unknown(settings, (*names, *ARGUMENTS, "progress"), "transcribe()")
    chosen = {name: value for name, value in settings.items() if name in names}
    return Options(**chosen, **given), {name: value for name, value in settings.items() if name not in names}


def open_sounds(audio: Any, sampling_rate: int | None) -> tuple[list[Sound], bool]:
    """The sounds of a call, and whether there is only one: a list is several, unless it holds numbers."""
    if isinstance(audio, list | tuple) and audio and not isinstance(audio[0], int | float | np.number):
        if len(audio) > MOST_SOUNDS:
            raise InputError(f"{len(audio)} sounds in one call; at most {MOST_SOUNDS} are taken")
        return [open_sound(one, None if isinstance(one, str | os.PathLike) else sampling_rate) for one in audio], False
    if isinstance(audio, list | tuple) and not audio:
        raise InputError("the list of sounds is empty; give a path, an array, or a list of them")
    return [open_sound(audio, sampling_rate)], True


def transcribe(
    lm: SpeechModel, audio: Any, options: Options, settings: Mapping[str, Any], progress: Progress | None
) -> Any:
    """The transcription of a sound, or one for each of a list."""
    sounds, is_one = open_sounds(audio, options.sampling_rate)
    began = time.perf_counter()
    found = dict(Transcriber(lm, sounds, options, settings, progress).transcriptions())
    made = [found[index] for index in range(len(sounds))]
    total, spent = sum(one.duration for one in made), time.perf_counter() - began
    for one in made:
        one.seconds = spent * one.duration / total
    return made[0] if is_one else made


def transcribe_each(
    lm: SpeechModel, sounds: Sequence[Sound], settings: Mapping[str, Any], progress: Progress | None
) -> Generator[tuple[int, Transcription], None, None]:
    """The index and the transcription of every sound, in the order in which they are whole."""
    options, rest = split_options(settings)
    return Transcriber(lm, sounds, options, rest, progress).transcriptions()

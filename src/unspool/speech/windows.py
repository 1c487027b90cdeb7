"""Long sounds: window after window, each going on where the last finished segment ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.nn.functional as F

from unspool.protocols import Encoded
from unspool.speech.decoder import WindowDecoder, Written
from unspool.speech.markers import begin, needs_detection
from unspool.speech.segments import Slice, cut_window

Progress = Callable[[Sequence["SoundCursor"]], None]


class FeatureSource(Protocol):
    """The features of a sound, read window by window."""

    def num_left(self, seek: int) -> int:
        """Frames from `seek` to the end, counted up to a window."""
        ...

    def read(self, seek: int) -> torch.Tensor:
        """The features (mels, frames) of a window."""
        ...

    def is_silent(self, seek: int) -> bool:
        """Whether a window needs no decoding, for there is nothing in it."""
        ...

    def count_positions(self, seek: int) -> int | None:
        """The encoder's positions of a window that hold sound; None: all."""
        ...


class FeatureRow:
    """The features of one sound (mels, frames) that were made already."""

    def __init__(self, features: torch.Tensor, window: int, num_frames: int, num_real: int | None, stride: int) -> None:
        self._features, self._window, self._stride = features, window, stride
        self.num_frames, self._num_real = num_frames, num_real

    def num_left(self, seek: int) -> int:
        return max(0, min(self._window, self.num_frames - seek))

    def read(self, seek: int) -> torch.Tensor:
        part = self._features[:, seek : seek + self.num_left(seek)]
        return F.pad(part, (0, self._window - part.shape[1]))

    def is_silent(self, seek: int) -> bool:  # noqa: ARG002 - the caller's features are always read
        return False

    def count_positions(self, seek: int) -> int | None:
        return None if self._num_real is None else max(0, self._num_real - seek) // self._stride


@dataclass
class SoundCursor:
    """Where the work on one sound is."""

    index: int
    source: FeatureSource
    seek: int = 0
    language: int | None = None  # the token that was found
    history: list[list[int]] = field(default_factory=list)  # the tokens of each segment so far
    is_conditioned: bool = False  # whether the next window reads the history


@dataclass(frozen=True)
class WindowResult:
    """What one window gave."""

    index: int  # of the sound
    seek: int  # the window's first frame
    num_frames: int
    written: Written | None  # None: it was taken for silence
    slices: list[Slice]
    language: int | None
    is_last: bool


@dataclass(frozen=True)
class Course:
    """How windows follow each other."""

    languages: Sequence[str | None]  # one per sound; None: found from its first window
    task: str | None
    temperatures: tuple[float | None, ...] = (None,)
    conditions: bool = False  # whether a window reads what was written before it
    prompt_ids: tuple[int, ...] | None = None
    prompts_all: bool = False  # whether every window's history begins with the prompt, or the first one's alone
    wants_times: bool = False
    batch_size: int = 8


def decode_windows(
    decoder: WindowDecoder, sources: Iterable[FeatureSource], course: Course, progress: Progress | None = None
) -> Iterator[WindowResult]:
    """Every window's result, as soon as it is there; the sounds of a batch take turns, row by row."""
    waiting = iter(enumerate(sources))
    cursors: list[SoundCursor] = []
    is_checked = False
    while True:
        while len(cursors) < course.batch_size and (following := next(waiting, None)) is not None:
            cursors.append(_begin(*following, course, decoder))
        if not cursors:
            return
        if not is_checked:
            _check(decoder, cursors[0], course)
            is_checked = True
        if progress is not None:
            progress(cursors)
        yield from _decode_batch(decoder, cursors, course)
        cursors = [cursor for cursor in cursors if cursor.source.num_left(cursor.seek) > 0]


def _begin(index: int, source: FeatureSource, course: Course, decoder: WindowDecoder) -> SoundCursor:
    cursor = SoundCursor(index, source, is_conditioned=course.conditions)
    if course.prompt_ids is not None and not course.prompts_all:
        has_mark = course.prompt_ids[:1] == (decoder.markers.previous,)
        cursor.history.append(list(course.prompt_ids[1:] if has_mark else course.prompt_ids))
    return cursor


def _check(decoder: WindowDecoder, cursor: SoundCursor, course: Course) -> None:
    """Raise for settings that can't be, before the first window is read; any language stands for one to be found."""
    known = next(iter(decoder.markers.languages.values()), None)
    needs_language = needs_detection(decoder.markers, course.languages[cursor.index], course.task)
    prompt = _make_prompt(decoder, replace(cursor, language=known if needs_language else None), course)
    most = decoder.model.info.max_context
    earlier = most // 2 if course.conditions and most is not None else 0
    decoder.check(prompt, course.temperatures, earlier + len(prompt))


def _decode_batch(decoder: WindowDecoder, cursors: Sequence[SoundCursor], course: Course) -> Iterator[WindowResult]:
    """One window of every sound."""
    heard = []
    for cursor in cursors:
        if cursor.source.is_silent(cursor.seek):
            yield _skip(cursor)
        else:
            heard.append(cursor)
    if not heard:
        return
    states = decoder.encode(torch.stack([cursor.source.read(cursor.seek) for cursor in heard]))
    _detect(decoder, heard, states.encoded, course)
    prompts = [_make_prompt(decoder, cursor, course) for cursor in heard]
    texts = decoder.write(states, prompts, course.temperatures)
    for row, (cursor, written) in enumerate(zip(heard, texts, strict=True)):
        if decoder.is_silent(written):
            yield _skip(cursor, written)
            continue
        if course.wants_times:
            decoder.place(states.encoded, row, written, cursor.source.count_positions(cursor.seek))
        yield _take(decoder, cursor, written, course)


def _detect(decoder: WindowDecoder, cursors: Sequence[SoundCursor], encoded: Encoded, course: Course) -> None:
    rows = [
        row
        for row, cursor in enumerate(cursors)
        if cursor.language is None and needs_detection(decoder.markers, course.languages[cursor.index], course.task)
    ]
    if rows:
        part = Encoded(encoded.states[rows], [encoded.lengths[row] for row in rows])
        for row, token in zip(rows, decoder.find_languages(part), strict=True):
            cursors[row].language = token


def _make_prompt(decoder: WindowDecoder, cursor: SoundCursor, course: Course) -> list[int]:
    """What a window's text follows: earlier text or the caller's prompt, then the markers."""
    markers, most = decoder.markers, decoder.model.info.max_context
    marks = begin(markers, course.languages[cursor.index], cursor.language, course.task, decoder.has_timestamps)
    if cursor.is_conditioned and cursor.history:
        earlier = [token for segment in cursor.history for token in _drop_double(segment, markers.first_timestamp)]
        earlier = earlier[-(most // 2 - 1) :] if most is not None else earlier
        if course.prompts_all and course.prompt_ids is not None:
            return [*course.prompt_ids, *earlier, *marks]
        return [*([] if markers.previous is None else [markers.previous]), *earlier, *marks]
    return [*(course.prompt_ids or ()), *marks]


def _drop_double(segment: list[int], first_timestamp: int | None) -> list[int]:
    """A segment without the timestamp that begins what was unfinished."""
    is_double = first_timestamp is not None and len(segment) > 2 and segment[-2] >= first_timestamp
    return segment[:-1] if is_double else segment


def _take(decoder: WindowDecoder, cursor: SoundCursor, written: Written, course: Course) -> WindowResult:
    shape = decoder.model.info.features
    assert shape is not None
    seek, num_frames = cursor.seek, cursor.source.num_left(cursor.seek)
    first = decoder.markers.first_timestamp
    first = decoder.model.info.vocab_size + 1 if first is None else first
    slices, ahead = cut_window(written.tokens, first, seek, num_frames, shape.stride)
    cursor.seek += ahead
    cursor.history += [written.tokens[one.first : one.stop] for one in slices]
    cursor.is_conditioned = course.conditions and (written.temperature is None or written.temperature < 0.5)
    return WindowResult(cursor.index, seek, num_frames, written, slices, cursor.language, _is_done(cursor))


def _skip(cursor: SoundCursor, written: Written | None = None) -> WindowResult:
    seek, num_frames = cursor.seek, cursor.source.num_left(cursor.seek)
    cursor.seek += num_frames
    del written  # it was silence: its text is none
    return WindowResult(cursor.index, seek, num_frames, None, [], cursor.language, _is_done(cursor))


def _is_done(cursor: SoundCursor) -> bool:
    return cursor.source.num_left(cursor.seek) == 0

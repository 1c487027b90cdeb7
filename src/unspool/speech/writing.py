"""Transcripts as files: plain text, SubRip, WebVTT and JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Final

from unspool.errors import SettingError
from unspool.speech.results import Segment, Transcription


def write_txt(transcription: Transcription) -> str:
    """One line per segment."""
    return "".join(f"{segment.text.strip()}\n" for segment in transcription.segments if segment.text.strip())


def write_srt(transcription: Transcription) -> str:
    """SubRip subtitles."""
    return "".join(format_srt(place, segment) for place, segment in enumerate(_list_shown(transcription), start=1))


def write_vtt(transcription: Transcription) -> str:
    """WebVTT subtitles; with times of words, each word is marked with its own."""
    return "WEBVTT\n\n" + "".join(map(format_vtt, _list_shown(transcription)))


def write_json(transcription: Transcription) -> str:
    """Everything that is known."""
    return json.dumps(transcription.as_dict(), ensure_ascii=False, indent=1) + "\n"


FORMATS: Final[dict[str, Callable[[Transcription], str]]] = {
    "txt": write_txt,
    "srt": write_srt,
    "vtt": write_vtt,
    "json": write_json,
}


def find_writer(name: str) -> Callable[[Transcription], str]:
    """The writer of a format."""
    if name not in FORMATS:
        raise SettingError(f"there is no format {name!r:.40}; the formats are {', '.join(FORMATS)}")
    return FORMATS[name]


def format_srt(place: int, segment: Segment) -> str:
    """One subtitle of SubRip."""
    times = f"{format_time(segment.start, ',')} --> {format_time(segment.end, ',')}"
    return f"{place}\n{times}\n{_clean(segment.text)}\n\n"


def format_vtt(segment: Segment) -> str:
    """One cue of WebVTT."""
    text = _escape(_clean(segment.text))
    if segment.words:
        text = "".join(f"<{format_time(word.start, '.')}><c>{_escape(word.text)}</c>" for word in segment.words)
    return f"{format_time(segment.start, '.')} --> {format_time(segment.end, '.')}\n{text.strip()}\n\n"


def format_time(seconds: float, point: str = ".") -> str:
    """Seconds as 00:00:00.000."""
    total = round(max(0.0, seconds) * 1000)
    return f"{total // 3_600_000:02d}:{total // 60_000 % 60:02d}:{total // 1000 % 60:02d}{point}{total % 1000:03d}"


def _list_shown(transcription: Transcription) -> list[Segment]:
    return [segment for segment in transcription.segments if segment.text.strip()]


def _clean(text: str) -> str:
    """A subtitle's text: one line, and nothing that reads as a time."""
    return " ".join(text.split()).replace("-->", "->")


def _escape(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")

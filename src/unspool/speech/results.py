"""What a transcription is: segments and words with their times."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Word:
    """A word and when it was spoken, in seconds."""

    text: str
    start: float
    end: float


@dataclass(slots=True)
class Segment:
    """A piece of a transcript and when it was spoken, in seconds."""

    start: float
    end: float
    text: str
    tokens: list[int] = field(repr=False)
    words: list[Word] | None = None  # if times of words were asked for
    temperature: float | None = None  # that it was written at
    avg_logprob: float | None = None  # of its window, if a threshold asked for it
    compression_ratio: float | None = None  # likewise
    no_speech_prob: float | None = None  # of its window, if it was in doubt
    index: int = 0  # of the sound, in a list of several

    def as_dict(self) -> dict[str, Any]:
        """The segment as JSON values."""
        values: dict[str, Any] = {"start": self.start, "end": self.end, "text": self.text, "tokens": self.tokens}
        if self.words is not None:
            values["words"] = [{"text": word.text, "start": word.start, "end": word.end} for word in self.words]
        for name in ("temperature", "avg_logprob", "compression_ratio", "no_speech_prob"):
            if getattr(self, name) is not None:
                values[name] = getattr(self, name)
        return values


@dataclass(slots=True)
class Transcription:
    """The text of a sound."""

    segments: list[Segment]
    language: str | None  # its code; None if the model names none
    duration: float  # seconds of sound
    seconds: float = 0.0  # that the work took, shared by the sounds of a batch

    @property
    def text(self) -> str:
        """The whole text."""
        return "".join(segment.text for segment in self.segments).strip()

    @property
    def real_time_factor(self) -> float:
        """Seconds of work per second of sound."""
        return self.seconds / self.duration if self.duration else 0.0

    def __str__(self) -> str:
        return self.text

    def as_dict(self) -> dict[str, Any]:
        """The transcription as JSON values."""
        return {
            "text": self.text,
            "language": self.language,
            "duration": self.duration,
            "segments": [segment.as_dict() for segment in self.segments],
        }

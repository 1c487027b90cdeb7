"""Models that write sound, by the names that code for transformers imports."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from unspool.api.calls import generate
from unspool.api.core import find_object
from unspool.errors import InputError, LoadError, SettingError
from unspool.loading.source import find_source
from unspool.models.adapters.voices import VoiceProcessor, find_rate, load_vocoder, write_sound, writes_sound
from unspool.pretrained.auto import _AutoModel
from unspool.pretrained.model import PretrainedModel

_MOST_CHARACTERS = 20_000


@dataclass(frozen=True)
class WrittenSound:
    """What a model has said or played."""

    samples: np.ndarray  # (channels, samples), float32
    rate: int

    @property
    def seconds(self) -> float:
        """How long it is."""
        return float(self.samples.shape[-1] / self.rate)


class AutoModelForTextToWaveform(_AutoModel):
    """Models that write sound; those that write spectrograms load too, and need a vocoder to be heard."""

    @classmethod
    def _check_kind(cls, model: PretrainedModel) -> None:
        theirs = find_object(model)
        if theirs is None or not writes_sound(theirs):
            raise LoadError(f"{model.name_or_path!r:.120} is no model for {cls.__name__}: it writes no sound")


class Speaker:
    """A model that writes sound, its processor and, where it writes spectrograms, a vocoder."""

    def __init__(self, model: Any, folder: str | Path, vocoder: Any = None) -> None:
        theirs = find_object(model)
        if theirs is None or not writes_sound(theirs):
            raise SettingError(f"a {type(model).__name__} writes no sound; load one with AutoModelForTextToWaveform")
        self.model = theirs
        self.processor = VoiceProcessor(find_source(folder, has_weights=False), theirs)
        if isinstance(vocoder, str | Path):
            vocoder = load_vocoder(find_source(vocoder, has_weights=False)).to(theirs.device)
        self.vocoder = vocoder
        self.rate = find_rate(theirs, vocoder)

    def speak(self, text: str, inputs: dict[str, Any] | None = None, **settings: Any) -> WrittenSound:
        """The sound of a text; `inputs` are further ones of its processor, such as a voice."""
        if not isinstance(text, str) or not text.strip():
            raise InputError("there is nothing to say: give a text")
        if len(text) > _MOST_CHARACTERS:
            raise InputError(f"the text has {len(text)} characters; at most {_MOST_CHARACTERS} are spoken at once")
        prepared = self.processor.prepare(text, **(inputs or {}))
        samples = write_sound(self.model, prepared, settings, generate, self.vocoder)
        return WrittenSound(samples.numpy(), self.rate)

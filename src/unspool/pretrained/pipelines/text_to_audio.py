"""`pipeline("text-to-speech")` and `pipeline("text-to-audio")`: a text in, its sound out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unspool.pretrained.pipelines.base import Pipeline, split_texts
from unspool.pretrained.voices import Speaker


class TextToAudioPipeline(Pipeline):
    """Says or plays a text: `{"audio": (channels, samples), "sampling_rate": …}`."""

    def __init__(self, task: str, model: Any, folder: str | Path, vocoder: Any = None, **settings: Any) -> None:
        super().__init__(task, model, None, **settings)
        self.speaker = Speaker(model, folder, vocoder)

    @property
    def sampling_rate(self) -> int:
        """The samples of a second of what it writes."""
        return self.speaker.rate

    def _split(self, inputs: Any) -> tuple[list[Any], bool]:
        return split_texts(inputs)

    def _run(self, items: list[Any], settings: dict[str, Any]) -> list[Any]:
        given = dict(settings.pop("preprocess_params", None) or {})
        for name in ("generate_kwargs", "forward_params"):
            settings |= dict(settings.pop(name, None) or {})
        sounds = [self.speaker.speak(text, given, **settings) for text in items]
        return [{"audio": sound.samples, "sampling_rate": sound.rate} for sound in sounds]

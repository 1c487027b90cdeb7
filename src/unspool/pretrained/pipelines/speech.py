"""`pipeline("automatic-speech-recognition")`: sounds in, their text out."""

from __future__ import annotations

from typing import Any

import numpy as np

from unspool.pretrained.pipelines.base import Pipeline, open_language_model


class SpeechPipeline(Pipeline):
    """Writes what is said in sounds: `{"text": …}`, with `"chunks"` and their times if `return_timestamps` is given.

    Sounds are read in windows of 30 seconds that follow the model's own timestamps, however long they are:
    `chunk_length_s` and `stride_length_s` change nothing.
    """

    def __init__(self, task: str, model: Any, tokenizer: Any = None, **settings: Any) -> None:
        super().__init__(task, model, tokenizer, **settings)
        self._lm = open_language_model(model, tokenizer, "speech", "unspool.generate(model, input_features=…)")

    def _split(self, inputs: Any) -> tuple[list[Any], bool]:
        if isinstance(inputs, list | tuple) and inputs and not isinstance(inputs[0], int | float | np.number):
            return list(inputs), False
        return [inputs], True

    def _run(self, items: list[Any], settings: dict[str, Any]) -> list[Any]:
        for name in ("chunk_length_s", "stride_length_s"):
            settings.pop(name, None)
        given = dict(settings.pop("generate_kwargs", None) or {})
        times = settings.pop("return_timestamps", given.pop("return_timestamps", False))
        found = self._lm.transcribe(items, return_timestamps=times, **given, **settings)
        return [_describe(one, times) for one in found]


def _describe(found: Any, times: Any) -> dict[str, Any]:
    if not times:
        return {"text": found.text}
    parts: list[Any] = found.segments
    if times == "word":
        parts = [word for one in found.segments for word in one.words or ()]
    return {"text": found.text, "chunks": [{"timestamp": (one.start, one.end), "text": one.text} for one in parts]}

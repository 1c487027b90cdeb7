"""What all pipelines share: a model, a tokenizer, settings for every call, and inputs one by one or many."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from types import GeneratorType, MappingProxyType
from typing import Any

import torch

from unspool.api.calls import generate
from unspool.api.core import as_model
from unspool.api.language_model import LanguageModel
from unspool.errors import InputError, SettingError, excerpt
from unspool.pretrained.model import PretrainedModel

MOST_ROWS = 4096  # of a batch


class Pipeline(ABC):
    """A model and its tokenizer behind one call. Settings given here hold for every call, unless it gives others."""

    default_settings: Mapping[str, Any] = MappingProxyType({})  # below the model's own

    def __init__(self, task: str, model: Any, tokenizer: Any = None, **settings: Any) -> None:
        self.task = task
        self.model = model
        self.tokenizer = tokenizer
        self.settings = settings

    @property
    def device(self) -> torch.device:
        """The model's device."""
        device: torch.device = self.model.device
        return device

    def __call__(self, inputs: Any = None, **settings: Any) -> Any:
        """The result of one input, or a list of them for a list; a generator's come as it is read."""
        merged = {**self.settings, **settings}
        size = merged.pop("batch_size", None) or 1
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MOST_ROWS:
            raise SettingError(f"batch_size={excerpt(size)} is not a number from 1 to {MOST_ROWS}")
        merged.pop("num_workers", None)  # inputs are prepared while they are read: there is nothing to share out
        if isinstance(inputs, GeneratorType):
            return self._stream(inputs, size, merged)
        items, is_one = self._split(inputs)
        found = [
            result for at in range(0, len(items), size) for result in self._run(items[at : at + size], dict(merged))
        ]
        return found[0] if is_one else found

    def _stream(self, inputs: Iterator[Any], size: int, settings: dict[str, Any]) -> Iterator[Any]:
        batch: list[Any] = []
        for item in inputs:
            batch.append(item)
            if len(batch) == size:
                yield from self._run(batch, dict(settings))
                batch = []
        if batch:
            yield from self._run(batch, dict(settings))

    @abstractmethod
    def _split(self, inputs: Any) -> tuple[list[Any], bool]:
        """The inputs of a call, and whether there is only one."""

    @abstractmethod
    def _run(self, items: list[Any], settings: dict[str, Any]) -> list[Any]:
        """The results of a batch, one per input."""


def open_language_model(model: Any, tokenizer: Any, what: str, remedy: str) -> LanguageModel:
    """The short way over a pipeline's model; an object of transformers has none."""
    if isinstance(model, PretrainedModel):
        return model.as_language_model(tokenizer)
    if isinstance(model, LanguageModel):
        return model
    raise SettingError(
        f"a pipeline for {what} takes a name, a path, or a model of unspool's, not a {type(model).__name__}; for an "
        f"object of transformers use {remedy}"
    )


def split_texts(inputs: Any) -> tuple[list[str], bool]:
    """One text, or several."""
    if isinstance(inputs, str):
        return [inputs], True
    if isinstance(inputs, Sequence) and not isinstance(inputs, bytes) and all(isinstance(one, str) for one in inputs):
        return list(inputs), False
    raise InputError(f"a pipeline for texts takes a text or a list of texts, not {excerpt(inputs)}")


class TextPipeline(Pipeline):
    """A pipeline whose tokenizer makes rows of ids that the model's generate() reads."""

    def _generate(self, encoding: Mapping[str, Any], settings: dict[str, Any]) -> tuple[torch.Tensor, dict[str, Any]]:
        """The sequences (inputs, sequences of each, length), and what else the call returned by row."""
        inputs = {name: value for name, value in encoding.items() if name != "token_type_ids"}
        rows = inputs["input_ids"].shape[0]
        if inputs["input_ids"].shape[1] == 0:
            inputs = {}  # an empty prompt: it begins with the beginning-of-text token
        moved = {name: value.to(self.device) for name, value in inputs.items()}
        settings.setdefault("tokenizer", self.tokenizer)
        made: Any = generate(self.model, **moved, defaults=self.default_settings, **settings)
        sequences = made if isinstance(made, torch.Tensor) else made.sequences
        others = {} if isinstance(made, torch.Tensor) else split_rows(made, rows)
        return sequences.reshape(rows, -1, sequences.shape[-1]).cpu(), others

    def _encode(self, texts: list[str], options: Mapping[str, Any]) -> Any:
        """Texts as tensors; several are filled on the left, so that the new text follows at once."""
        is_pair = as_model(self.model).info.is_encoder_decoder
        fill = {} if len(texts) == 1 else {"padding": True, "padding_side": "right" if is_pair else "left"}
        return self._fill_call(
            lambda: self.tokenizer(texts, return_tensors="pt", **{**fill, **options}), len(texts) > 1
        )

    def _fill_call(self, call: Any, fills: bool) -> Any:
        """Call the tokenizer; one without a pad token fills with its end of text, which the mask hides."""
        if not fills or self.tokenizer.pad_token is not None or self.tokenizer.eos_token is None:
            return call()
        self.tokenizer.pad_token = self.tokenizer.eos_token
        try:
            return call()
        finally:
            self.tokenizer.pad_token = None


def split_rows(made: Any, rows: int) -> dict[str, Any]:
    """What an output has for every returned sequence, apart from the sequences: (inputs, sequences of each, …)."""
    count = made.sequences.shape[0]
    return {
        name: value.reshape(rows, count // rows, *value.shape[1:]).tolist()
        for name, value in made.items()
        if name != "sequences" and isinstance(value, torch.Tensor) and value.shape[:1] == (count,)
    }

"""`AutoProcessor`: what reads sound and text for a speech model."""

from __future__ import annotations

from itertools import groupby
from os import PathLike
from typing import Any

import numpy as np
import torch

from unspool.errors import InputError, LoadError, SettingError, excerpt
from unspool.loading.source import find_source
from unspool.pretrained.auto import Auto, AutoTokenizer
from unspool.pretrained.keywords import TOKENIZER_KEYWORDS, take_applied
from unspool.pretrained.locations import read_location
from unspool.pretrained.pictures import ImageTextProcessor
from unspool.small_files import read_json_object
from unspool.speech.features import HOP, extract_features
from unspool.speech.sound import RATE
from unspool.text import Encoding, Tokenizer

_MOST_CHANNELS, _MOST_FRAMES = 1024, 1 << 20
_STAMP_SECONDS = 0.02
_OF_SOUND = ("musicgen", "musicgen_melody", "speecht5", "vits")  # models whose processors read texts as tokenizers do


class SpeechProcessor:
    """Makes features of sounds, one window each, and ids of texts."""

    def __init__(self, tokenizer: Tokenizer, num_mels: int, num_frames: int, first_stamp: int | None = None) -> None:
        self.tokenizer = tokenizer
        self._num_mels = num_mels
        self._num_frames = num_frames
        self._first_stamp = first_stamp  # the token of the time 0.00, if the model marks times

    def __call__(
        self, audio: Any = None, *, text: Any = None, sampling_rate: int | None = None, return_tensors: Any = "pt"
    ) -> Encoding:
        """The features (rows, mels, frames) of sounds, cut or filled to one window; or a text's ids."""
        if audio is None:
            if text is None:
                raise InputError("give audio, or text")
            return self.tokenizer(text, return_tensors=return_tensors)
        if sampling_rate not in (None, RATE):
            raise SettingError(
                f"sampling_rate={excerpt(sampling_rate)}: a window's features are made of {RATE} Hz sound"
            )
        if return_tensors != "pt":
            raise SettingError(f"return_tensors={excerpt(return_tensors)} is not made; features are tensors: use 'pt'")
        several = isinstance(audio, list | tuple) and len(audio) > 0 and np.ndim(audio[0]) > 0
        features = torch.stack([self._extract(one) for one in (audio if several else [audio])])
        encoding = Encoding(input_features=features)
        if text is not None:
            encoding["labels"] = self.tokenizer(text, return_tensors=return_tensors).input_ids
        return encoding

    def _extract(self, samples: Any) -> torch.Tensor:
        sound = torch.as_tensor(np.asarray(samples), dtype=torch.float32)
        if sound.dim() != 1 or sound.numel() == 0 or not bool(sound.isfinite().all()):
            raise InputError(f"a sound is one row of finite samples, not an array of shape {list(sound.shape)}")
        window = self._num_frames * HOP
        filled = torch.zeros(window)
        filled[: min(len(sound), window)] = sound[:window]
        return extract_features(filled, self._num_mels)

    def batch_decode(self, sequences: Any, *args: Any, **kwargs: Any) -> list[str]:
        """The text of each row of ids."""
        return [self.decode(row, *args, **kwargs) for row in sequences]

    def decode(self, token_ids: Any, *args: Any, decode_with_timestamps: bool = False, **kwargs: Any) -> str:
        """The text of some ids; `decode_with_timestamps` writes the times among them, as in `<|0.42|>`."""
        ids = token_ids.tolist() if hasattr(token_ids, "tolist") else list(token_ids)
        first = self._first_stamp
        if first is None or not decode_with_timestamps:
            return str(self.tokenizer.decode([one for one in ids if first is None or one < first], *args, **kwargs))
        text = ""
        for is_time, run in groupby(ids, key=lambda one: one >= first):
            found = list(run)
            if is_time:
                text += "".join(f"<|{(one - first) * _STAMP_SECONDS:.2f}|>" for one in found)
            else:
                text += self.tokenizer.decode(found, *args, **kwargs)
        return text


class TextProcessor:
    """Makes ids of texts for a model that writes sound."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __call__(self, text: Any = None, *, return_tensors: Any = "pt", **named: Any) -> Encoding:
        """The ids and the mask of a text, or of several."""
        if text is None:
            raise InputError("give a text")
        return self.tokenizer(text, return_tensors=return_tensors, **named)


class AutoProcessor(Auto):
    """Processors of models that read sound, or pictures."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | PathLike[str], **kwargs: Any) -> Any:
        """Load the processor of a folder or hub id; keywords as for tokenizers."""
        applied = take_applied(kwargs, TOKENIZER_KEYWORDS, f"{cls.__name__}.from_pretrained()")
        location = read_location(pretrained_model_name_or_path, dict(applied))
        path = find_source(
            location.name, revision=location.revision, offline=location.offline, hub=location.hub, has_weights=False
        )
        file = path / "config.json"
        config = read_json_object(file) if file.is_file() else {}
        if "vision_config" in config or (
            (path / "preprocessor_config.json").is_file() and "num_mel_bins" not in config
        ):
            tokenizer = AutoTokenizer.from_pretrained(pretrained_model_name_or_path, **kwargs)
            return ImageTextProcessor(path, tokenizer)
        if config.get("model_type") in _OF_SOUND:
            return TextProcessor(AutoTokenizer.from_pretrained(pretrained_model_name_or_path, **kwargs))
        channels, positions = config.get("num_mel_bins"), config.get("max_source_positions")
        if type(channels) is not int or type(positions) is not int:
            raise LoadError(f"{path} reads neither sound nor pictures; AutoTokenizer loads a text model's tokenizer")
        if not 0 < channels <= _MOST_CHANNELS or not 0 < positions <= _MOST_FRAMES:
            raise LoadError(f"{file} gives {channels} channels and {positions} positions, which can't be")
        settings = path / "generation_config.json"
        last = read_json_object(settings).get("no_timestamps_token_id") if settings.is_file() else None
        tokenizer = AutoTokenizer.from_pretrained(pretrained_model_name_or_path, **kwargs)
        return SpeechProcessor(tokenizer, channels, 2 * positions, last + 1 if type(last) is int else None)

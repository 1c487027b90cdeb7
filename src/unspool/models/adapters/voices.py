"""Models of transformers that write sound: what their processors make of a text, and the sound that comes out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from unspool.errors import InputError, LoadError, SettingError, UnsupportedError
from unspool.models.adapters.adapted import name_failures
from unspool.models.adapters.columns import has_codebooks
from unspool.models.adapters.folder import silence
from unspool.models.adapters.pictures.processor import import_transformers
from unspool.shortage import is_out_of_memory

_RATES: Final = ("sample_rate", "sampling_rate")
_PARTS: Final = ("audio_encoder", "codec_config", "audio_encoder_config")  # configs of codecs
_SPEAKERS: Final = {"csm": "[0]"}  # what a text begins with that names no speaker, by `model_type`
_MOST_RATE: Final = 768_000


def writes_sound(model: Any) -> bool:
    """Whether an object writes sound that this module can make of what it returns."""
    return bool(_find_way(model))


def _find_way(model: Any) -> str:
    """How an object writes: by codebooks, by spectrograms, in one pass, by its own generate(), or not at all."""
    if has_codebooks(model):
        return "codebooks"
    if hasattr(model, "generate_speech"):
        return "spectrogram"
    if not getattr(model, "can_generate", lambda: False)():
        return "pass" if hasattr(model.config, "sampling_rate") else ""
    if "output_audio" in inspect.signature(model.generate).parameters:
        return "own"
    return "parts" if hasattr(model, "codec_model") else ""


def find_rate(model: Any, vocoder: Any = None) -> int:
    """The samples of a second of what a model writes."""
    _check_vocoder(model, vocoder)
    holders = [getattr(vocoder, "config", None), getattr(model, "generation_config", None), model.config]
    holders += [getattr(model.config, name, None) for name in _PARTS]
    for holder in holders:
        for name in _RATES:
            rate = getattr(holder, name, None)
            if type(rate) is int and 0 < rate <= _MOST_RATE:
                return rate
    raise UnsupportedError(f"{type(model).__name__} does not say how many samples a second of its sound has")


class VoiceProcessor:
    """What makes a model's inputs of texts: transformers' processor of its folder, or its tokenizer."""

    def __init__(self, folder: Path, model: Any) -> None:
        transformers = import_transformers("a model that writes sound")
        needs_processor = _find_way(model) in ("own", "parts")
        auto = transformers.AutoProcessor if needs_processor else transformers.AutoTokenizer
        self._speaker = _SPEAKERS.get(getattr(model.config, "model_type", ""), "")
        try:
            with silence(transformers):
                self.inner = auto.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # files can make transformers' code fail in any way
            if is_out_of_memory(error):
                raise
            message = " ".join(str(error).split())[:300]
            raise LoadError(f"{folder} has no processor of texts: {type(error).__name__}: {message}") from error

    def prepare(self, text: str, **named: Any) -> dict[str, Any]:
        """The inputs that one text makes."""
        if self._speaker and not text.startswith("["):
            text = self._speaker + text
        if self._speaker:
            named.setdefault("add_special_tokens", True)
        return dict(self(text, return_tensors="pt", **named))

    def __call__(self, *args: Any, **named: Any) -> Any:
        """What transformers' processor returns."""
        try:
            return self.inner(*args, **named)
        except Exception as error:
            if is_out_of_memory(error):
                raise
            message = " ".join(str(error).split())[:300]
            raise InputError(
                f"the model's processor can't read this text: {type(error).__name__}: {message}"
            ) from error


@torch.no_grad()
def write_sound(
    model: Any,
    inputs: Mapping[str, Any],
    settings: Mapping[str, Any],
    generate: Callable[..., Any],
    vocoder: Any = None,
) -> torch.Tensor:
    """The sound of one text: (channels, samples), float32. `generate` is unspool's, which decodes what it can."""
    way, kind = _find_way(model), type(model).__name__
    moved = {name: value.to(model.device) if hasattr(value, "to") else value for name, value in inputs.items()}
    if way == "codebooks":
        made = generate(model, **moved, **settings)
    elif way == "spectrogram":
        made = _write_spectrogram(model, moved, settings, vocoder)
    elif way == "pass":
        if settings:
            raise SettingError(f"a {kind} writes in one pass, without settings; leave out {', '.join(settings)}")
        with name_failures(model):
            made = model(**moved).waveform
    elif way == "own":
        with name_failures(model):
            made = model.generate(**moved, **settings, output_audio=True)
    elif way == "parts":  # its generate() hands settings of its own from part to part
        with name_failures(model):
            made = model.generate(**moved, **settings)
    else:
        raise UnsupportedError(
            f"{kind} returns no sound, but codes that a codec elsewhere reads; use its own generate()"
        )
    return _read_sound(made, kind)


def _check_vocoder(model: Any, vocoder: Any) -> None:
    kind, needs_one = type(model).__name__, _find_way(model) == "spectrogram"
    if needs_one and vocoder is None:
        raise SettingError(f"a {kind} writes spectrograms: give a `vocoder`, a SpeechT5HifiGan or its folder")
    if vocoder is not None and not needs_one:
        raise SettingError(f"`vocoder` makes sound of spectrograms, and a {kind} writes sound itself; leave it out")


def _write_spectrogram(model: Any, inputs: Mapping[str, Any], settings: Mapping[str, Any], vocoder: Any) -> Any:
    kind = type(model).__name__
    known = inspect.signature(model.generate_speech).parameters
    unknown = [name for name in settings if name not in known]
    if unknown:
        raise SettingError(f"a {kind} draws no tokens and has no setting {unknown[0]!r:.80}; it has {', '.join(known)}")
    given = {name: value for name, value in settings.items() if name != "speaker_embeddings"}
    voice = settings.get("speaker_embeddings")
    if voice is None:
        raise SettingError(f"a {kind} speaks with a voice: give `speaker_embeddings`, a tensor (1, numbers)")
    voice = torch.as_tensor(voice, dtype=model.dtype, device=model.device)
    with name_failures(model):
        return model.generate_speech(inputs["input_ids"], voice, vocoder=vocoder, **given)


def _read_sound(made: Any, kind: str) -> torch.Tensor:
    """The first sound of what a model returned."""
    found = getattr(made, "audio", None)
    found = getattr(made, "sequences", made) if found is None else found
    found = found[0] if isinstance(found, list | tuple) and found else found
    if not isinstance(found, torch.Tensor) or not found.is_floating_point():
        raise UnsupportedError(f"{kind} returned no sound, but a {type(found).__name__}; use its own generate()")
    sound = found.detach().float().cpu()
    while sound.dim() > 2:
        sound = sound[0]
    sound = sound[None] if sound.dim() == 1 else sound
    if not sound.shape[-1]:
        raise InputError(f"{kind} wrote an empty sound; give a longer text, or let it write more tokens")
    if not bool(torch.isfinite(sound).all()):
        raise UnsupportedError(f"{kind} wrote NaN or infinite samples; try dtype=torch.float32")
    return sound


def load_vocoder(folder: Path) -> Any:
    """The vocoder of a folder, which makes sound of spectrograms."""
    transformers = import_transformers("a vocoder")
    try:
        with silence(transformers):
            made = transformers.SpeechT5HifiGan.from_pretrained(folder, use_safetensors=True, local_files_only=True)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        message = " ".join(str(error).split())[:300]
        raise LoadError(f"{folder} has no vocoder that can be loaded: {type(error).__name__}: {message}") from error
    return made.eval()

"""`AutoModelFor…` and `AutoTokenizer`: `from_pretrained` on native models and tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, NoReturn, TypeVar

import tokenizers
import torch

from unspool.api.language_model import read_devices, read_quantize
from unspool.api.opening import read_config
from unspool.config import PARAMETERS
from unspool.errors import LoadError, SettingError, UnsupportedError
from unspool.loading.model import load_parts
from unspool.loading.tokenizer import load_tokenizer
from unspool.pretrained.keywords import MODEL_KEYWORDS, TOKENIZER_KEYWORDS, take_applied
from unspool.pretrained.locations import ModelLocation, read_location
from unspool.pretrained.model import PretrainedModel
from unspool.pretrained.quantization import read_quantization
from unspool.small_files import read_json_object
from unspool.text import Tokenizer
from unspool.text.folder import MAX_CONFIG_BYTES
from unspool.text.languages import mark_languages
from unspool.text.special_tokens import NAMED_TOKENS

Loaded = TypeVar("Loaded", bound=PretrainedModel)


class Auto:
    """What the classes share: they are not made, they load."""

    def __init__(self, *_: Any, **__: Any) -> None:
        name = type(self).__name__
        raise TypeError(f"{name} is not made by calling it; use {name}.from_pretrained(name_or_path)")


def load_pretrained(
    kind: type[Loaded],
    name: str,
    place: str | PathLike[str],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    check: Callable[[ModelLocation], None] | None = None,
) -> Loaded:
    """The model of a place, as an object of `kind`; `check` looks at its files before weights are read."""
    caller = f"{name}.from_pretrained()"
    if args:
        raise SettingError(f"{caller} takes one name or path, and keywords")
    applied = take_applied(kwargs, MODEL_KEYWORDS, caller, PARAMETERS)
    location = read_location(place, applied)
    if check is not None:
        check(location)
    settings = {name: applied.pop(name) for name in list(applied) if name in PARAMETERS}
    own = applied.pop("generation_config", None)
    parts = load_parts(
        location.name,
        revision=location.revision,
        offline=location.offline,
        hub=location.hub,
        **_read_placement(applied),
        **applied,
    )
    model = kind(parts)
    if own is not None:
        model.generation_config = read_config(own)
    if unused := model.generation_config.update(**settings):
        raise SettingError(f"{caller} does not know {', '.join(unused)}")
    return model


class _AutoModel(Auto):
    _is_pair: ClassVar[bool | None] = False  # None: either
    _hears: ClassVar[bool | None] = None  # None: either

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Load a model: a folder, a GGUF file, a hub id or a short name. Keywords: docs/transformers.md."""
        model = load_pretrained(PretrainedModel, cls.__name__, pretrained_model_name_or_path, args, kwargs)
        cls._check_kind(model)
        return model

    @classmethod
    def from_config(cls, *_: Any, **__: Any) -> NoReturn:
        """Refused: a model without weights writes nothing."""
        raise UnsupportedError(f"{cls.__name__} loads models that have weights: use from_pretrained(name_or_path)")

    @classmethod
    def _check_kind(cls, model: PretrainedModel) -> None:
        """Refuse a model of another kind, which would read its inputs otherwise than the caller means."""
        if cls._is_pair is None:
            return
        config = model.config
        is_pair = bool(getattr(config, "is_encoder_decoder", False))
        hears = hasattr(config, "num_mel_bins")
        right = _name_kind(is_pair=is_pair, hears=hears)
        if is_pair != cls._is_pair and not (hears and cls._hears is None):
            raise LoadError(f"{model.name_or_path!r:.120} is no model for {cls.__name__}; load it with {right}")
        if cls._hears is not None and hears != cls._hears:
            raise LoadError(f"{model.name_or_path!r:.120} is no model for {cls.__name__}; load it with {right}")


def _name_kind(*, is_pair: bool, hears: bool) -> str:
    if not is_pair:
        return AutoModelForCausalLM.__name__
    return (AutoModelForSpeechSeq2Seq if hears else AutoModelForSeq2SeqLM).__name__


class AutoModel(_AutoModel):
    """Any model that writes, with its head: decoders, encoder-decoders, models that read sound."""

    _is_pair = None


class AutoModelForCausalLM(_AutoModel):
    """Decoders: they continue a text. A speech model loads too, as it does in transformers' documents."""


class AutoModelForSeq2SeqLM(_AutoModel):
    """Encoder-decoders: they read a text and write another."""

    _is_pair = True
    _hears = False


class AutoModelForSpeechSeq2Seq(_AutoModel):
    """Encoder-decoders that read sound."""

    _is_pair = True
    _hears = True


class AutoTokenizer(Auto):
    """Tokenizers, with the names and answers that transformers' have."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | PathLike[str], **kwargs: Any) -> Tokenizer:
        """Load the tokenizer of a folder, a GGUF file, a hub id or a short name. Keywords: docs/transformers.md."""
        applied = take_applied(kwargs, TOKENIZER_KEYWORDS, f"{cls.__name__}.from_pretrained()")
        location = read_location(pretrained_model_name_or_path, applied)
        tokenizer, path = load_tokenizer(
            location.name, revision=location.revision, offline=location.offline, hub=location.hub
        )
        file = path / "tokenizer_config.json"
        config = read_json_object(file, MAX_CONFIG_BYTES, is_strict=False) if file.is_file() else {}
        tokenizer.name_or_path = str(pretrained_model_name_or_path)
        tokenizer.padding_side = applied.pop("padding_side", None) or _read_side(config, "padding_side")
        tokenizer.truncation_side = applied.pop("truncation_side", None) or _read_side(config, "truncation_side")
        longest = applied.pop("model_max_length", None)
        tokenizer.model_max_length = config.get("model_max_length") if longest is None else longest
        cleans = applied.pop("clean_up_tokenization_spaces", None)
        if cleans is not None:
            tokenizer.clean_up_tokenization_spaces = bool(cleans)
        template = applied.pop("chat_template", None)
        if template is not None:
            tokenizer.chat_template = template
        spaced = applied.pop("add_prefix_space", None)
        if spaced is not None:
            _set_prefix_space(tokenizer.backend_tokenizer, bool(spaced))
        source = applied.pop("src_lang", None)
        if source is not None:
            mark_languages(tokenizer, source, None)
        for name in NAMED_TOKENS:
            if applied.get(name) is not None:
                tokenizer.special_tokens.set(name, str(applied[name]))
        return tokenizer


def _read_side(config: Mapping[str, Any], name: str) -> Any:
    return config[name] if config.get(name) in ("left", "right") else "right"


def _set_prefix_space(backend: tokenizers.Tokenizer, is_on: bool) -> None:
    """Have texts read as if a space preceded them, or not; pre-tokenizers that split off spaces know how."""
    cutter = backend.pre_tokenizer
    is_chain = isinstance(cutter, tokenizers.pre_tokenizers.Sequence)
    parts: list[Any] = list(cutter) if is_chain else [cutter]
    has_one = False
    for part in parts:
        if isinstance(part, tokenizers.pre_tokenizers.ByteLevel):
            part.add_prefix_space, has_one = is_on, True
        elif isinstance(part, tokenizers.pre_tokenizers.Metaspace):
            part.prepend_scheme, has_one = "always" if is_on else "never", True
    if not has_one and is_on:
        raise UnsupportedError("add_prefix_space=True is for byte-level and sentencepiece vocabularies; leave it out")
    if has_one:
        backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(parts) if len(parts) > 1 else parts[0]


def _read_placement(applied: dict[str, Any]) -> dict[str, Any]:
    """Device, dtype and quantisation, as load() takes them; the reference's names are taken out of `applied`."""
    dtype, older = applied.pop("dtype", None), applied.pop("torch_dtype", None)
    if dtype is not None and older is not None and dtype != older:
        raise SettingError(
            "`dtype` and `torch_dtype` are two names of one argument, with different values; give `dtype`"
        )
    dtype = older if dtype is None else dtype
    mapped, device = applied.pop("device_map", None), applied.pop("device", None)
    placed, devices = read_devices(device, mapped, applied.pop("max_memory", None))
    blocks = read_quantization(applied.pop("quantization_config", None))
    switches = {name: bool(applied.pop(name, False)) for name in ("load_in_8bit", "load_in_4bit")}
    if blocks is not None and any(switches.values()):
        raise SettingError("load_in_8bit, load_in_4bit and quantization_config exclude each other; give one")
    quantize = read_quantize(applied.pop("quantize", "auto"), **switches)
    if blocks is not None and blocks.quantize != "auto":
        if quantize not in ("auto", blocks.quantize):
            raise SettingError(
                f"quantize={quantize!r} and quantization_config ({blocks.quantize}) ask for different things; give one"
            )
        quantize = blocks.quantize
    if (
        blocks is not None and dtype is None and not _is_cpu(placed if devices is None else devices.lead)
    ):  # a CPU's products sum in float32
        dtype = blocks.bnb_4bit_compute_dtype
    return {"device": placed, "dtype": dtype, "quantize": quantize, "devices": devices}


def _is_cpu(device: Any) -> bool:
    return not torch.cuda.is_available() if device is None else torch.device(device).type == "cpu"


def open_model(kind: type[_AutoModel], model: Any, **kwargs: Any) -> Any:
    """A model as it is, or the one that a name or path leads to."""
    return kind.from_pretrained(model, **kwargs) if isinstance(model, str | Path) else model

"""`pipeline(task, model)`: loads what it needs and returns the task's pipeline."""

from __future__ import annotations

from os import PathLike
from typing import Any

from unspool.api.core import as_model, find_object
from unspool.api.language_model import LanguageModel
from unspool.errors import SettingError, UnsupportedError, excerpt
from unspool.loading.catalogue import DEFAULT_MODEL
from unspool.pretrained.auto import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
)
from unspool.pretrained.keywords import MODEL_KEYWORDS
from unspool.pretrained.model import PretrainedModel
from unspool.pretrained.pictures import AutoModelForImageTextToText
from unspool.pretrained.pipelines.base import Pipeline
from unspool.pretrained.pipelines.image_to_text import ImageTextToTextPipeline, ImageToTextPipeline
from unspool.pretrained.pipelines.speech import SpeechPipeline
from unspool.pretrained.pipelines.text_generation import TextGenerationPipeline
from unspool.pretrained.pipelines.text_to_audio import TextToAudioPipeline
from unspool.pretrained.pipelines.text_to_text import Text2TextPipeline
from unspool.pretrained.voices import AutoModelForTextToWaveform

_TASKS: dict[str, tuple[type[Pipeline], Any]] = {
    "text-generation": (TextGenerationPipeline, AutoModelForCausalLM),
    "text2text-generation": (Text2TextPipeline, AutoModelForSeq2SeqLM),
    "summarization": (Text2TextPipeline, AutoModelForSeq2SeqLM),
    "translation": (Text2TextPipeline, AutoModelForSeq2SeqLM),
    "automatic-speech-recognition": (SpeechPipeline, AutoModelForSpeechSeq2Seq),
    "text-to-speech": (TextToAudioPipeline, AutoModelForTextToWaveform),
    "text-to-audio": (TextToAudioPipeline, AutoModelForTextToWaveform),
    "image-to-text": (ImageToTextPipeline, AutoModelForImageTextToText),
    "image-text-to-text": (ImageTextToTextPipeline, AutoModelForImageTextToText),
}
# How a model is loaded; a name may be a setting of calls too.
_LOADING = ("dtype", "torch_dtype", "device_map", "revision", "token", "use_auth_token", "trust_remote_code")
_REFUSED = {
    "config": "a model is built from the config.json in its folder",
    "feature_extractor": "sounds are read by unspool's own features",
    "image_processor": "the model's folder says how its pictures are read",
    "processor": "the model's folder says how its inputs are read",
    "pipeline_class": "derive a class from Pipeline and call it",
    "framework": "torch is the framework",
}


def pipeline(
    task: str | None = None,
    model: Any = None,
    tokenizer: Any = None,
    *,
    device: Any = None,
    model_kwargs: dict[str, Any] | None = None,
    use_fast: bool = True,
    assistant_model: Any = None,
    assistant_tokenizer: Any = None,
    **settings: Any,
) -> Pipeline:
    """A model behind one call: `pipeline("text-generation", model)("The sea is", max_new_tokens=20)`.

    `model` is a name or path (loaded with `dtype`, `device_map`, `revision` and `model_kwargs`), a model of unspool's,
    or a transformers object. `settings` hold for every call. `use_fast` changes nothing: there is one tokenizer.
    """
    del use_fast
    for name, reason in _REFUSED.items():
        if settings.pop(name, None) not in (None, "pt"):
            raise UnsupportedError(f"pipeline() can't take `{name}`: {reason}; leave it out")
    loading = {name: settings.pop(name) for name in _LOADING if name in settings}
    loading |= _read_device(device, loading) | _check_names(model_kwargs or {})
    if task is not None and not isinstance(task, str):
        raise SettingError(f"pipeline() takes a task's name first, not a {type(task).__name__}: {', '.join(_TASKS)}")
    model = DEFAULT_MODEL if model is None else model
    task = _find_task(model) if task is None else task
    known = "translation" if _is_translation(task) else task
    if known not in _TASKS:
        raise UnsupportedError(f"there is no pipeline for {excerpt(task)}; the tasks are {', '.join(_TASKS)}")
    kind, auto = _TASKS[known]
    place = model if isinstance(model, str | PathLike) else None
    if place is not None:
        model = auto.from_pretrained(place, **loading)
    elif loading.pop("device", None) is not None:
        model = model.to(device if device != -1 else "cpu")
    if kind is TextToAudioPipeline:
        return _open_voice(task, model, tokenizer, place, assistant_model, settings)
    tokenizer = _find_tokenizer(tokenizer, model, place, loading)
    if assistant_model is not None:
        settings |= _open_assistant(assistant_model, assistant_tokenizer, tokenizer, model, loading)
    elif assistant_tokenizer is not None:
        raise SettingError("`assistant_tokenizer` is a draft model's; give assistant_model too")
    return kind(task, model, tokenizer, **settings)


def _open_voice(
    task: str, model: Any, tokenizer: Any, place: Any, assistant: Any, settings: dict[str, Any]
) -> TextToAudioPipeline:
    """A pipeline for sound; the folder's processor reads its texts."""
    if assistant is not None:
        raise SettingError("`assistant_model` drafts texts; leave it out")
    named = tokenizer if isinstance(tokenizer, str | PathLike) else place
    folder = named or getattr(model, "name_or_path", "")
    if not folder:
        raise SettingError(
            f"this {type(model).__name__} came without its folder, whose processor reads texts: give it as tokenizer="
        )
    return TextToAudioPipeline(task, model, str(folder), settings.pop("vocoder", None), **settings)


def _is_translation(task: Any) -> bool:
    return isinstance(task, str) and task.startswith("translation")


def _read_device(device: Any, loading: dict[str, Any]) -> dict[str, Any]:
    if device is None:
        return {}
    if loading.get("device_map") is not None:
        raise SettingError("`device` and `device_map` both say where the weights go; give one")
    if device == -1:
        return {"device": "cpu"}
    return {"device": f"cuda:{device}" if isinstance(device, int) and not isinstance(device, bool) else device}


def _check_names(given: dict[str, Any]) -> dict[str, Any]:
    unknown = [name for name in given if name not in MODEL_KEYWORDS]
    if unknown:
        raise SettingError(f"model_kwargs has {unknown[0]!r:.80}, which from_pretrained() does not know")
    return given


def _find_task(model: Any) -> str:
    """The task that a model's kind implies."""
    if isinstance(model, str | PathLike):
        raise SettingError(f"say what {str(model)!r:.80} is for: pipeline('text-generation', model=…)")
    if getattr(model, "pictures", None) is not None:
        return "image-text-to-text"
    info = as_model(model).info
    if info.features is not None:
        return "automatic-speech-recognition"
    return "text2text-generation" if info.is_encoder_decoder else "text-generation"


def _find_tokenizer(tokenizer: Any, model: Any, place: Any, loading: dict[str, Any]) -> Any:
    hub = {name: loading[name] for name in ("revision", "token", "use_auth_token") if name in loading}
    if isinstance(tokenizer, str | PathLike):
        return AutoTokenizer.from_pretrained(tokenizer, **hub)
    if tokenizer is not None:
        return tokenizer
    if isinstance(model, LanguageModel):
        return model.tokenizer
    name = place if place is not None else model.name_or_path if isinstance(model, PretrainedModel) else ""
    if not name and find_object(model) is not None:
        name = getattr(model, "name_or_path", "") or ""
    if not name:
        raise SettingError(f"this {type(model).__name__} came without a tokenizer: pipeline(…, tokenizer=…)")
    return AutoTokenizer.from_pretrained(name, **hub)


def _open_assistant(assistant: Any, tokenizer: Any, own: Any, model: Any, loading: dict[str, Any]) -> dict[str, Any]:
    """The drafting model of every call, with its tokenizer if its vocabulary is another one."""
    if isinstance(assistant, str | PathLike):
        place, kept = assistant, {name: value for name, value in loading.items() if name != "revision"}
        kept.setdefault("device", str(model.device))
        kept.pop("device_map", None)
        assistant = AutoModelForCausalLM.from_pretrained(place, **kept)
        tokenizer = AutoTokenizer.from_pretrained(place) if tokenizer is None else tokenizer
    elif isinstance(tokenizer, str | PathLike):
        tokenizer = AutoTokenizer.from_pretrained(tokenizer)
    found = {"assistant_model": assistant}
    if tokenizer is not None and tokenizer.get_vocab() != own.get_vocab():
        found |= {"tokenizer": own, "assistant_tokenizer": tokenizer}
    return found

"""Processors of transformers for pictures: they size pictures for a model, and write their places into the prompt."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from unspool.errors import InputError, LoadError, MissingExtraError, UnspoolError
from unspool.models.adapters.folder import EXTRA, silence
from unspool.shortage import is_out_of_memory
from unspool.small_files import read_json_object

_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")


def import_transformers(purpose: str) -> Any:
    """transformers; raises an error that names the extra where it is missing."""
    try:
        import transformers
    except ImportError as error:
        raise MissingExtraError("transformers", EXTRA, purpose) from error
    return transformers


def read_whole_config(folder: Path) -> dict[str, Any]:
    """A folder's config with the values that its file leaves out because they are its classes' own."""
    transformers = import_transformers("a model that reads pictures")
    try:
        with silence(transformers):
            found = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
            whole: dict[str, Any] = found.to_dict()
    except Exception as error:
        raise LoadError(f"the config.json of {folder} can't be read: {_describe(error)}") from error
    return {**whole, "architectures": read_json_object(folder / "config.json").get("architectures")}


class PictureProcessor:
    """A folder's processor: texts and pictures in, token ids and tensors of pixels out."""

    def __init__(self, folder: Path) -> None:
        transformers = import_transformers("a prompt with pictures")
        try:
            with silence(transformers), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self._inner = _load(transformers, folder)
        except UnspoolError:
            raise
        except Exception as error:
            raise LoadError(f"{folder} has no processor of pictures that can be loaded: {_describe(error)}") from error

    @property
    def tokenizer(self) -> Any:
        """Its tokenizer, an object of transformers."""
        return getattr(self._inner, "tokenizer", None)

    def prepare(self, text: str, pictures: Sequence[Any], *, is_rendered: bool) -> dict[str, torch.Tensor]:
        """Ids of a text and the pixels of its pictures; a text that a chat template wrote has its special tokens."""
        named: dict[str, Any] = {}
        if text or is_rendered:
            named["text"] = [text]
        if pictures:
            named["images"] = [list(pictures)] if named else list(pictures)
        if is_rendered:
            named["add_special_tokens"] = False
        return self.call(**named)

    def call(self, **named: Any) -> dict[str, torch.Tensor]:
        """The tensors that transformers' processor returns."""
        try:
            made = self._inner(**named, return_tensors="pt")
        except (
            Exception
        ) as error:  # of places that are more or fewer than pictures, of sizes that a model has no use for
            if is_out_of_memory(error):
                raise
            raise InputError(
                f"the model's processor can't read this prompt with pictures: {_describe(error)}. Every picture needs "
                "its place in the text: give messages with parts of the type 'image', or the model's own mark"
            ) from error
        return {name: value for name, value in made.items() if isinstance(value, torch.Tensor)}


def _load(transformers: Any, folder: Path) -> Any:
    """transformers' processor of a folder; that of pictures alone where torchvision, which videos need, is missing."""
    named = {"trust_remote_code": False, "local_files_only": True}
    if transformers.utils.is_torchvision_available():
        return transformers.AutoProcessor.from_pretrained(folder, **named)
    kind = _find_class(transformers, folder)
    return _without_videos(transformers, kind).from_pretrained(folder, **named)


def _find_class(transformers: Any, folder: Path) -> Any:
    for file in _FILES:
        held = read_json_object(folder / file) if (folder / file).is_file() else {}
        name = held.get("processor_class")
        if isinstance(name, str) and name.endswith("Processor") and hasattr(transformers, name):
            return getattr(transformers, name)
    known: Mapping[Any, str | None] = transformers.models.auto.processing_auto.PROCESSOR_MAPPING_NAMES
    name = known.get(read_json_object(folder / "config.json").get("model_type"))
    if name is None:
        raise LoadError(f"{folder} names no processor; it needs a processor_config.json")
    return getattr(transformers, name)


def _without_videos(transformers: Any, kind: Any) -> Any:
    """A class of processors that has no part for videos."""

    class OfPictures(kind):  # type: ignore[misc]  # a class of transformers
        @classmethod
        def _get_arguments_from_pretrained(cls, folder: Any, _: Any = None, **kwargs: Any) -> list[Any]:
            found: list[Any] = []
            for name in cls.get_attributes():
                if name == "tokenizer":
                    found.append(transformers.AutoTokenizer.from_pretrained(folder, **kwargs))
                elif name == "image_processor":
                    found.append(_load_image_processor(transformers, folder, kwargs))
                elif name == "video_processor":
                    found.append(None)
                else:
                    raise LoadError(f"a {kind.__name__} has a part for {name}, which is not loaded beside pictures")
            return found

        def check_argument_for_proper_class(self, argument_name: str, argument: Any) -> Any:
            return type(argument)

    OfPictures.__name__ = kind.__name__
    return OfPictures


def _load_image_processor(transformers: Any, folder: Any, named: Mapping[str, Any]) -> Any:
    has_backends = hasattr(transformers, "CLIPImageProcessorPil")  # older releases have slow processors and fast ones
    chosen: dict[str, Any] = {"backend": "pil"} if has_backends else {"use_fast": False}
    return transformers.AutoImageProcessor.from_pretrained(folder, **chosen, **named)


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"

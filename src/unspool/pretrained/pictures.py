"""Models that read pictures, and their processors, by the names that code for transformers imports."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from unspool.errors import InputError, LoadError, SettingError, excerpt
from unspool.models.adapters.pictures import PictureProcessor
from unspool.pictures import Limits, open_picture, take_pictures
from unspool.pretrained.auto import _AutoModel
from unspool.pretrained.model import PretrainedModel
from unspool.text import Encoding, Tokenizer


class AutoModelForImageTextToText(_AutoModel):
    """Models that read pictures beside text."""

    @classmethod
    def _check_kind(cls, model: PretrainedModel) -> None:
        if model.pictures is None:
            raise LoadError(
                f"{model.name_or_path!r:.120} is no model for {cls.__name__}: it reads no pictures; load it with "
                "AutoModelForCausalLM, AutoModelForSeq2SeqLM or AutoModelForSpeechSeq2Seq"
            )


class ImageTextProcessor:
    """Makes ids and pixels of texts and pictures, as `generate` takes them."""

    def __init__(self, folder: Path, tokenizer: Tokenizer, limits: Limits | None = None) -> None:
        self.tokenizer = tokenizer
        self._limits = limits
        self._inner = PictureProcessor(folder)

    def __call__(self, images: Any = None, text: Any = None, *, return_tensors: Any = "pt", **kwargs: Any) -> Encoding:
        """Ids, mask and pixels; pictures are paths, bytes, arrays, data: URIs or Pillow's images."""
        if return_tensors != "pt":
            raise SettingError(f"return_tensors={excerpt(return_tensors)} is not made; pixels are tensors: use 'pt'")
        if images is None and text is None:
            raise InputError("give images, text, or both")
        opened = None if images is None else self._open(images)
        return self._run(text, opened, kwargs)

    def _open(self, images: Any) -> Any:
        if isinstance(images, list | tuple):
            return [self._open(one) for one in images]
        return open_picture(images, self._limits)

    def _run(self, text: Any, images: Any, kwargs: Mapping[str, Any]) -> Encoding:
        named = {name: value for name, value in (("text", text), ("images", images)) if value is not None}
        return Encoding(self._inner.call(**named, **kwargs))

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        *,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        return_tensors: Any = "pt",
        **variables: Any,
    ) -> Any:
        """A chat with its pictures as `generate` takes it, or, without `tokenize`, its text."""
        if return_tensors != "pt":
            raise SettingError(f"return_tensors={excerpt(return_tensors)} is not made; pixels are tensors: use 'pt'")
        if conversation and not isinstance(conversation[0], Mapping):
            if len(conversation) != 1:
                raise SettingError(f"{len(conversation)} chats were given; give one, a list of messages")
            conversation = conversation[0]
        found = take_pictures(conversation, self._limits)
        text = self.tokenizer.apply_chat_template(
            found.messages, add_generation_prompt=add_generation_prompt, tokenize=False, **variables
        )
        if not tokenize:
            return text
        made = self._run([text], [found.pictures] if found.pictures else None, {"add_special_tokens": False})
        return made if return_dict else made["input_ids"]

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> str:
        """The text of some ids."""
        ids = token_ids.tolist() if isinstance(token_ids, torch.Tensor) else list(token_ids)
        return str(self.tokenizer.decode(ids, *args, **kwargs))

    def batch_decode(self, sequences: Any, *args: Any, **kwargs: Any) -> list[str]:
        """The text of each row of ids."""
        return [self.decode(row, *args, **kwargs) for row in sequences]

    post_process_image_text_to_text = batch_decode

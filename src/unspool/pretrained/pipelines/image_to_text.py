"""`pipeline("image-to-text")` and `pipeline("image-text-to-text")`: pictures in, a text out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from unspool.api.calls import generate
from unspool.errors import InputError, SettingError, UnsupportedError
from unspool.models.adapters.pictures import PicturePrompt
from unspool.pictures import open_picture, take_pictures
from unspool.pretrained.pipelines.base import Pipeline, open_language_model

_Chat = list[Mapping[str, Any]]


class _PicturePipeline(Pipeline):
    """What both share: a model that reads pictures, one prompt at a time."""

    def __init__(self, task: str, model: Any, tokenizer: Any = None, **settings: Any) -> None:
        super().__init__(task, model, tokenizer, **settings)
        remedy = "unspool.generate(model, **processor(images=…, text=…))"
        self._lm = open_language_model(model, tokenizer, "pictures", remedy)
        if self._lm.pictures is None:
            raise UnsupportedError(f"{self._lm.name} reads text alone; {task} takes a model that reads pictures")

    def _write(self, prompt: Any, images: Any, settings: dict[str, Any]) -> list[str]:
        """The new texts of a prompt: messages, or a text with pictures beside it."""
        lm, reader = self._lm, self._lm.pictures
        assert reader is not None
        settings |= dict(settings.pop("generate_kwargs", None) or {})
        if reader.is_native:
            return list(lm.generate(prompt, **({} if images is None else {"images": images}), **settings).texts)
        if images is None:
            found = take_pictures(prompt)
            text = lm.tokenizer.apply_chat_template(  # type: ignore[union-attr]  # a chat needs one
                found.messages, add_generation_prompt=True, tokenize=False
            )
            given = reader.prepare(PicturePrompt(str(text), found.pictures, is_rendered=True))
        else:
            sources = images if isinstance(images, list) else [images]
            given = reader.prepare(PicturePrompt(prompt or "", [open_picture(one) for one in sources], False))
        settings.setdefault("tokenizer", lm.tokenizer)
        made: Any = generate(reader.inner, None, None, **{"max_new_tokens": 256, **given, **settings})
        sequences = getattr(made, "sequences", made)
        is_pair = bool(getattr(reader.inner.config, "is_encoder_decoder", False))
        start = 0 if is_pair or "input_ids" not in given else given["input_ids"].shape[1]
        assert lm.tokenizer is not None
        return [lm.tokenizer.decode(row[start:].tolist(), skip_special_tokens=True) for row in sequences]


class ImageToTextPipeline(_PicturePipeline):
    """Says what is in a picture: `[{"generated_text": …}]`; `prompt` begins the text, or asks for it."""

    def _split(self, inputs: Any) -> tuple[list[Any], bool]:
        if isinstance(inputs, list | tuple):
            return list(inputs), False
        if inputs is None:
            raise InputError("image-to-text takes a picture: a path, bytes, an array, a data: URI or Pillow's image")
        return [inputs], True

    def _run(self, items: list[Any], settings: dict[str, Any]) -> list[Any]:
        prompt = settings.pop("prompt", None)
        return [[{"generated_text": text} for text in self._describe(item, prompt, dict(settings))] for item in items]

    def _describe(self, picture: Any, prompt: str | None, settings: dict[str, Any]) -> list[str]:
        tokenizer = self._lm.tokenizer
        if prompt is None and tokenizer is not None and tokenizer.chat_template is not None:
            chat = [{"role": "user", "content": [{"type": "image", "image": picture}]}]
            return self._write(chat, None, settings)
        return self._write(prompt, picture, settings)


class ImageTextToTextPipeline(_PicturePipeline):
    """Answers about pictures: chats with them, or texts that mark their places beside `images`."""

    def __call__(self, inputs: Any = None, text: Any = None, *, images: Any = None, **settings: Any) -> Any:
        """`[{"input_text": …, "generated_text": …}]` of one prompt, a list of them of several."""
        if images is None:
            images = inputs
        elif inputs is not None:
            raise SettingError("the first argument and `images` are both pictures; give one of them")
        is_several = isinstance(images, list) and bool(images) and all(map(_is_chat, images))
        if text is None and (_is_chat(images) or is_several):
            images, text = None, images
        if text is None:
            raise InputError("image-text-to-text takes a chat, or a text beside its images")
        if _is_chat(text) or isinstance(text, str):
            return super().__call__([(text, images)], **settings)[0]
        several = images if isinstance(images, list) else itertools.repeat(images)
        return super().__call__(list(zip(text, several, strict=False)), **settings)

    def _split(self, inputs: Any) -> tuple[list[Any], bool]:
        return list(inputs), False

    def _run(self, items: list[Any], settings: dict[str, Any]) -> list[Any]:
        is_full = settings.pop("return_full_text", None)
        return [self._answer(text, images, is_full, dict(settings)) for text, images in items]

    def _answer(self, text: Any, images: Any, is_full: bool | None, settings: dict[str, Any]) -> list[dict[str, Any]]:
        if _is_chat(text):
            if images is not None:
                text = _place(text, images if isinstance(images, list) else [images])
            answers = self._write(text, None, settings)
            whole: Any = [[*text, {"role": "assistant", "content": answer}] for answer in answers]
        else:
            answers = self._write(text, images, settings)
            whole = [f"{text}{answer}" for answer in answers]
        shown = answers if is_full is False else whole
        return [{"input_text": text, "generated_text": one} for one in shown]


def _is_chat(given: Any) -> bool:
    return isinstance(given, Sequence) and bool(given) and not isinstance(given, str) and isinstance(given[0], Mapping)


def _place(chat: Sequence[Mapping[str, Any]], images: list[Any]) -> _Chat:
    """A chat whose parts of the type "image" without a source have the pictures in their order."""
    left = list(images)
    made: _Chat = []
    for message in chat:
        content = message.get("content")
        if isinstance(content, list):
            content = [
                {**part, "image": left.pop(0)} if left and isinstance(part, Mapping) and dict(part) == _EMPTY else part
                for part in content
            ]
        made.append({**message, "content": content})
    if left:
        raise InputError(f"{len(images)} images were given and the chat has {len(images) - len(left)} places for them")
    return made


_EMPTY = {"type": "image"}

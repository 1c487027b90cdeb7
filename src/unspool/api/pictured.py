"""Prompts with pictures: chats with parts of the type "image", and texts with `images` beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from unspool.api.prompt import OMITTED, refuse_chat
from unspool.api.speaker import Speaker
from unspool.errors import InputError, SettingError, UnsupportedError, excerpt
from unspool.grammar.generic_tools import is_silent, write_tools
from unspool.models.adapters.pictures import PICTURE_INPUTS, PIXELS, EmbeddedPrompts, PicturePrompt, PictureReader
from unspool.pictures import Pictured, open_picture, take_pictures
from unspool.pictures.chats import has_pictures

_ROWS = 256  # prompts with pictures of one call


class PictureInputs:
    """What a call's prompts with pictures are to the model."""

    def __init__(self, rows: list[list[int]], arguments: dict[str, Any], owner: Any) -> None:
        self.rows = rows  # token ids, with those that stand for pictures
        self.arguments = arguments  # of start()
        self.owner = owner  # the model to start


def read_pictured(lm: Speaker, prompt: Any, images: Any, *, chat: bool, tools: Any) -> PictureInputs | None:
    """The inputs of prompts with pictures; None if there are none. Pictures are opened and read here, once."""
    is_prepared = isinstance(prompt, Mapping) and prompt.get(PIXELS) is not None
    if images is None and not is_prepared and not _holds_pictures(prompt):
        return None
    prompt = None if prompt is OMITTED else prompt
    reader: PictureReader | None = getattr(lm, "pictures", None)
    if reader is None:
        raise UnsupportedError(
            f"the prompt has pictures, and {lm.name} reads text alone; load a model that reads pictures (LLaVA, "
            "Qwen2-VL, SmolVLM, Gemma 3, …), or leave them out"
        )
    if is_prepared:
        return _take_prepared(lm, reader, prompt, images, chat=chat, tools=tools)
    prompts = _list_prompts(lm, prompt, images, chat=chat, tools=tools)
    pad = lm.generation_config.pad_token_id
    if reader.is_native:
        return _take_embedded(lm, reader.read(lm.model, prompts, pad if isinstance(pad, int) and pad >= 0 else 0))
    if len(prompts) > 1:
        raise UnsupportedError(
            f"several prompts with pictures were given, and {lm.name} runs through transformers, one prompt a call; "
            "give one"
        )
    return _take_tensors(lm, reader, reader.prepare(prompts[0]))


def _take_prepared(
    lm: Speaker, reader: PictureReader, prompt: Mapping[str, Any], images: Any, *, chat: bool, tools: Any
) -> PictureInputs:
    """What the model's processor returned, as a prompt."""
    refuse_chat(chat, tools)
    if images is not None:
        raise SettingError("`images` and pixel_values are the same thing twice; give one of them")
    unknown = set(prompt) - {"input_ids", "attention_mask", *PICTURE_INPUTS}
    if unknown:
        raise InputError(f"a prompt with pixel_values has {excerpt(min(unknown))} too, which no model reads beside it")
    if not reader.is_native:
        return _take_tensors(lm, reader, prompt)
    if not isinstance(prompt.get("input_ids"), torch.Tensor):
        raise InputError("a prompt with pixel_values has input_ids too, as the model's processor returns them")
    return _take_embedded(lm, reader.embed(lm.model, prompt))


def _take_embedded(lm: Speaker, made: EmbeddedPrompts) -> PictureInputs:
    lengths = [made.ids.shape[1]] * made.ids.shape[0] if made.mask is None else made.mask.sum(-1).tolist()
    rows = [row[len(row) - n :] for row, n in zip(made.ids.tolist(), lengths, strict=True)]
    return PictureInputs(rows, {"inputs_embeds": made}, lm)


def _take_tensors(lm: Speaker, reader: PictureReader, tensors: Mapping[str, Any]) -> PictureInputs:
    """The arguments of a model that runs as an object of transformers."""
    given: dict[str, Any] = {name: value.to(lm.model.device) for name, value in tensors.items()}
    given[PIXELS] = given[PIXELS].to(lm.model.dtype)
    ids = given.get("input_ids")
    return PictureInputs([] if ids is None else ids.tolist(), {**given, "tokenizer": lm.tokenizer}, reader.inner)


def _holds_pictures(prompt: Any) -> bool:
    if has_pictures(prompt):
        return True
    is_list = isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], list | tuple)
    return is_list and any(has_pictures(one) for one in prompt)


def _list_prompts(lm: Speaker, prompt: Any, images: Any, *, chat: bool, tools: Any) -> list[PicturePrompt]:
    if images is not None:
        return [_read_beside(lm, prompt, images, chat=chat, tools=tools)]
    chats = [prompt] if isinstance(prompt[0], Mapping) else list(prompt)
    if len(chats) > _ROWS:
        raise InputError(f"{len(chats)} prompts with pictures in one call; at most {_ROWS} are taken")
    return [_render(lm, take_pictures(one), tools) for one in chats]


def _read_beside(lm: Speaker, prompt: Any, images: Any, *, chat: bool, tools: Any) -> PicturePrompt:
    """A text with pictures beside it: it marks their places itself, or, with `chat`, they precede it in a message."""
    sources = list(images) if isinstance(images, list | tuple) else [images]
    if not sources:
        raise InputError("`images` is an empty list; give pictures, or leave it out")
    if prompt is not None and not isinstance(prompt, str):
        raise SettingError(
            "`images` stand beside one text; in messages a picture is a part of a content: "
            '{"type": "image", "image": picture}'
        )
    if chat:
        parts: list[dict[str, Any]] = [{"type": "image", "image": source} for source in sources]
        return _render(
            lm, take_pictures([{"role": "user", "content": [*parts, {"type": "text", "text": prompt}]}]), tools
        )
    if tools is not None:
        raise SettingError("tools go with a chat; give messages, or add chat=True")
    opened = [open_picture(source, name=f"the picture images[{place}]") for place, source in enumerate(sources)]
    return PicturePrompt(prompt or "", opened, is_rendered=False)


def _render(lm: Speaker, found: Pictured, tools: Any) -> PicturePrompt:
    tokenizer = lm.tokenizer
    if tokenizer is None:
        raise InputError(f"a chat needs a tokenizer, and {lm.name} came without one")
    messages: Sequence[Mapping[str, Any]] = found.messages
    if tools and is_silent(tokenizer):
        messages, tools = write_tools(messages, tools), None
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tools=tools, tokenize=False)
    return PicturePrompt(str(text), found.pictures, is_rendered=True)

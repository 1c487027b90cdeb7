"""`pipeline("text-generation")`: texts and chats continued."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from types import MappingProxyType
from typing import Any

from unspool.api.core import as_model
from unspool.errors import SettingError, excerpt
from unspool.pretrained.pipelines.base import TextPipeline, split_texts


@dataclass(slots=True)
class _Options:
    """What a call says beside the settings of generate()."""

    return_full_text: bool | None = None
    return_text: bool | None = None
    return_tensors: bool | None = None
    clean_up_tokenization_spaces: bool | None = None
    skip_special_tokens: bool | None = None
    prefix: str | None = None
    handle_long_generation: str | None = None
    stop_sequence: str | list[str] | None = None
    truncation: Any = None
    add_special_tokens: bool | None = None
    continue_final_message: bool | None = None
    tokenizer_encode_kwargs: Mapping[str, Any] | None = None
    tools: Any = None
    documents: Any = None

    @classmethod
    def take(cls, settings: dict[str, Any]) -> _Options:
        options = cls(**{one.name: settings.pop(one.name) for one in fields(cls) if one.name in settings})
        given = [name for name in ("return_full_text", "return_text", "return_tensors") if getattr(options, name)]
        if len(given) > 1:
            raise SettingError(f"{' and '.join(f'`{name}`' for name in given)} exclude each other; give one of them")
        if options.handle_long_generation not in (None, "hole"):
            raise SettingError(
                f"handle_long_generation={excerpt(options.handle_long_generation)} is not known; use 'hole' or None"
            )
        if options.prefix is not None and not isinstance(options.prefix, str):
            raise SettingError("`prefix` is a text that goes before the prompts")
        return options


class TextGenerationPipeline(TextPipeline):
    """Continues texts and chats: `[{"generated_text": …}]` for one, a list of such lists for several.

    By default at most 256 tokens are written, sampled at temperature 0.7, unless the model's own settings say
    otherwise.
    """

    default_settings = MappingProxyType({"max_new_tokens": 256, "do_sample": True, "temperature": 0.7})

    def _split(self, inputs: Any) -> tuple[list[Any], bool]:
        if isinstance(inputs, Mapping) and "messages" in inputs:
            inputs = inputs["messages"]
        if _is_chat(inputs):
            return [list(inputs)], True
        if isinstance(inputs, list | tuple) and inputs and all(_is_chat(one) for one in inputs):
            return [list(one) for one in inputs], False
        return split_texts(inputs)

    def _run(self, items: list[Any], settings: dict[str, Any]) -> list[Any]:
        options = _Options.take(settings)
        if options.stop_sequence is not None:
            several = [options.stop_sequence] if isinstance(options.stop_sequence, str) else list(options.stop_sequence)
            settings["stop_strings"] = several
        encoding = self._read(items, options, settings)
        width = encoding["input_ids"].shape[1]
        sequences, others = self._generate(encoding, settings)
        return [
            [
                self._describe(item, row.tolist(), width, options)
                | {name: values[at][index] for name, values in others.items()}
                for index, row in enumerate(rows)
            ]
            for at, (item, rows) in enumerate(zip(items, sequences, strict=True))
        ]

    def _read(self, items: list[Any], options: _Options, settings: Mapping[str, Any]) -> Any:
        asked = {} if options.truncation is None else {"truncation": options.truncation}
        if settings.get("max_length") is not None and options.truncation:
            asked["max_length"] = settings["max_length"]
        asked |= options.tokenizer_encode_kwargs or {}
        if isinstance(items[0], str):
            if options.add_special_tokens is not None:
                asked["add_special_tokens"] = options.add_special_tokens
            encoding = self._encode([f"{options.prefix or ''}{text}" for text in items], asked)
        else:
            texts = [self._render(chat, options) for chat in items]
            encoding = self._encode(texts, {**asked, "add_special_tokens": False})
        if options.handle_long_generation == "hole":
            self._make_room(encoding, settings)
        return encoding

    def _render(self, chat: list[Mapping[str, Any]], options: _Options) -> str:
        """A chat as text; a last message of the assistant's is continued."""
        continues = _continues(chat, options)
        given = {"tools": options.tools, "documents": options.documents}
        text: str = self.tokenizer.apply_chat_template(
            chat,
            tokenize=False,
            add_generation_prompt=not continues,
            continue_final_message=continues,
            **{name: value for name, value in given.items() if value is not None},
        )
        return text

    def _make_room(self, encoding: Any, settings: Mapping[str, Any]) -> None:
        """Cut prompts on the left, so that the new tokens fit into the model's context."""
        own = getattr(self.model.generation_config, "max_new_tokens", None)
        new = settings.get("max_new_tokens") or own or self.default_settings["max_new_tokens"]
        longest, context = self.tokenizer.model_max_length, as_model(self.model).info.max_context
        limit = longest if context is None else min(longest, context)
        width = encoding["input_ids"].shape[1]
        if width + new <= limit:
            return
        if limit <= new:
            raise SettingError(
                f"max_new_tokens={new} leaves no room for a prompt in a context of {limit} tokens; ask for fewer"
            )
        for name, value in encoding.items():
            encoding[name] = value[:, width - (limit - new) :]

    def _describe(self, item: Any, sequence: list[int], width: int, options: _Options) -> dict[str, Any]:
        if options.return_tensors:
            return {"generated_token_ids": sequence}
        shown = True if options.skip_special_tokens is None else options.skip_special_tokens
        text = self.tokenizer.decode(
            sequence[width:],
            skip_special_tokens=shown,
            clean_up_tokenization_spaces=options.clean_up_tokenization_spaces,
        )
        if options.return_full_text is False:
            return {"generated_text": text}
        if isinstance(item, str):
            return {"generated_text": item + text}
        if _continues(item, options):
            return {"generated_text": [*item[:-1], {**item[-1], "content": item[-1]["content"] + text}]}
        return {"generated_text": [*item, {"role": "assistant", "content": text}]}


def _is_chat(item: Any) -> bool:
    return (
        isinstance(item, Sequence)
        and not isinstance(item, str)
        and bool(item)
        and all(isinstance(one, Mapping) and "role" in one for one in item)
    )


def _continues(chat: Sequence[Mapping[str, Any]], options: _Options) -> bool:
    if options.continue_final_message is not None:
        return options.continue_final_message
    return bool(chat[-1]["role"] == "assistant")

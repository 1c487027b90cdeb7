"""The short way: a model with its tokenizer, text in and text out."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from unspool.api.calls import feed, start
from unspool.api.prompt import PROMPT_NAMES, as_ids, read_encoding, refuse_chat
from unspool.config import GenerationConfig
from unspool.decoding.run import Run
from unspool.errors import InputError, SettingError
from unspool.loading.model import LoadedParts, load_parts
from unspool.outputs import Generation, TokenLogprob
from unspool.text import Detokenizer, StopText, Tokenizer

DEFAULT_MODEL = "smollm2-135m"
FRIENDLY_DEFAULTS: Mapping[str, Any] = {"max_new_tokens": 256}
MAX_PROMPTS = 65_536

Prompt = Any
"""A text, a list of texts, a chat (list of messages), a list of chats, token ids, or a tensor of them."""


class Piece(str):
    """A piece of streamed text: print it as it is, or ask which row and tokens it came from."""

    row: int
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[TokenLogprob]

    def __new__(
        cls,
        text: str,
        row: int = 0,
        token_ids: Sequence[int] = (),
        finish_reason: str | None = None,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> Piece:
        piece = super().__new__(cls, text)
        piece.row, piece.finish_reason = row, finish_reason
        piece.token_ids, piece.logprobs = list(token_ids), list(logprobs)
        return piece


class LanguageModel:
    """A model, its tokenizer and its generation settings."""

    def __init__(self, parts: LoadedParts) -> None:
        self.name = parts.name
        self.model = parts.model
        self.tokenizer: Tokenizer | None = parts.tokenizer
        self.model.generation_config = parts.generation_config
        self.source = parts.location

    @property
    def generation_config(self) -> GenerationConfig:
        """The model's own settings; change them to change every later call."""
        config: GenerationConfig = self.model.generation_config
        return config

    @generation_config.setter
    def generation_config(self, config: GenerationConfig) -> None:
        self.model.generation_config = config

    @property
    def device(self) -> torch.device:
        """Where the model computes."""
        return self.model.device

    def __repr__(self) -> str:
        return f"LanguageModel({self.name!r}, {self.model.info.family}, {self.model.dtype}, {self.device})"

    # --- text out ------------------------------------------------------------------------------------
    def generate(self, prompt: Prompt = None, *, streamer: Any = None, **settings: Any) -> Generation:
        """Continue prompts and return their texts; at most 256 new tokens unless told otherwise."""
        answer = _Answer(self, prompt, settings)
        if streamer is not None:
            feed(streamer, answer.run)
            answer.read_back()
        else:
            for _ in answer.pieces():
                pass
        return answer.result()

    def stream(self, prompt: Prompt = None, **settings: Any) -> Iterator[Piece]:
        """The text as it is written; the pieces of a batch's rows come interleaved (`piece.row` tells which)."""
        return _Answer(self, prompt, settings).pieces()

    async def astream(self, prompt: Prompt = None, **settings: Any) -> AsyncIterator[Piece]:
        """`stream` for asynchronous programs: the work runs in a thread, and stops when the iterator is closed."""
        pieces = self.stream(prompt, **settings)
        step: asyncio.Future[Piece | None] | None = None
        try:
            while True:
                step = asyncio.ensure_future(asyncio.to_thread(next, pieces, None))
                piece = await asyncio.shield(step)
                if piece is None:
                    return
                yield piece
        finally:
            if step is not None and not step.done():
                await asyncio.wait([step])  # a generator can't be closed while it runs
            pieces.close()  # type: ignore[attr-defined]  # a generator

    # --- prompts in ------------------------------------------------------------------------------------
    def encode(self, prompt: Prompt, *, chat: bool = False, tools: Any = None) -> list[list[int]]:
        """Token ids of a prompt, a row each: texts, chats or ids."""
        if isinstance(prompt, torch.Tensor):
            prompt = prompt.tolist()
        if isinstance(prompt, str):
            return [self._encode_text(prompt, chat, tools)]
        if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
            raise InputError(f"a prompt is text, messages or token ids, not a {type(prompt).__name__}")
        if len(prompt) == 0:
            raise InputError("the prompt is an empty list; give a text, messages or token ids")
        if isinstance(prompt[0], Integral | Mapping):
            return [self._encode_row(prompt, chat, tools)]
        if len(prompt) > MAX_PROMPTS:
            raise InputError(f"{len(prompt)} prompts in one call; at most {MAX_PROMPTS} are taken")
        return [self._encode_row(item, chat, tools) for item in prompt]

    def _encode_row(self, prompt: Prompt, chat: bool, tools: Any) -> list[int]:
        """Token ids of one text, one chat, or one row of ids."""
        if isinstance(prompt, str):
            return self._encode_text(prompt, chat, tools)
        items = prompt.tolist() if isinstance(prompt, torch.Tensor) else prompt
        if not isinstance(items, Sequence) or isinstance(items, bytes):
            raise InputError(f"a prompt is text, messages or token ids, not a {type(items).__name__}")
        if len(items) == 0:
            raise InputError("a prompt is an empty list: there is nothing to continue. Give at least one token")
        if all(isinstance(item, Mapping) for item in items):
            return self._encode_chat(items, tools)
        if all(isinstance(item, Integral) and not isinstance(item, bool) for item in items):
            refuse_chat(chat, tools)
            return [int(item) for item in items]
        kinds = ", ".join(sorted({type(item).__name__ for item in items}))
        raise InputError(f"a prompt is text, a list of messages or a list of token ids, not a list of {kinds}")

    def _encode_text(self, text: str, chat: bool, tools: Any) -> list[int]:
        if chat:
            return self._encode_chat([{"role": "user", "content": text}], tools)
        if tools is not None:
            raise SettingError("tools go with a chat; give messages, or add chat=True")
        if not text:
            raise InputError("the prompt is empty: there is nothing to continue. Give at least one character")
        return self._require_tokenizer("a text prompt").encode(text)

    def _encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Any) -> list[int]:
        tokenizer = self._require_tokenizer("a chat")
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, tools=tools)
        return list(ids)

    def _require_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise InputError(f"{what} needs a tokenizer, and {self.name} came without one; pass token ids")
        return self.tokenizer


def load(
    name: str | Path = DEFAULT_MODEL,
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
    offline: bool | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> LanguageModel:
    """Load a model: a folder in the Hugging Face layout, a GGUF file, a hub id, or a short name.

    `device` defaults to the GPU where there is one; `dtype` to float32 on a CPU and to what the file holds on a GPU.
    `progress(what, done, total)` is called while weights are read.
    """
    return LanguageModel(
        load_parts(name, device=device, dtype=dtype, revision=revision, offline=offline, progress=progress)
    )


class _Answer:
    """One call of the short way: a run, and the text of its rows."""

    def __init__(self, lm: LanguageModel, prompt: Prompt, settings: dict[str, Any]) -> None:
        chat, tools = settings.pop("chat", False), settings.pop("tools", None)
        skip_special = settings.pop("skip_special_tokens", True)
        self._lm = lm
        self._prompt_ids, arguments = self._read_prompt(prompt, settings, chat, tools)
        self.run: Run = start(
            lm, defaults=FRIENDLY_DEFAULTS, hides_padding=bool(self._prompt_ids), **arguments, **settings
        )
        self._added = list(self.run.added_texts)
        tokenizer, stops = lm.tokenizer, self.run.stop_strings
        rows = range(self.run.num_rows)
        self._text: list[list[str]] = [[] for _ in rows]
        self._decoders = (
            None if tokenizer is None else [Detokenizer(tokenizer, skip_special_tokens=skip_special) for _ in rows]
        )
        self._trimmers = [StopText(stops, keep=self.run.keeps_stop_strings) for _ in rows] if stops else None

    def _read_prompt(
        self, prompt: Prompt, settings: dict[str, Any], chat: bool, tools: Any
    ) -> tuple[list[list[int]], dict[str, Any]]:
        """The prompt's rows, where it came as such, and the arguments that stand for it."""
        given = {name: settings.pop(name) for name in PROMPT_NAMES if name in settings}
        given = {name: value for name, value in given.items() if value is not None}
        if prompt is None:
            refuse_chat(chat, tools)
            return [], given
        if isinstance(prompt, torch.Tensor) and prompt.dim() in (1, 2):
            prompt = {"input_ids": prompt if prompt.dim() == 2 else prompt[None]}
            prompt |= {"attention_mask": given.pop("attention_mask")} if "attention_mask" in given else {}
        if given:
            raise SettingError(
                f"`{next(iter(given))}` and a prompt were given; an attention_mask goes with a tensor of ids, "
                "and the others stand for a prompt themselves"
            )
        if isinstance(prompt, Mapping):
            refuse_chat(chat, tools)
            rows, arguments = read_encoding(prompt)
        else:
            rows, arguments = self._lm.encode(prompt, chat=chat, tools=tools), {}
        if not rows:
            return [], arguments
        if not all(rows):
            raise InputError(f"prompt {[len(row) for row in rows].index(0)} is empty: there is nothing to continue")
        return rows, arguments | self._fill(rows)

    def _fill(self, rows: list[list[int]]) -> dict[str, torch.Tensor]:
        pad = self._lm.generation_config.pad_token_id
        filler = pad if pad is not None and pad >= 0 else 0  # never looked at
        is_right = self._lm.model.info.is_encoder_decoder
        longest = max(len(row) for row in rows)
        ids, mask = [], []
        for row in rows:
            fill = longest - len(row)
            ids.append(row + [filler] * fill if is_right else [filler] * fill + row)
            mask.append([1] * len(row) + [0] * fill if is_right else [0] * fill + [1] * len(row))
        return {"input_ids": as_ids(ids), "attention_mask": torch.tensor(mask)}

    def pieces(self) -> Iterator[Piece]:
        """Every row's text as it becomes certain."""
        waiting: dict[int, tuple[list[int], list[TokenLogprob]]] = {}
        for emitted in self.run:
            for row, tokens in emitted.tokens.items():
                ids, logprobs = waiting.setdefault(row, ([], []))
                ids += tokens
                logprobs += emitted.logprobs.get(row, [])
                reason = emitted.finished.get(row)
                text = self._write(row, tokens, is_last=reason is not None)
                if text or reason is not None or self._decoders is None:
                    del waiting[row]
                    yield Piece(text, row, ids, reason, logprobs)

    def read_back(self) -> None:
        """Write the text of a run that a streamer has consumed."""
        for row, tokens in enumerate(self.run.emitted):
            self._write(row, tokens, is_last=True)

    def _write(self, row: int, tokens: Sequence[int], *, is_last: bool) -> str:
        if self._decoders is None:
            return ""
        text = self._decoders[row].put(tokens) + (self._decoders[row].end() if is_last else "")
        text, self._added[row] = self._added[row] + text, ""  # a healed prompt has grown past the caller's
        if self._trimmers is not None:
            text = self._trimmers[row].put(text) + (self._trimmers[row].end() if is_last else "")
        self._text[row].append(text)
        return text

    def result(self) -> Generation:
        """Texts, tokens and costs."""
        run = self.run
        prompts = self._prompt_ids or run.prompt_token_ids()
        return Generation(
            texts=["".join(parts) for parts in self._text],
            token_ids=run.emitted,
            prompt_token_ids=prompts,
            finish_reasons=run.finish_reasons(),
            stats=run.stats,
            logprobs=run.logprobs if run.record.num_top is not None else None,
            prompt_logprobs=run.prompt_logprobs,
            output=run.output() if run.returns_output else None,
        )

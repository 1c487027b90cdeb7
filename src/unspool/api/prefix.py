"""A beginning that many prompts share: read once, and every later call starts after it."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from unspool.api.pruning import WINDOW, Held, Pruning, choose_keys
from unspool.api.speaker import Piece, Speaker
from unspool.cache import ROLL_BACK, Cache, find_kind, load_cache, read_options, save_cache
from unspool.cache.pruned import check_dynamic, explain_unpruned, keep_keys
from unspool.decoding.reader import Reader
from unspool.errors import ContextError, InputError, LoadError, SettingError, UnsupportedError
from unspool.outputs import Generation
from unspool.shortage import explain_shortage

CHUNK = 512  # tokens of a prefix that are read in one pass

Message = Mapping[str, Any]


class Prefix:
    """The beginning of prompts, and the cache of a model that has read it.

    A text or token ids given to `generate` continue after the prefix, tokenised separately. Messages continue after
    the prefix's messages. The answer is that of a call with all tokens at once.
    """

    def __init__(
        self,
        lm: Speaker,
        token_ids: list[int],
        cache: Cache,
        messages: Sequence[Message] | None,
        source_ids: list[int] | None = None,
    ) -> None:
        self._lm = lm
        self.token_ids = token_ids  # one for each position that the cache holds
        self.source_ids = token_ids if source_ids is None else source_ids  # what was read; more, if keys were let go
        self.cache = cache
        self.messages = None if messages is None else list(messages)
        self.is_spent = False  # its cache was passed on and belongs to another call
        self._is_single_use = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Prefix:
        """A prefix with a cache of its own, of the same model unless that is copied along."""
        copied = copy.copy(self)
        copied._lm = memo.get(id(self._lm), self._lm)
        copied.token_ids, copied.messages = list(self.token_ids), copy.deepcopy(self.messages, memo)
        copied.source_ids = list(self.source_ids)
        copied.cache = self.cache.clone()
        memo[id(self)] = copied
        return copied

    def __len__(self) -> int:
        return len(self.token_ids)

    def __repr__(self) -> str:
        return f"Prefix({len(self)} tokens, {self.cache.nbytes / 2**20:.1f} MiB, {self._lm.name!r})"

    @property
    def nbytes(self) -> int:
        """The size of its keys in bytes."""
        return self.cache.nbytes

    # --- going on ------------------------------------------------------------------------------------
    def generate(self, prompt: Any, **settings: Any) -> Generation:
        """`lm.generate` for what follows the prefix."""
        return self._lm.generate(prompt, prefix=self, **settings)

    def stream(self, prompt: Any, **settings: Any) -> Iterator[Piece]:
        """`lm.stream` for what follows the prefix."""
        return self._lm.stream(prompt, prefix=self, **settings)

    def astream(self, prompt: Any, **settings: Any) -> AsyncIterator[Piece]:
        """`lm.astream` for what follows the prefix."""
        return self._lm.astream(prompt, prefix=self, **settings)

    def compress(
        self, ratio: float = 0.5, rule: str = "snapkv", *, question: str = "", window: int = WINDOW, seed: int = 0
    ) -> Prefix:
        """A prefix of which each layer and head keeps that share of its keys; this one stays as it is.

        `rule` says which: "snapkv" (what the last `window` tokens attend to, or the `question`, if it is known what the
        prefix will be asked), "h2o", "keydiff", "knorm", "llmlingua", "sinks", "random". All strategies go on from it
        as from any prefix: later tokens stand as far from every key as before.
        """
        asked, model = Pruning(ratio, rule, window, seed), self._lm.model
        if self._is_single_use or self.source_ids is not self.token_ids:
            raise SettingError("keys are let go of a prefix that was read by lm.prefix(…), once; start from that one")
        if question and rule != "snapkv":
            raise SettingError("`question` is for rule='snapkv', which looks at what it attends to; leave it out")
        cache = check_dynamic(self.cache)
        if not self.token_ids:
            raise InputError("the prefix is empty, so it has no keys to let go")
        rotation = getattr(model, "key_rotation", None)
        reason = explain_unpruned(model.info, rotation, len(cache))
        if reason is not None or rotation is None:
            raise UnsupportedError(f"keys can't be let go: {reason}")
        words = self._encode_question(question) if question else []
        kept, places = choose_keys(Held(model, self.token_ids, cache, words), asked)
        token_ids = [self.token_ids[place] for place in places]
        return Prefix(self._lm, token_ids, keep_keys(cache, kept, rotation), self.messages, self.token_ids)

    def _encode_question(self, question: str) -> list[int]:
        if not isinstance(question, str) or self._lm.tokenizer is None:
            raise InputError("`question` is a text, which needs a tokenizer; give one, or leave it out")
        return self._lm.tokenizer.encode(question, add_special_tokens=False)

    def save(self, path: str | Path) -> None:
        """Write it to a file, which `lm.load_prefix` reads."""
        notes = {"token_ids": self.token_ids, "messages": self.messages}
        if self.source_ids is not self.token_ids:
            notes["source_ids"] = self.source_ids
        save_cache(self.cache, path, model=self._lm.model, notes=notes)

    # --- what a call asks of it ------------------------------------------------------------------------
    def encode(self, prompt: Any, *, chat: bool = False, tools: Any = None) -> list[list[int]]:
        """Whole prompts, one list per row: the prefix's tokens and what follows them."""
        if isinstance(prompt, torch.Tensor):
            prompt = prompt.tolist()
        is_one = isinstance(prompt, str) or (len(prompt) > 0 and isinstance(prompt[0], Integral | Mapping))
        rows = [self._encode_row(item, chat, tools) for item in ([prompt] if is_one else prompt)]
        return rows if self.source_ids is self.token_ids else [self._stand_in(row) for row in rows]

    def _stand_in(self, row: list[int]) -> list[int]:
        """A whole prompt with the tokens that keys were kept of for the prefix."""
        if row[: len(self.source_ids)] != self.source_ids:
            same = _count_common(self.source_ids, row)
            raise UnsupportedError(
                f"a prompt parts from the prefix after {same} of its {len(self.source_ids)} tokens, and keys of the "
                "prefix were let go; use the prefix before compress()"
            )
        return self.token_ids + row[len(self.source_ids) :]

    def _encode_row(self, prompt: Any, chat: bool, tools: Any) -> list[int]:
        if isinstance(prompt, str) and chat:
            prompt = [{"role": "user", "content": prompt}]
        if isinstance(prompt, str):
            if tools is not None:
                raise SettingError("tools go with a chat; give messages, or add chat=True")
            if not prompt:
                raise InputError("the prompt is empty: at least one token must follow a prefix")
            tokenizer = self._lm.tokenizer
            if tokenizer is None:
                raise InputError(f"a text prompt needs a tokenizer, and {self._lm.name} came without one")
            return self.source_ids + tokenizer.encode(prompt, add_special_tokens=False)
        if isinstance(prompt, Sequence) and prompt and all(isinstance(item, Mapping) for item in prompt):
            if self.messages is None:
                raise SettingError(
                    "the prefix is text and the prompt is messages: make the prefix of messages too "
                    "(lm.prefix([{'role': 'system', …}]))"
                )
            return self._lm.encode([*self.messages, *prompt], chat=chat, tools=tools)[0]
        return self.source_ids + self._lm.encode(prompt, chat=chat, tools=tools)[0]

    @explain_shortage("a prefix was copied for a call")
    def lend(self, lm: Any, rows: list[list[int]]) -> Cache:
        """A cache with a row for each prompt, which holds what the prompt shares with the prefix."""
        if lm.model is not self._lm.model:
            raise SettingError(
                f"the prefix was read by {self._lm.name!r}; keys mean nothing to another model. Make it with this one"
            )
        if self.is_spent:
            raise SettingError("this prefix was made for one call alone, and that has begun; make another")
        self.is_spent = self._is_single_use
        cache = self.cache if self._is_single_use else self.cache.clone()
        if self.token_ids:
            cache.select_rows([0] * len(rows))
            cache_lengths = [_count_common(self.token_ids, row) for row in rows]
            if any(length < len(self.token_ids) for length in cache_lengths):
                if ROLL_BACK not in cache.can and self._is_single_use:
                    fresh: Cache = self._lm.model.new_cache(rows=len(rows))
                    return fresh  # a conversation is read again from its beginning
                if ROLL_BACK not in cache.can:
                    raise UnsupportedError(
                        f"a prompt parts from the prefix after {min(cache_lengths)} of its {len(self)} tokens, and a "
                        f"{type(cache).__name__} can't roll back; use a dynamic cache for the prefix"
                    )
                cache.truncate(cache_lengths)
        return cache


@explain_shortage("a prefix was read")
def read_prefix(lm: Speaker, prompt: Any, *, chat: bool, tools: Any, settings: Mapping[str, Any]) -> Prefix:
    """Read a prefix once. It takes `cache_implementation` and `cache_config`, for kinds that grow."""
    kind, config = _read_kind(lm, settings)
    messages: list[Message] | None = None
    if isinstance(prompt, str) and chat:
        prompt = [{"role": "system", "content": prompt}]
    if isinstance(prompt, Sequence) and not isinstance(prompt, str) and prompt and isinstance(prompt[0], Mapping):
        messages = list(prompt)
        if lm.tokenizer is None:
            raise InputError(f"a chat needs a tokenizer, and {lm.name} came without one; pass token ids")
        ids = list(lm.tokenizer.apply_chat_template(messages, tools=tools, return_dict=False))
    else:
        rows = lm.encode(prompt, tools=tools)
        if len(rows) != 1:
            raise InputError(f"a prefix is one beginning, and {len(rows)} were given; make one for each")
        ids = rows[0]
    info = lm.model.info
    is_bounded = info.ends_at_context and not find_kind(kind).is_endless
    if is_bounded and info.max_context is not None and len(ids) >= info.max_context:
        raise ContextError(f"the prefix has {len(ids)} tokens and the model's context ends at {info.max_context}")
    if min(ids, default=0) < 0 or max(ids, default=0) >= info.vocab_size:
        raise InputError(
            f"the prefix holds ids outside the model's vocabulary of {info.vocab_size} tokens; use ids from 0 to "
            f"{info.vocab_size - 1}"
        )
    cache = lm.model.new_cache(kind, 1, len(ids), config=config or None)
    if ids:
        Reader(lm.model, cache, chunk=CHUNK).read(torch.tensor([ids], device=lm.model.device), [len(ids)])
    return Prefix(lm, ids, cache, messages)


def _read_kind(lm: Speaker, settings: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    unknown = set(settings) - {"cache_implementation", "cache_config"}
    if unknown:
        raise SettingError(f"a prefix is read, not continued: `{sorted(unknown)[0]}` goes to generate()")
    if lm.model.info.is_encoder_decoder:
        raise UnsupportedError(
            f"{lm.model.info.family} reads its prompt with an encoder, which has no prefix to keep; give it whole texts"
        )
    name = str(settings.get("cache_implementation") or "dynamic")
    kind = find_kind(name)
    reason = kind.refuse(lm.model.info) if kind.refuse is not None else None
    if reason is not None:
        raise UnsupportedError(f"`cache_implementation`={name!r}: {reason}")
    options = read_options(name, settings.get("cache_config"))
    if kind.is_sized or (kind.may_be_sized and "max_cache_len" in options):
        cache = f"a {name!r} cache" if kind.is_sized else f"a {name!r} cache with `max_cache_len`"
        raise UnsupportedError(f"{cache} takes its room at once, and a prefix can't know what follows; use 'dynamic'")
    return name, options


@explain_shortage("a saved prefix was loaded")
def load_prefix(lm: Speaker, path: str | Path) -> Prefix:
    """Read a file written by `Prefix.save`; raises if it is of another model."""
    saved = load_cache(path, model=lm.model)
    ids, messages = saved.notes.get("token_ids"), saved.notes.get("messages")
    if not isinstance(ids, list) or not all(isinstance(token, int) for token in ids):
        raise LoadError(f"{path} is a saved cache without the tokens of a prefix; Prefix.save() writes them")
    if [len(ids)] != saved.cache.lengths:
        raise LoadError(f"{path} is damaged: {len(ids)} tokens for a cache of {saved.cache.lengths} positions")
    misfit = saved.cache.find_misfit(lm.model.key_shape)
    if misfit is not None:
        raise SettingError(f"{path} does not fit this model: {misfit}")
    source = saved.notes.get("source_ids")
    if source is not None and not (isinstance(source, list) and all(isinstance(token, int) for token in source)):
        raise LoadError(f"{path} is damaged: what its prefix was read from is no list of tokens")
    return Prefix(lm, ids, saved.cache, messages if isinstance(messages, list) else None, source)


def make_conversation(lm: Speaker, token_ids: list[int], cache: Cache | None) -> Prefix:
    """What a conversation has read so far, for its next turn alone: no copy is made of its keys."""
    prefix = Prefix(lm, token_ids, cache if cache is not None else lm.model.new_cache(), [])
    prefix._is_single_use = True
    return prefix


def _count_common(before: list[int], row: list[int]) -> int:
    """The length of two rows' common prefix, excluding the row's last token, which a call has to read."""
    most = min(len(before), len(row) - 1)
    return next((place for place in range(most) if before[place] != row[place]), most)

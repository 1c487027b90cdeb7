"""Prompts without what a small model could have guessed, as the papers on LLMLingua and LongLLMLingua describe it."""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from unspool.api.core import as_model
from unspool.callbacks import check_callback
from unspool.compression.llmlingua import checks
from unspool.compression.llmlingua.token_filter import Watch
from unspool.compression.losses import Losses, LossSource, ModelLosses
from unspool.compression.text import TokenSpans, cut_text, find_spans
from unspool.errors import ContextError, InputError, SettingError
from unspool.text import Tokenizer

SEPARATOR: Final = "\n\n"  # between instruction, contexts and question
# LongLLMLingua asks for the likelihood of the question and of this, given a context.
_HINT: Final = " We can get the answer to this question in the given documents."
_DIGIT: Final = re.compile(r"\d")
_GRANULARITY: Final = 2.0  # contexts stay until they have so many times the tokens that are to be left


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """A token of a context: its characters, how surprising it was, and whether it stays.

    `loss` is None where the token was not read: in a context that went as a whole. With a question it is how much
    likelier the question made the token.
    """

    context: int
    text: str
    loss: float | None
    is_kept: bool


@dataclass(frozen=True, slots=True)
class CompressedPrompt:
    """A shorter prompt, and how it came about."""

    text: str  # instruction, what is left of the contexts, question
    contexts: tuple[str, ...]  # what is left of each, in the order in which they were given; empty: it went
    tokens: tuple[TokenLoss, ...]
    origin_tokens: int
    compressed_tokens: int
    seconds: float

    @property
    def rate(self) -> float:
        """The share of the prompt's tokens that is left."""
        return self.compressed_tokens / self.origin_tokens

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "compressed_prompt": self.text,
            "origin_tokens": self.origin_tokens,
            "compressed_tokens": self.compressed_tokens,
            "rate": round(self.rate, 4),
            "seconds": round(self.seconds, 3),
            "tokens": [
                {
                    "context": one.context,
                    "text": one.text,
                    "loss": None if one.loss is None else round(one.loss, 4),
                    "is_kept": one.is_kept,
                }
                for one in self.tokens
            ],
        }


@dataclass(frozen=True, slots=True)
class Call:
    """What a call asks for, checked."""

    contexts: list[str]
    instruction: str
    question: str
    rate: float
    target_token: float
    window: int
    keep: tuple[str, ...]
    keep_digits: bool


def compress_prompt(
    lm: Any,
    context: str | Sequence[str],
    instruction: str = "",
    question: str = "",
    rate: float = 0.5,
    target_token: float = -1,
    *,
    window: int = 200,
    keep: Sequence[str] = (),
    keep_digits: bool = False,
    rank_contexts: bool = True,
    progress: Watch | None = None,
) -> CompressedPrompt:
    """The prompt with the tokens of its contexts that carry most (LLMLingua; with a question, LongLLMLingua).

    `rate` is the share of the contexts' tokens that stays, `target_token` the most tokens of the whole prompt.
    Instruction and question stay whole. Each window of tokens is judged after what is left of those before it: tokens
    stay by their own losses, or by how much likelier the question makes them. Of several contexts, those that say least
    go first, unless `rank_contexts` is False. Texts in `keep` always stay, digits with `keep_digits`.
    """
    tokenizer = getattr(lm, "tokenizer", None)
    if tokenizer is None:
        raise InputError("compressing a text needs the model's tokenizer, and none came with it; load one with it")
    check_callback("progress", progress, "done, total")
    checks.check_switch("rank_contexts", rank_contexts)
    call = read_call(context, instruction, question, rate, target_token, window, keep, keep_digits)
    return run_call(ModelLosses(as_model(lm)), tokenizer, call, rank_contexts, progress)


def run_call(
    source: LossSource, tokenizer: Tokenizer, call: Call, rank_contexts: bool = True, progress: Watch | None = None
) -> CompressedPrompt:
    """Compress what a call asks for, by losses from wherever they come."""
    started = time.perf_counter()
    made = _Compression(source, tokenizer, call, progress).run(rank_contexts)
    parts = [call.instruction, *(text for text in made.texts if text.strip()), call.question]
    whole = SEPARATOR.join(part for part in parts if part)
    return CompressedPrompt(
        whole,
        tuple(made.texts),
        tuple(made.tokens),
        made.origin_tokens,
        len(tokenizer.encode(whole, add_special_tokens=False)),
        time.perf_counter() - started,
    )


def read_call(
    context: Any, instruction: Any, question: Any, rate: Any, target: Any, window: Any, keep: Any, keep_digits: Any
) -> Call:
    """A call\'s arguments, checked."""
    contexts = [context] if isinstance(context, str) else context
    if not isinstance(contexts, list | tuple) or not contexts or not all(contexts):
        raise InputError("`context` is a text or a list of texts, of which none is empty")
    if checks.check_number("rate", rate, 0, 1) == 0:
        raise SettingError("`rate`=0 leaves nothing of the contexts; give a number above 0, up to 1")
    if target != -1:
        checks.check_number("target_token", target, 1, checks.MOST_TOKENS)
    if not isinstance(keep, list | tuple) or not all(isinstance(text, str) and text for text in keep):
        raise SettingError("`keep` is a list of texts that stay, of which none is empty")
    return Call(
        checks.read_contexts(contexts),
        checks.check_text("instruction", instruction),
        checks.check_text("question", question),
        float(rate),
        float(target),
        checks.check_count("window", window, 2),
        tuple(keep),
        checks.check_switch("keep_digits", keep_digits),
    )


class _Compression:
    """One call: which contexts stay, and which of their tokens."""

    def __init__(self, source: LossSource, tokenizer: Tokenizer, call: Call, watch: Watch | None) -> None:
        self._source, self._tokenizer, self._call, self._watch = source, tokenizer, call, watch
        self._spans = [find_spans(tokenizer, text) for text in call.contexts]
        self._lengths = [len(each) for each in self._spans]
        joined = SEPARATOR.join(part for part in (call.instruction, *call.contexts, call.question) if part)
        self.origin_tokens = len(tokenizer.encode(joined, add_special_tokens=False))
        self._budget = self._find_budget()
        self.texts = [""] * len(call.contexts)
        self.tokens: list[TokenLoss] = []

    def run(self, ranks: bool) -> _Compression:
        """Compress: whole contexts first, then tokens."""
        stays = self._choose_contexts() if ranks and len(self._spans) > 1 else set(range(len(self._spans)))
        total = sum(self._lengths[place] for place in stays)
        share = min(1.0, self._budget / total)
        windows = _Windows(self._source, self._tokenizer, self._call, share, total, self._watch)
        for place, spans in enumerate(self._spans):
            if place in stays:
                losses, kept = windows.judge(spans)
                self.texts[place] = cut_text(spans, kept)
            else:
                losses, kept = [None] * len(spans), [False] * len(spans)
            self.tokens += [
                TokenLoss(place, spans.text[begin:end], loss, stay)
                for (begin, end), loss, stay in zip(spans.spans, losses, kept, strict=True)
            ]
        return self

    def _find_budget(self) -> float:
        """Tokens that all contexts together may keep."""
        total = sum(self._lengths)
        if self._call.target_token == -1:
            return max(1.0, self._call.rate * total)
        target = self._call.target_token
        if target > self.origin_tokens:
            raise SettingError(
                f"`target_token`={target:g} is more than the {self.origin_tokens} tokens of the prompt; give fewer"
            )
        around = self.origin_tokens - total
        if target <= around:
            raise SettingError(
                f"`target_token`={target:g} leaves nothing of the contexts: instruction, question and what joins them "
                f"have {around} tokens; give more"
            )
        return target - around

    def _choose_contexts(self) -> set[int]:
        """The contexts that say most, until they have twice the tokens that are to be left."""
        question = self._call.question
        bos = _find_start(self._tokenizer)
        if question:
            # How likely the question is, given a context: low losses first.
            asked = self._tokenizer.encode(SEPARATOR + question + _HINT, add_special_tokens=False)
            found = self._source.measure([[*bos, *each.ids, *asked] for each in self._spans])
            scores = [float(losses[-len(asked) :].mean()) for losses in found]
        else:
            found = self._source.measure([[*bos, *each.ids] for each in self._spans])
            scores = [-float(losses.mean()) if len(losses) else math.inf for losses in found]
        chosen: set[int] = set()
        for place in sorted(range(len(scores)), key=scores.__getitem__):
            if chosen and sum(self._lengths[one] for one in chosen) >= _GRANULARITY * self._budget:
                break
            chosen.add(place)
        return chosen


class _Windows:
    """The contexts that stay, read window by window after what is left of those before."""

    def __init__(
        self, source: LossSource, tokenizer: Tokenizer, call: Call, share: float, total: int, watch: Watch | None
    ) -> None:
        self._call, self._share, self._total, self._watch = call, share, total, watch
        self._limit = source.longest
        bos = _find_start(tokenizer)
        beginning = [call.instruction] if call.instruction else []
        own = SEPARATOR.join([*beginning, ""]) if beginning else ""
        self._separator = tokenizer.encode(SEPARATOR, add_special_tokens=False)
        self._plain = _PrefixedText(source, bos + _encode(tokenizer, own))
        self._asked: _PrefixedText | None = None
        if call.question:
            self._asked = _PrefixedText(source, bos + _encode(tokenizer, own + call.question + SEPARATOR))
        self._done, self._due = 0, 0.0

    def judge(self, spans: TokenSpans) -> tuple[list[float | None], list[bool]]:
        """The losses of a context's tokens, and which stay."""
        losses: list[float | None] = []
        kept: list[bool] = []
        must = _find_kept(spans, self._call)
        for first in range(0, len(spans), self._call.window):
            window = slice(first, first + self._call.window)
            ids = spans.ids[window]
            found = self._measure(ids)
            self._due += self._share * len(ids)  # what is left over of one window goes to the next
            count = min(len(ids), max(0, round(self._due)))
            stays = _choose(found, must[window], count)
            self._due -= sum(stays)
            self._take([token for token, stay in zip(ids, stays, strict=True) if stay])
            losses += [float(loss) if math.isfinite(loss) else None for loss in found]
            kept += stays
            self._done += len(ids)
            if self._watch is not None:
                self._watch(self._done, self._total)
        self._take(self._separator)
        return losses, kept

    def _measure(self, ids: Sequence[int]) -> Losses:
        for each in (self._plain, self._asked):
            if each is not None and self._limit is not None and len(each) + len(ids) > self._limit:
                raise ContextError(
                    f"a window ends at {len(each) + len(ids)} tokens and the model's context at {self._limit}; "
                    "compress more, in smaller windows or with a model of a longer context"
                )
        plain = self._plain.measure(ids)
        return plain if self._asked is None else plain - self._asked.measure(ids)

    def _take(self, ids: Sequence[int]) -> None:
        self._plain.take(ids)
        if self._asked is not None:
            self._asked.take(ids)


class _PrefixedText:
    """What was kept so far, read behind a beginning; windows are tried after it."""

    def __init__(self, source: LossSource, beginning: list[int]) -> None:
        self._text, self._waiting = source.start(), list(beginning)

    def __len__(self) -> int:
        return self._text.num_held + len(self._waiting)

    def take(self, ids: Sequence[int]) -> None:
        """Go on after these tokens."""
        self._waiting += ids

    def measure(self, ids: Sequence[int]) -> Losses:
        """The losses of the next tokens. The very first token of a text has none, and counts as a surprise."""
        if not self._waiting:
            found = self._text.read(list(ids), keeps=0)
            return np.concatenate(([np.float32(np.inf)], found))
        held = self._text.num_held + len(self._waiting)
        # The last token is read again with the next window, which it predicts the first of.
        found = self._text.read([*self._waiting, *ids], keeps=held - 1)
        self._waiting = self._waiting[-1:]
        return found[-len(ids) :]


def _choose(losses: Losses, must: Sequence[bool], count: int) -> list[bool]:
    """The highest losses: `count` tokens, those that must stay among them and before all others."""
    order = sorted(range(len(losses)), key=lambda place: (not must[place], -losses[place], place))
    chosen = set(order[: max(count, sum(must))])
    return [place in chosen for place in range(len(losses))]


def _find_kept(spans: TokenSpans, call: Call) -> list[bool]:
    """Which tokens stay whatever their losses."""
    must = [False] * len(spans.text)
    for mark in call.keep:
        for found in re.finditer(re.escape(mark), spans.text):
            must[found.start() : found.end()] = [True] * len(mark)
    for found in _DIGIT.finditer(spans.text) if call.keep_digits else ():
        must[found.start()] = True
    return [any(must[begin:end]) for begin, end in spans.spans]


def _find_start(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer puts before every text."""
    bare, whole = _encode(tokenizer, "a"), tokenizer.encode("a")
    return whole[: len(whole) - len(bare)] if len(whole) > len(bare) and whole[-len(bare) :] == bare else []


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False) if text else []

"""LLMLingua-2 (Pan et al., 2024): the words that a token classifier keeps, chunk by chunk."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unspool.compression.llmlingua.checks import read_ids
from unspool.compression.llmlingua.counting import TokenCounter, describe_saving
from unspool.compression.llmlingua.labels import LabelledChunk, Labeller, Marks, find_percentile
from unspool.compression.llmlingua.token_filter import Watch
from unspool.compression.llmlingua.word_options import WordOptions
from unspool.errors import InputError

_WORD = re.compile(r'\b\w+\b|[<>=/!@#$%^&*()?":{}|\\`~;_+-]')

Chunks = list[str]
"""One context, in the chunks that the classifier reads."""


@dataclass(slots=True)
class ShortContext:
    """What is left of a context, its words, and which of them stay."""

    text: str
    words: list[str]
    labels: list[int]


class WordCompressor:
    """Contexts without the words that a classifier would drop."""

    def __init__(self, labeller: Labeller, counter: TokenCounter) -> None:
        self._labeller, self._counter = labeller, counter

    def compress(self, contexts: Sequence[str], options: WordOptions, watch: Watch | None = None) -> dict[str, Any]:
        """The result of a call, with the package's fields."""
        forced = set(read_ids("force_context_ids", options.force_context_ids, len(contexts)))
        marks = self._labeller.mark(options.force_tokens, keeps_digits=options.force_reserve_digit)
        origin = sum(map(self._count, contexts))
        cut = [self._labeller.cut(text, options.chunk_end_tokens, marks) for text in contexts]
        rate, dropped = options.rate, {}
        if options.use_context_level_filter and len(contexts) > 1:
            labelled = self._label(cut, marks, options)
            dropped = self._find_dropped(labelled, options, origin, forced)
            left = [chunks for place, chunks in enumerate(cut) if place not in dropped]
            if options.target_token >= 0:
                rate = self._find_rate(options.target_token, sum(self._count(c) for chunks in left for c in chunks))
        else:
            left = cut
            if options.target_token > 0:
                rate = self._find_rate(options.target_token, origin)
        share = max(0, 1 - rate) if options.use_token_level_filter else 0
        made = self._shorten(left, share, marks, options, watch)
        texts = [each.text for each in made]
        result = {
            "compressed_prompt": "\n\n".join(texts),
            "compressed_prompt_list": texts,
            **describe_saving(origin, sum(map(self._count, texts))),
        }
        if options.return_word_label:
            result["fn_labeled_original_prompt"] = _spell_labels(made, dropped, len(contexts), options)
        return result

    def _count(self, text: str) -> int:
        return len(self._counter.encode(text))

    @staticmethod
    def _find_rate(target: float, origin: int) -> float:
        if not origin:
            raise InputError("the contexts have no tokens, so there is no rate that leaves a number of them")
        return min(target / origin, 1.0)

    # --- contexts ------------------------------------------------------------------------------------
    def _label(self, contexts: Sequence[Chunks], marks: Marks, options: WordOptions) -> list[list[LabelledChunk]]:
        flat = [chunk for chunks in contexts for chunk in chunks]
        labelled, first, found = self._labeller.label(flat, marks, options.token_to_word), 0, []
        for chunks in contexts:
            found.append(labelled[first : first + len(chunks)])
            first += len(chunks)
        return found

    def _find_dropped(
        self, labelled: Sequence[Sequence[LabelledChunk]], options: WordOptions, origin: int, forced: set[int]
    ) -> dict[int, list[str]]:
        """The words of contexts that go, by the mean probability of all words of each."""
        rate = self._find_context_rate(options, len(labelled), origin)
        scores = []
        for chunks in labelled:
            own = [keep for chunk in chunks for keep in chunk.own]
            if not own:
                raise InputError(
                    "a context has no words that the classifier knows, so it can't be ranked; leave it out"
                )
            scores.append(sum(own) / len(own))
        threshold = find_percentile(scores, int(100 * (1 - rate)))
        return {
            place: [word for chunk in chunks for word in self._labeller.strip_words(chunk.words)]
            for place, (chunks, score) in enumerate(zip(labelled, scores, strict=True))
            if score < threshold and place not in forced
        }

    def _find_context_rate(self, options: WordOptions, count: int, origin: int) -> float:
        """The share of contexts that stay. Where nothing is said of contexts, half of what is to go goes with them."""
        rate, target = options.context_level_rate, options.context_level_target_token
        goes_on = options.use_token_level_filter
        if options.target_context <= 0 and rate >= 1.0 and target <= 0:
            if options.target_token < 0 and options.rate < 1.0:
                rate = (options.rate + 1.0) / 2 if goes_on else options.rate
            if options.target_token >= 0:
                target = options.target_token * 2 if goes_on else options.target_token
        if options.target_context >= 0:
            rate = min(options.target_context / count, 1.0)
        return self._find_rate(target, origin) if target >= 0 else rate

    # --- words ---------------------------------------------------------------------------------------
    def _shorten(
        self,
        contexts: Sequence[Chunks],
        share: float,
        marks: Marks,
        options: WordOptions,
        watch: Watch | None,
    ) -> list[ShortContext]:
        """Contexts without a share of their words."""
        if share <= 0:
            return [_keep_all([marks.show(chunk) for chunk in chunks]) for chunks in contexts]
        made = []
        for place, chunks in enumerate(self._label(contexts, marks, options)):
            short = [self._shorten_chunk(chunk, share, marks, options) for chunk in chunks]
            made.append(
                ShortContext(
                    "".join(text for text, _ in short),
                    [word for chunk in chunks for word in self._labeller.strip_words(chunk.words)],
                    [label for _, labels in short for label in labels],
                )
            )
            if watch is not None:
                watch(place + 1, len(contexts))
        return made

    def _shorten_chunk(
        self, chunk: LabelledChunk, share: float, marks: Marks, options: WordOptions
    ) -> tuple[str, list[int]]:
        """What stays of a chunk, and the label of each word."""
        if not chunk.words:
            raise InputError("a chunk has no words that the classifier knows; leave it out")
        keeps = list(chunk.forced)
        if options.drop_consecutive:
            self._drop_repeats(chunk.words, keeps, share, marks)
        weighted = [keep for word, keep in zip(chunk.words, keeps, strict=True) for _ in range(self._count(word))]
        if not weighted:
            raise InputError("a chunk has no words that can be counted; leave it out")
        threshold = find_percentile(weighted, int(100 * share + 1))
        kept: list[str] = []
        labels = []
        for word, keep in zip(chunk.words, keeps, strict=True):
            stays = bool(keep > threshold or (threshold == 1.0 and keep == threshold))
            if stays and options.drop_consecutive and word in marks.forced and kept and kept[-1] == word:
                stays = False
            labels.append(int(stays))
            if stays:
                kept.append(word)
        return self._labeller.join(kept), labels

    @staticmethod
    def _drop_repeats(words: Sequence[str], keeps: list[Any], share: float, marks: Marks) -> None:
        """Let a forced word go that stands right behind the same one, but for words that go."""
        threshold = find_percentile(keeps, int(100 * share))
        has_between, last = False, None
        for place, word in enumerate(words):
            if word not in marks.forced:
                has_between |= bool(keeps[place] > threshold)
                continue
            if has_between:
                has_between = False
            elif word == last:
                keeps[place] = 0.0
            last = word


def _keep_all(chunks: Sequence[str]) -> ShortContext:
    words = [word for chunk in chunks for word in _WORD.findall(chunk)]
    return ShortContext("".join(chunks), words, [1] * len(words))


def _spell_labels(made: Sequence[ShortContext], dropped: dict[int, list[str]], count: int, options: WordOptions) -> str:
    """Every word with its label: 1 stays, 0 goes."""
    left, pairs = iter(made), []
    for place in range(count):
        if place in dropped:
            pairs += [(word, 0) for word in dropped[place]]
        else:
            short = next(left)
            pairs += zip(short.words, short.labels, strict=True)
    return options.word_sep.join(f"{word}{options.label_sep}{label}" for word, label in pairs)

"""Whole contexts and sentences that go before tokens do, until what stays fits a budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from unspool.compression.llmlingua.checks import read_budget
from unspool.compression.llmlingua.counting import SplitSentences
from unspool.compression.llmlingua.options import Options
from unspool.compression.llmlingua.ranks import Ranks, rank_contexts, sort_scores
from unspool.compression.llmlingua.scorer import Scorer
from unspool.compression.llmlingua.segments import Segment, divide_sentences
from unspool.errors import InputError

_LEAST_TARGET = 100  # tokens that a budget below zero counts as


@dataclass(frozen=True, slots=True)
class ChosenContexts:
    """Places of the contexts that stay, in their new order, and what is added to the rate of each."""

    places: list[int]
    ratios: list[float]


def choose_contexts(
    options: Options, ranks: Ranks, lengths: Sequence[int], target: float, forced: Sequence[int]
) -> ChosenContexts:
    """Take contexts in the order of their ranks until the budget is spent."""
    left = read_budget(options.context_budget, _LEAST_TARGET if target < 0 else target)
    used = list(forced)
    for place, _ in ranks:
        left -= lengths[place]
        if place not in used:
            used.append(place)
        # The package compares with the contexts of a list that is still empty: a number above 0 has no effect.
        if left < 0 or options.force_context_number == 0:
            break
    if options.reorder_context == "original":
        places = sorted(used)
    elif options.reorder_context == "two_stage":
        places = used[::2] + used[1::2][::-1]
    else:
        places = used
    return ChosenContexts(places, _spread_ratios(options.dynamic_context_compression_ratio, used, places))


def _spread_ratios(spread: float, ranked: Sequence[int], places: Sequence[int]) -> list[float]:
    """From `spread` for the first context to -`spread` for the last."""
    count = len(ranked)
    if spread <= 0 or count <= 1:
        return [0.0] * count
    ratios = [step * (spread / (count - 1)) for step in range(count - 1, -count, -2)]
    by_place = dict(zip(ranked, ratios, strict=True))
    return [by_place[place] for place in places]


def choose_sentences(
    options: Options,
    scorer: Scorer,
    split: SplitSentences,
    contexts: Sequence[str],
    segments: Sequence[Sequence[Segment]] | None,
    target: float,
    question: str,
) -> tuple[list[str], list[list[Segment]]]:
    """Contexts of the sentences that stay, and the segments of each."""
    divided = [_cover(text, split(text)) for text in contexts]
    sentences = [sentence for each in divided for sentence in each]
    parts = [part for text, each in zip(segments or [], divided, strict=False) for part in divide_sentences(text, each)]
    if len(sentences) == 1:
        return list(contexts), parts[:1]
    stays = _take_sentences(options, scorer, sentences, [len(each) for each in divided], target, question)
    for place, own in enumerate(parts):
        stays[place] |= any(not part.is_compressed for part in own)
    chosen, kept_parts, first = [], [], 0
    for each in divided:
        places = [first + place for place in range(len(each)) if stays[first + place]]
        chosen.append("".join(sentences[place] for place in places))
        kept_parts.append([part for place in places for part in parts[place]] if parts else [])
        first += len(each)
    return chosen, kept_parts if parts else []


def _cover(text: str, sentences: Sequence[str]) -> list[str]:
    """The sentences with the white space behind them, so that they make the whole text."""
    if not sentences:
        raise InputError("a context without sentences can't be filtered by sentences; leave it out")
    covered, seen = [], 0
    for place, sentence in enumerate(sentences):
        if not text.startswith(sentence, seen):
            raise InputError(f"the context begins with white space or its sentences are not its own: {text[:40]!r}")
        is_last = place == len(sentences) - 1
        following = len(text) if is_last else text.find(sentences[place + 1][:5], seen + len(sentence))
        if following < 0:
            raise InputError(f"the sentences of {text[:40]!r} are not those of the text")
        covered.append(text[seen:following])
        seen = following
    return covered


def _take_sentences(
    options: Options, scorer: Scorer, sentences: Sequence[str], counts: Sequence[int], target: float, question: str
) -> list[bool]:
    """Which sentences fit the budget, taken by rank."""
    lengths = [scorer.count(sentence) for sentence in sentences]
    if options.rank_method == "longllmlingua":
        scores = scorer.perplexities(sentences, question, options.condition)
        _add_bonus(options, scores, counts)
        ranks = sort_scores(scores, options.condition)
    else:
        ranks = rank_contexts(scorer, sentences, question, options.rank_method, options.condition)
    left = (_LEAST_TARGET if target < 0 else target) * options.token_budget_ratio
    stays = [False] * len(sentences)
    for place, _ in ranks:
        left -= lengths[place]
        stays[place] = True
        if left < 0:
            break
    return stays


def _add_bonus(options: Options, scores: list[float], counts: Sequence[int]) -> None:
    """Raise the scores of sentences to keep. Where low ones come first, that puts them last, as in the package."""
    first, last, each = options.keep_first_sentence, options.keep_last_sentence, options.keep_sentence_number
    places = list(range(len(scores)))
    for place in places[:first]:
        scores[place] += options.high_priority_bonus
    for place in places[-last:] if last else ():
        scores[place] += options.high_priority_bonus
    begin = 0
    for count in counts if each else ():
        of_context = sorted(places[begin : begin + count], key=lambda place: scores[place])
        for place in of_context[:each]:
            scores[place] += options.high_priority_bonus
        begin += count

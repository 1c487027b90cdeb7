"""Which rate holds where: windows of a prompt, in pieces where contexts or segments of other rates begin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from unspool.compression.llmlingua.scorer import Scorer
from unspool.compression.llmlingua.segments import Segment
from unspool.errors import InputError

Piece = tuple[int, float]
"""Tokens of a window, and the share of them that may stay."""

SEPARATOR: Final = "\n\n"  # between contexts
_SEPARATOR_TOKENS: Final = 2  # what it counts as, whatever the tokenizer makes of it
_LOOK_BACK: Final = 3  # tokens that are decoded together to find where one ends in the text


def plan_windows(lengths: Sequence[int], ratios: Sequence[float], target: float, size: int) -> list[list[Piece]]:
    """Windows over contexts of so many tokens, each context with its own addition to the common rate.

    As in the package, a context counts two tokens more than it has, and the first window is one token short.
    """
    counted = [length + _SEPARATOR_TOKENS for length in lengths]
    common = target / (sum(counted) + 1)
    windows: list[list[Piece]] = []
    open_window: list[Piece] = []
    taken = 1
    for length, addition in zip(counted, ratios, strict=True):
        rate = max(min(1, common + addition), 0)
        if taken + length < size:
            taken += length
            open_window.append((length, rate))
            continue
        windows.append([*open_window, (size - taken, rate)])
        taken += length - size
        if taken > size:
            whole, taken = divmod(taken, size)
            windows += [[(size, rate)]] * whole
        open_window = [(taken, rate)] if taken else []
    return [*windows, open_window] if open_window else windows


def plan_segments(
    scorer: Scorer, contexts: Sequence[str], segments: Sequence[Sequence[Segment]], ids: Sequence[int], size: int
) -> list[list[Piece]]:
    """Windows over the ids of contexts that are joined, of which each segment has a rate of its own."""
    texts, rates, stays = [], [], []
    for place, (context, parts) in enumerate(zip(contexts, segments, strict=True)):
        seen = 0
        for part in parts:
            texts.append(context[seen : seen + part.length])
            rates.append(part.rate if part.is_compressed else 1.0)
            stays.append(not part.is_compressed)
            seen += part.length
        if parts and place < len(contexts) - 1:
            texts[-1] += SEPARATOR
    whole = SEPARATOR.join(contexts)
    if len("".join(texts)) != len(whole) or scorer.tokenizer.decode(list(ids)) != whole:
        raise InputError(
            "the tokenizer does not give the tagged text back as it was written, so segments can't be found in its "
            "tokens; leave out special tokens, or compress without tags"
        )
    return _cut(_find_rates(scorer, ids, [len(text) for text in texts], rates, stays), size)


def _find_rates(
    scorer: Scorer, ids: Sequence[int], lengths: Sequence[int], rates: Sequence[float], stays: Sequence[bool]
) -> list[float]:
    """The rate of every token: that of its segment, or of the strictest segment that ends in it."""
    found = []
    segment = seen = 0
    for place in range(len(ids)):
        first = 0 if place < _LOOK_BACK else place - _LOOK_BACK + 1
        before = scorer.tokenizer.decode(list(ids[first:place]))
        left = len(scorer.tokenizer.decode(list(ids[first : place + 1]))[len(before) :])
        touched = [segment]
        while left and segment < len(lengths) and left >= lengths[segment] - seen:
            left -= lengths[segment] - seen
            segment, seen = segment + 1, 0
            if left:
                touched.append(segment)
        seen += left
        touched = [one for one in touched if one < len(lengths)]
        if not touched:
            raise InputError("the tagged text has more characters in its tokens than in its segments")
        must_stay = any(stays[one] for one in touched)
        found.append(1.0 if must_stay else min(rates[one] for one in touched))
    return found


def _cut(rates: Sequence[float], size: int) -> list[list[Piece]]:
    """Windows of so many tokens, in pieces of one rate."""
    windows: list[list[Piece]] = []
    for first in range(0, len(rates), size):
        window: list[Piece] = []
        for rate in rates[first : first + size]:
            if window and window[-1][1] == rate:
                window[-1] = (window[-1][0] + 1, rate)
            else:
                window.append((1, rate))
        windows.append(window)
    return windows

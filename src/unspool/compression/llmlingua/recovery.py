"""Answers in the words of the original prompt, where they quote the compressed one."""

from __future__ import annotations

import bisect
from collections import defaultdict
from collections.abc import Sequence

from unspool.compression.llmlingua.scorer import Scorer

_WIDEST_GAP = 10  # tokens that may be missing between two of a quotation


def recover_words(scorer: Scorer, original: str, compressed: str, response: str) -> str:
    """The response with every run of words that the compressed prompt has as the original prompt has it."""
    ids, words, found = scorer.encode(original), response.split(" "), []
    first = 0
    while first < len(words):
        end = first + 1
        if words[first] in compressed:
            while end < len(words) and " ".join(words[first : end + 1]) in compressed:
                end += 1
            found.append(_find_quotation(scorer, ids, " ".join(words[first:end])))
        else:
            found.append(words[first])
        first = end
    return " ".join(found)


def _find_quotation(scorer: Scorer, ids: Sequence[int], quoted: str) -> str:
    """The shortest part of the prompt that has the most tokens of a quotation, in their order."""
    wanted = scorer.encode(quoted)
    if not wanted:
        return quoted
    places: dict[int, list[int]] = defaultdict(list)
    for place, token in enumerate(ids):
        places[token].append(place)
    best: tuple[int, int] | None = None
    most, shortest = 1, 0
    for begin in places[wanted[0]]:
        last, count = begin, 1
        for token in wanted[1:]:
            following = places[token]
            at = bisect.bisect_right(following, last)
            if at < len(following) and following[at] - last <= _WIDEST_GAP:
                last, count = following[at], count + 1
        length = last - begin + 1
        if count > most or (count == most and (best is None or length < shortest)):
            best, most, shortest = (begin, last + 1), count, length
    return quoted if best is None else scorer.tokenizer.decode(list(ids[best[0] : best[1]]))

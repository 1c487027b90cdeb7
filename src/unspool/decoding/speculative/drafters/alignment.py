"""Where two tokenizations of one text meet: pure functions of what tokens read as."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from itertools import accumulate


def align_tokens(
    held: Sequence[bytes], window: Sequence[bytes], *, held_lead: int = 0, window_lead: int = 0
) -> tuple[int, int]:
    """How many tokens of each stand for the same text, up to the last place where both have a boundary.

    Two tokenizations of a text are two rising lists of places, and the longest common subsequence of those is the
    places that both have; the one wanted is the last before the texts part. The leads are bytes at the beginnings
    that are no part of the text: some tokenizers put a space before it.
    """
    agreed = _count_agreed(b"".join(held)[held_lead:], b"".join(window)[window_lead:])
    ends, others = _find_ends(held, held_lead), _find_ends(window, window_lead)
    place = max((place for place in ends.keys() & others.keys() if place <= agreed), default=None)
    return (0, 0) if place is None else (ends[place], others[place])


def _find_ends(pieces: Sequence[bytes], lead: int) -> dict[int, int]:
    """From places in the text to the number of tokens that end there, the fewest of them."""
    ends: dict[int, int] = {}
    for count, end in enumerate(accumulate(map(len, pieces), initial=0)):
        if end >= lead:
            ends.setdefault(end - lead, count)
    return ends


def _count_agreed(one: bytes, other: bytes) -> int:
    """The length of the common beginning."""
    shorter = min(len(one), len(other))
    if one[:shorter] == other[:shorter]:
        return shorter
    return next(place for place in range(shorter) if one[place] != other[place])


def join_text(pieces: Sequence[bytes]) -> tuple[str, bool]:
    """The text of pieces, and whether that is all of it: bytes of an unfinished character at the end are left out."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text = decoder.decode(b"".join(pieces))
    return text, not decoder.getstate()[0]

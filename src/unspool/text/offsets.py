"""Whisper's own tokens: timestamps, the segments of a transcript between them, and what came before a text."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Final

import tokenizers

from unspool.errors import UnsupportedError

STEP_SECONDS: Final = 0.02  # between two timestamps
WINDOW_STEPS: Final = 1500  # timestamps of a window
NO_TIMESTAMPS: Final = "<|notimestamps|>"  # timestamps are the ids after it
PREVIOUS: Final = "<|startofprev|>"  # what stands before a text that came earlier


def require_token(backend: tokenizers.Tokenizer, token: str, what: str) -> int:
    """The id of one of Whisper's tokens; raises for a vocabulary that has none such."""
    found = backend.token_to_id(token)
    if found is None:
        raise UnsupportedError(f"{what} is for Whisper's tokenizers, and this one has no token {token}")
    return found


def find_offsets(
    ids: Sequence[int], first: int, decode: Callable[[list[int]], str], seconds: float = STEP_SECONDS
) -> list[dict[str, Any]]:
    """Texts and times (start, end) of the segments among tokens in which `first` is the timestamp 0.00.

    A time that lies before the last one begins another window: its times follow the window before.
    """
    places = [place for place, token in enumerate(ids) if token >= first]
    if len(places) < 2:
        return []
    pairs = [place + 1 for place, following in pairwise(places) if following == place + 1]
    if places[-1] + 1 not in pairs:
        pairs.append(places[-1] + 1)
    found: list[dict[str, Any]] = []
    begin, latest, passed = places[0], 0, 0
    for stop in pairs:
        part = ids[begin:stop]
        if len(part) > 1:
            start, end = part[0] - first, part[-1] - first
            if start < latest:
                is_cut = begin >= 2 and not (ids[begin - 2] >= first and ids[begin - 1] >= first)
                passed += WINDOW_STEPS if is_cut else latest
            latest = end
            text = decode([token for token in part if token < first])
            found.append({"text": text, "timestamp": ((start + passed) * seconds, (end + passed) * seconds)})
        begin = stop
    return found

"""What a text must go on with, and white space in the manner that it has had so far."""

from __future__ import annotations

import re
from typing import Any, Final

from unspool.grammar.states import MatcherState

_FEWEST: Final = 2  # tokens that are worth a check
_LOOK_BACK: Final = 256  # tokens in which the manner of the white space is looked for
_MOST_PIECES: Final = 4  # stretches of forced text, with white space between
_SPACED: Final = re.compile(rb"([{\[,:])([ \t\n]*)(?=[^ \t\n])")


def find_forced(state: MatcherState) -> list[int]:
    """Tokens that will come next if the text goes on as it must, without the last, which may become a longer one."""
    if state.is_broken:
        return []
    vocabulary = state.grammar.vocabulary.tokens
    text: bytes = state.matcher.compute_ff_bytes()
    if state.grammar.source.is_json:
        text = _go_on(state, vocabulary, text)
    tokens: list[int] = vocabulary.tokenize_bytes(text)[:-1] if text else []
    return tokens if len(tokens) >= _FEWEST else []


def _go_on(state: MatcherState, vocabulary: Any, text: bytes) -> bytes:
    """The forced text with what is forced after the white space that is usual in this document."""
    written: bytes = vocabulary.decode_bytes(state.tokens[-_LOOK_BACK:])
    for _ in range(_MOST_PIECES):
        whole = written + text
        mark, present = whole.rstrip(b" \t\n")[-1:], len(whole) - len(whole.rstrip(b" \t\n"))
        usual = [space for sign, space in _SPACED.findall(written) if sign == mark]
        if not usual or present:
            return text
        matcher = state.matcher.deep_copy()
        tokens = vocabulary.tokenize_bytes(text + usual[-1])
        if matcher.try_consume_tokens(tokens) != len(tokens):
            return text
        more: bytes = matcher.compute_ff_bytes()
        if not more:
            return text
        text += usual[-1] + more
    return text

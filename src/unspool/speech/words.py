"""Grouping tokens into words, so that each word has the times of its tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from unspool.speech.languages import UNSPACED
from unspool.speech.results import Word

_BEFORE = "\"'“¿([{-「『（"  # joined to the word that follows
_AFTER = "\"'.。,，!！?？:：”)]}、」』）;；…"  # joined to the word before
_USUAL = 0.5  # seconds of a word, at most
_BROKEN = "\ufffd"  # what part of a character decodes to


def group_words(
    tokens: Sequence[int],
    spans: Sequence[tuple[float, float]],
    decode: Callable[[list[int]], str],
    language: str | None,
) -> list[Word]:
    """Words of text tokens that were spoken in these spans."""
    pieces = _split_characters(tokens, decode)
    if language not in UNSPACED:
        pieces = _join_until_space(pieces)
    pieces = _join_marks(pieces)
    words, place = [], 0
    for text, count in pieces:
        (start, _), (_, end) = spans[place], spans[place + count - 1]
        place += count
        if text.strip():
            words.append(Word(text, start, end))
    return words


def trim_edges(words: Sequence[Word]) -> list[Word]:
    """Words of a segment whose first and last one leave out the pause beside them: they last no longer than usual.

    What a token of silence was written for is counted to the words around it.
    """
    lasting = sorted(word.end - word.start for word in words if word.end > word.start)
    longest = 2 * min(_USUAL, lasting[len(lasting) // 2]) if lasting else 0.0
    trimmed = list(words)
    if longest and trimmed and trimmed[0].end - trimmed[0].start > longest:
        first = trimmed[0]
        trimmed[0] = Word(first.text, round(first.end - longest, 3), first.end)
    if longest and trimmed and trimmed[-1].end - trimmed[-1].start > longest:
        last = trimmed[-1]
        trimmed[-1] = Word(last.text, last.start, round(last.start + longest, 3))
    return trimmed


def _split_characters(tokens: Sequence[int], decode: Callable[[list[int]], str]) -> list[tuple[str, int]]:
    """The shortest runs of tokens that are whole characters, and how many tokens each has."""
    pieces: list[tuple[str, int]] = []
    run: list[int] = []
    for token in tokens:
        run.append(token)
        text = decode(run)
        if _BROKEN not in text:
            pieces.append((text, len(run)))
            run = []
    if run:
        pieces.append((decode(run), len(run)))
    return pieces


def _join_until_space(pieces: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    words: list[tuple[str, int]] = []
    for text, count in pieces:
        is_new = not words or text.startswith(" ") or _is_mark(text)
        if is_new:
            words.append((text, count))
        else:
            words[-1] = (words[-1][0] + text, words[-1][1] + count)
    return words


def _join_marks(words: Sequence[tuple[str, int]]) -> list[tuple[str, int]]:
    """Opening marks with the word after them, closing ones with the word before."""
    joined: list[tuple[str, int]] = []
    for text, count in words:
        follows_opening = bool(joined) and joined[-1][0].startswith(" ") and _is_all(joined[-1][0], _BEFORE)
        is_closing = bool(joined) and not text.startswith(" ") and _is_all(text, _AFTER)
        if follows_opening or is_closing:
            joined[-1] = (joined[-1][0] + text, joined[-1][1] + count)
        else:
            joined.append((text, count))
    return joined


def _is_mark(text: str) -> bool:
    return _is_all(text, _BEFORE) or _is_all(text, _AFTER)


def _is_all(text: str, marks: str) -> bool:
    return bool(text.strip()) and all(sign in marks for sign in text.strip())

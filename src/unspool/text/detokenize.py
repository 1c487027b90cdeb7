"""Incremental detokenising: text from tokens as they come, final when it is given, a few decodes of few ids each."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

REPLACEMENT = "\ufffd"  # what decoders write for bytes that are not (or not yet) a character

# A window that ends in an unfinished character is cut where it safely can be from the first length on, and anyhow
# from the second on; it then keeps so many ids at least.
_LONG_WINDOW = 32
_LONGEST_WINDOW = 128
_NUM_KEPT = 16
_LENGTHS: WeakKeyDictionary[Any, dict[tuple[bool, bool], dict[int, int]]] = WeakKeyDictionary()
_MOST_UNFINISHED = 3  # bytes of a character of four


class TokenDecoder(Protocol):
    """The one thing asked of a tokenizer, unspool's or anyone's."""

    def decode(self, token_ids: Any, /, *, skip_special_tokens: bool) -> Any:
        """The text of the ids."""
        ...


class Detokenizer:
    """Turns a row's tokens into text piece by piece: the pieces joined are the text of all the tokens, with U+FFFD for
    bytes that make no character, as where a text is cut inside one.

    A decoder needs the token before to place a space, and all of a character's bytes to write it. So a short
    window of ids is decoded each time: those given last (whose text is out already) and the new ones. Text that
    ends in U+FFFD is held back until the end, because the next token may complete a character.

    One difference is left, for ids that no text encodes to: where bytes of a byte-fallback vocabulary
    (`<0xE4>`) form a character and then something that is none, the decoder, seeing them all, replaces the
    finished character too. It was already given out here, and stays.
    """

    def __init__(
        self, tokenizer: TokenDecoder, *, skip_special_tokens: bool = True, keeps: Collection[int] = ()
    ) -> None:
        """Special tokens that it `keeps` stay in the text, though others are left out."""
        self._tokenizer = tokenizer
        # A decoder drops these before it looks at anything. Dropped here, the window is all text.
        self._dropped_ids = _find_skipped(tokenizer) - frozenset(keeps) if skip_special_tokens else frozenset()
        self._skip_special_tokens = skip_special_tokens and not keeps
        self._lengths = _find_lengths(tokenizer, self._skip_special_tokens)
        self._window: list[int] = []
        self._num_old = 0  # ids of the window that were given with an earlier piece
        self._num_given = 0  # characters of the window's text that are out

    def put(self, ids: Sequence[int]) -> str:
        """Read new ids; returns the text that became final with them."""
        new_ids = [token_id for token_id in map(int, ids) if token_id not in self._dropped_ids]
        if not new_ids:
            return ""
        self._window.extend(new_ids)
        text = self._decode(self._window)
        final = text.rstrip(REPLACEMENT)
        piece = final[self._num_given :]
        if final != text:
            self._num_given = max(self._num_given, len(final))
            if len(self._window) > _LONG_WINDOW:
                piece += self._cut_window(text)
        elif piece:
            # Only a window that has text in it can stand for all the text before.
            del self._window[: self._num_old]
            self._num_old = len(self._window)
            self._num_given = self._count_characters()
        return piece

    def _count_characters(self) -> int:
        """Characters of the window's text."""
        if len(self._window) > 1:
            return len(self._decode(self._window))
        [token_id] = self._window
        known = self._lengths.get(token_id)
        if known is None:
            known = self._lengths[token_id] = len(self._decode(self._window))
        return known

    def end(self) -> str:
        """The tokens ended: what is left of the text. The next ids begin another text."""
        whole = self._decode(self._window)
        # A byte-fallback decoder replaces finished characters before the unfinished one too, unless it is spared that.
        stops = range(len(self._window), max(0, len(self._window) - _MOST_UNFINISHED - 1), -1)
        finished = {stop: self._decode(self._window[:stop]).rstrip(REPLACEMENT) for stop in stops}
        stop = max(finished, key=lambda stop: len(finished[stop]), default=0)
        if finished and not whole.startswith(finished[stop]):
            whole = finished[stop] + self._decode(self._window[stop:])
        rest = whole[self._num_given :]
        self._window, self._num_old, self._num_given = [], 0, 0
        return rest

    def read(self, ids: Sequence[int]) -> str:
        """The text of all the ids at once: what `put`, one by one, and `end` would give."""
        text = self._decode([token_id for token_id in map(int, ids) if token_id not in self._dropped_ids])
        if REPLACEMENT not in text:
            return text
        return "".join([self.put([token_id]) for token_id in ids]) + self.end()  # pieces decide about such bytes

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skip_special_tokens))

    def _cut_window(self, text: str) -> str:
        """Keep the cost of a token constant where every one leaves a character unfinished.

        A cut may fall inside a character, and a byte-fallback decoder would not recover from that; so the
        window's end must decode to the end of the text, with a whole character in it. A window that is nothing
        but stray bytes has no such place, and is cut between two of them; what that makes final is returned.
        """
        num_held = len(text) - self._num_given
        newest = len(self._window) - _NUM_KEPT
        for start in range(newest, newest - _NUM_KEPT, -1):
            tail = self._decode(self._window[start:])
            if num_held <= len(tail) and tail.strip(REPLACEMENT) and text.endswith(tail):
                self._keep_window(start, len(tail) - num_held)
                return ""
        if len(self._window) <= _LONGEST_WINDOW:
            return ""
        starts = range(newest, newest - _NUM_KEPT, -1)
        start = next((start for start in starts if self._splits_at(start, text)), newest)
        num_tail = len(self._decode(self._window[start:]))
        piece = text[self._num_given : len(text) - num_tail]
        self._keep_window(start, max(0, num_tail - num_held))
        return piece

    def _splits_at(self, start: int, text: str) -> bool:
        return self._decode(self._window[:start]) + self._decode(self._window[start:]) == text

    def _keep_window(self, start: int, num_given: int) -> None:
        del self._window[:start]
        self._num_old = 0
        self._num_given = num_given


def _find_lengths(tokenizer: Any, skips: bool) -> dict[int, int]:
    """How many characters a tokenizer writes for tokens alone, as far as it is known."""
    cleans = bool(getattr(tokenizer, "clean_up_tokenization_spaces", False))
    try:
        return _LENGTHS.setdefault(tokenizer, {}).setdefault((skips, cleans), {})
    except TypeError:  # can't be hashed or weakly held
        return {}


def _find_skipped(tokenizer: Any) -> frozenset[int]:
    """The ids that a tokenizer, unspool's or anyone's, leaves out as special."""
    skipped = getattr(tokenizer, "skipped_ids", None)
    if isinstance(skipped, frozenset):
        return skipped
    return frozenset(int(token_id) for token_id in getattr(tokenizer, "all_special_ids", None) or ())

"""One row's text in the tokens of a draft model with another tokenizer, and the draft's guesses in the model's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import takewhile
from typing import NamedTuple

from unspool.decoding.speculative.drafters.alignment import align_tokens, join_text
from unspool.decoding.speculative.drafters.vocabulary import Vocabularies


class Boundary(NamedTuple):
    """A place in the text where both tokenizations have a boundary."""

    own: int  # the model's tokens before it
    draft: int  # the draft model's


class Translation:
    """Re-encodes a row in the draft model's tokens as it grows, and the draft's guesses in the model's.

    Only the end of a text is re-encoded, from a boundary at least as many tokens back as the look-behinds say: a new
    token may change how the text before it is split ("hel" and "lo" are one word to the other tokenizer). If the new
    tokenization agrees with what is held, what is held stays, and the draft model need not read it again.
    """

    def __init__(self, vocabularies: Vocabularies, *, target_lookbehind: int, assistant_lookbehind: int) -> None:
        self._own, self._drafts = vocabularies.own, vocabularies.drafts
        self._special = vocabularies.common_special  # of the draft model -> the model's
        self._draft_special = {own: draft for draft, own in self._special.items()}
        self._target_lookbehind, self._assistant_lookbehind = target_lookbehind, assistant_lookbehind
        self._tokens: list[int] = []  # the row's tokens
        self._is_whole = True  # no character of the row's text is unfinished
        self.ids = list(self._drafts.opening)  # the same in the draft model's tokens, and its guesses after them
        self.num_encoded = len(self.ids)  # those that stand for the row's text
        self._beginning = Boundary(0, self.num_encoded)  # of the text, or of what follows its last special token
        self._boundaries: list[Boundary] = []  # after it
        self._most_boundaries = 2 * max(target_lookbehind, assistant_lookbehind) + 2

    @property
    def num_tokens(self) -> int:
        """The row's tokens that are re-encoded."""
        return len(self._tokens)

    def follow(self, tokens: Sequence[int]) -> int:
        """Re-encode the row's new tokens; return how many of `ids` are unchanged, guesses included."""
        unchanged = len(self.ids) if tokens else self.num_encoded
        for text, special in split_at_special(tokens, self._own.special):
            if text:
                self._tokens += text
                unchanged = min(unchanged, self._reencode())
            if special is not None:
                unchanged = min(unchanged, self._pass_special(special))
        del self.ids[self.num_encoded :]
        return min(unchanged, len(self.ids))

    def express(self) -> list[int]:
        """The guesses after the row's text in the model's tokens, up to the first that is no text, or with it."""
        guesses = self.ids[self.num_encoded :]
        body = list(takewhile(self._drafts.plain.__contains__, guesses))
        end = self._special.get(guesses[len(body)]) if len(body) < len(guesses) else None
        found, is_whole = self._reword(body) if body else ([], self._is_whole)
        plain = list(takewhile(self._own.plain.__contains__, found))
        return [*plain, end] if end is not None and is_whole and len(plain) == len(found) else plain

    def _reencode(self) -> int:
        """Re-encode the end of the text, or all of it if the end agrees with nothing of what is held."""
        near = self._look_back(Boundary(len(self._tokens) - self._target_lookbehind, len(self.ids)))
        lead = len(self._drafts.lead)
        for start in dict.fromkeys((near, self._beginning)):
            text, self._is_whole = self._read_text(start)
            window = self._drafts.encode(text)
            held = self._drafts.read(self.ids[start.draft :])
            has_lead = start == self._beginning and (not held or held[0].startswith(self._drafts.lead))
            kept, skipped = align_tokens(
                held,
                self._drafts.read(window),
                held_lead=lead if has_lead else 0,
                window_lead=lead if window else 0,
            )
            if (kept, skipped) != (0, 0):
                break
        unchanged = start.draft + kept
        self.ids[unchanged:] = window[skipped:]
        self.num_encoded = len(self.ids)
        self._boundaries = [one for one in self._boundaries if one.draft <= unchanged][-self._most_boundaries :]
        if self._is_whole:
            self._boundaries.append(Boundary(len(self._tokens), self.num_encoded))
        return unchanged

    def _reword(self, body: Sequence[int]) -> tuple[list[int], bool]:
        """Guesses that are text in the model's tokens, and whether no character is unfinished."""
        start = self._look_back(Boundary(len(self._tokens), self.num_encoded - self._assistant_lookbehind))
        pieces = self._drafts.read([*self.ids[start.draft : self.num_encoded], *body])
        if start == self._beginning:
            pieces = _drop_lead(pieces, self._drafts.lead)
        text, is_whole = join_text(pieces)
        window = self._own.encode(text)
        held, lead = self._own.read(self._tokens[start.own :]), self._own.lead
        has_lead = start == self._beginning and bool(held) and held[0].startswith(lead)
        kept, skipped = align_tokens(
            held,
            self._own.read(window),
            held_lead=len(lead) if has_lead else 0,
            window_lead=len(lead) if window else 0,
        )
        if kept == len(held):
            return window[skipped:], is_whole
        if not self._is_whole:
            return [], False
        # The row ends inside a token of the new tokenization, or the draft model's tokenizer changed the text.
        text, is_whole = join_text(self._drafts.read(body))
        return self._own.encode_inside(text), is_whole

    def _read_text(self, start: Boundary) -> tuple[str, bool]:
        """The row's text from a boundary on, and whether no character is unfinished."""
        pieces = self._own.read(self._tokens[start.own :])
        return join_text(_drop_lead(pieces, self._own.lead) if start == self._beginning else pieces)

    def _pass_special(self, token: int) -> int:
        """Add a token that is no text, as the draft model's own if it has one; no text is encoded across it."""
        self._tokens.append(token)
        draft = self._draft_special.get(token)
        unchanged = self.num_encoded
        if draft is not None and not self._is_opening(draft):
            unchanged += self.ids[self.num_encoded : self.num_encoded + 1] == [draft]
            self.ids[self.num_encoded :] = [draft]
        else:
            del self.ids[self.num_encoded :]
        self.num_encoded = len(self.ids)
        self._is_whole = True
        self._beginning = Boundary(len(self._tokens), self.num_encoded)
        self._boundaries = []
        return unchanged

    def _is_opening(self, token: int) -> bool:
        """Whether the text has just begun with that very token."""
        return self.ids[: self.num_encoded] == self._drafts.opening and token in self._drafts.opening

    def _look_back(self, most: Boundary) -> Boundary:
        """The last boundary that is not past `most`; the beginning if all are."""
        found = (at for at in reversed(self._boundaries) if at.own <= most.own and at.draft <= most.draft)
        return next(found, self._beginning)


def _drop_lead(pieces: list[bytes], lead: bytes) -> list[bytes]:
    """The pieces of a text without what its tokenizer put before it."""
    return [pieces[0].removeprefix(lead), *pieces[1:]] if pieces else pieces


def split_at_special(tokens: Sequence[int], special: frozenset[int]) -> Iterator[tuple[list[int], int | None]]:
    """Runs of text, each with the token that ends it; the last has none."""
    text: list[int] = []
    for token in tokens:
        if token in special:
            yield text, token
            text = []
        else:
            text.append(token)
    yield text, None

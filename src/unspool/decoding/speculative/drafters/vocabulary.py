"""Two tokenizers side by side: whether they are one, and which tokens both have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from unspool.errors import SettingError
from unspool.plan.drafting import Relation
from unspool.stopping.pieces import TokenPieces

FEWEST_COMMON = 0.05  # of the smaller vocabulary: below it, drawn guesses could hardly say anything

T = TypeVar("T")


class DraftingTokenizer(Protocol):
    """What is asked of a tokenizer, unspool's or anyone's."""

    @property
    def all_special_ids(self) -> list[int]: ...
    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]: ...
    def get_vocab(self) -> dict[str, int]: ...
    def convert_ids_to_tokens(self, ids: list[int]) -> Any: ...
    def convert_tokens_to_string(self, tokens: list[str]) -> str: ...


class Vocabulary:
    """A tokenizer, and the model that it is for: tokens as the bytes they read as in the middle of a text."""

    def __init__(self, tokenizer: DraftingTokenizer, num_tokens: int) -> None:
        self.tokenizer = tokenizer
        self.num_tokens = num_tokens  # the model's, which may be more than the tokenizer's

    @cached_property
    def _pieces(self) -> TokenPieces:
        return TokenPieces(self.tokenizer)

    @cached_property
    def ids(self) -> dict[str, int]:
        """Every token that the model has an embedding for."""
        return {token: number for token, number in self.known.items() if number < self.num_tokens}

    @property
    def known(self) -> dict[str, int]:
        """Every token of the tokenizer."""
        try:
            found = _KNOWN.get(self.tokenizer)
            if found is None or len(found) != _count(self.tokenizer):
                found = _KNOWN[self.tokenizer] = self.tokenizer.get_vocab()
        except TypeError:  # has no length, or can't be hashed or weakly held
            return self.tokenizer.get_vocab()
        return found

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """The tokens that are no text."""
        special = frozenset(self.tokenizer.all_special_ids)
        return {token: number for token, number in self.ids.items() if number in special}

    @cached_property
    def special(self) -> frozenset[int]:
        """The numbers of the tokens that are no text."""
        return frozenset(self.special_ids.values())

    @cached_property
    def plain(self) -> frozenset[int]:
        """The numbers of the tokens that are text."""
        return frozenset(self.ids.values()) - self.special

    @cached_property
    def opening(self) -> list[int]:
        """What the tokenizer itself puts before a text."""
        encoded = self.tokenizer.encode("a", add_special_tokens=True)
        first = next((place for place, token in enumerate(encoded) if token not in self.special), len(encoded))
        return [token for token in encoded[:first] if token < self.num_tokens]

    @cached_property
    def lead(self) -> bytes:
        """What a text reads as having before it once it is encoded: a space with some tokenizers, mostly nothing."""
        encoded = b"".join(self.read(self.encode("a")))
        return encoded[:1] if encoded == b" a" else b""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without any that the model does not have."""
        return [one for one in self.tokenizer.encode(text, add_special_tokens=False) if one < self.num_tokens]

    def encode_inside(self, text: str) -> list[int]:
        """The tokens of a text that goes on from another; none if the first would put something before it."""
        tokens, lead = self.encode(text), len(self.lead)
        for num_skipped in range(len(tokens) + 1):
            if lead <= 0:
                return tokens[num_skipped:] if lead == 0 else []
            lead -= len(b"".join(self.read(tokens[num_skipped : num_skipped + 1])))
        return []

    def read(self, tokens: Sequence[int]) -> list[bytes]:
        """What tokens read as; nothing for numbers that are no tokens."""
        return [_as_bytes(self._pieces.piece(token) or b"") for token in tokens]

    def spell(self) -> dict[bytes, int]:
        """The tokens that are text, by what they read as."""
        plain, found = self.plain, dict[bytes, int]()
        for token, number in self.ids.items():
            piece = _as_bytes(self._pieces.read(token)) if number in plain else b""
            if piece:
                found.setdefault(piece, number)
        return found


def _as_bytes(piece: bytes | str) -> bytes:
    return piece if isinstance(piece, bytes) else piece.encode("utf-8", "replace")


@dataclass(frozen=True)
class Vocabularies:
    """The model's vocabulary and its draft model's."""

    own: Vocabulary
    drafts: Vocabulary

    @cached_property
    def relation(self) -> Relation:
        """Whether both have the same tokens, and under the same numbers. Equal sizes say nothing."""
        return _recall(_RELATIONS, self, self._compare)

    def _compare(self) -> Relation:
        own, other = self.own.ids, self.drafts.ids
        if own == other and self.own.num_tokens == self.drafts.num_tokens:
            return "same"
        return "renumbered" if own.keys() == other.keys() else "other"

    @cached_property
    def common(self) -> dict[int, int]:
        """From the draft model's tokens to the model's, where both have what reads the same (one to one)."""
        return _recall(_COMMON, self, self._match)

    def _match(self) -> dict[int, int]:
        if self.relation != "other":
            plain = self.own.plain
            pairs = ((number, self.own.ids[token]) for token, number in self.drafts.ids.items())
            return {number: own for number, own in pairs if own in plain and number in self.drafts.plain}
        own, other = self.own.spell(), self.drafts.spell()
        return {number: own[piece] for piece, number in other.items() if piece in own}

    @cached_property
    def common_special(self) -> dict[int, int]:
        """The same for tokens that are no text."""
        own = self.own.special_ids
        return {number: own[token] for token, number in self.drafts.special_ids.items() if token in own}

    def check_common(self) -> None:
        """Raise if too few tokens are common for guesses that are drawn from them."""
        num_common, smaller = len(self.common), min(len(self.own.plain), len(self.drafts.plain))
        if num_common < max(1, FEWEST_COMMON * smaller):
            raise SettingError(
                f"`assistant_model` draws its guesses from the tokens that both vocabularies have, and of the "
                f"{len(self.drafts.plain)} tokens of its tokenizer and the {len(self.own.plain)} of the model's only "
                f"{num_common} read the same; use do_sample=False, which drafts through text, or another draft model"
            )


Sizes = tuple[int, int, int, int]  # of the tokenizers, which may grow, and of their models

# Kept while the tokenizers live: a comparison reads every token. The values hold no tokenizer.
_KNOWN: WeakKeyDictionary[Any, dict[str, int]] = WeakKeyDictionary()
_RELATIONS: WeakKeyDictionary[Any, WeakKeyDictionary[Any, tuple[Sizes, Relation]]] = WeakKeyDictionary()
_COMMON: WeakKeyDictionary[Any, WeakKeyDictionary[Any, tuple[Sizes, dict[int, int]]]] = WeakKeyDictionary()


def _recall(
    kept: WeakKeyDictionary[Any, WeakKeyDictionary[Any, tuple[Sizes, T]]],
    both: Vocabularies,
    compute: Callable[[], T],
) -> T:
    own, other = both.own.tokenizer, both.drafts.tokenizer
    try:
        sizes = (_count(own), _count(other), both.own.num_tokens, both.drafts.num_tokens)
        found = kept.setdefault(own, WeakKeyDictionary()).get(other)
        if found is None or found[0] != sizes:
            found = (sizes, compute())
            kept[own][other] = found
    except TypeError:  # has no length, or can't be hashed or weakly held
        return compute()
    return found[1]


def _count(tokenizer: Any) -> int:
    return len(tokenizer)

"""Text for the tiny models: vocabularies whose pieces are parts of characters, and the stop strings of their calls."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import product
from random import Random
from typing import Any

import tokenizers
import transformers

import unspool
from unspool.stopping.pieces import BYTE_OF_CHARACTER

SPECIAL = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
LETTERS = "ab é€"
STOPS = ("é", "€", "a€", "éb", "b ", " ", "aa", "€é", "ba b")
_CHARACTERS = {byte: chr(character) for character, byte in BYTE_OF_CHARACTER.items()}


@cache
def list_pieces(vocab: int, order: int = 0) -> tuple[bytes, ...]:
    """The pieces of a vocabulary, by token: bytes of `LETTERS`, pairs and some triples of them; b"" if special."""
    single = [bytes([byte]) for byte in sorted(set(LETTERS.encode()))]
    pairs = [one + other for one, other in product(single, repeat=2)]
    rng = Random(order)
    triples = rng.sample([pair + one for pair, one in product(pairs, single)], vocab - 3 - len(single) - len(pairs))
    pieces = [*single, *pairs, *triples]
    rng.shuffle(pieces)
    return (b"", b"", b"", *pieces)


@cache
def make_backend(vocab: int, order: int = 0) -> tokenizers.Tokenizer:
    """A tokenizer of GPT-2's kind; another `order` has other triples and other ids."""
    spelled = ["".join(_CHARACTERS[byte] for byte in piece) for piece in list_pieces(vocab, order)]
    spelled[:3] = SPECIAL.values()
    joined = sorted((piece for piece in spelled[3:] if len(piece) > 1), key=len)
    merges = [(piece[:-1], piece[-1]) for piece in joined]
    model = tokenizers.models.BPE({piece: token for token, piece in enumerate(spelled)}, merges)
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL.values()))
    return backend


def make_tokenizer(vocab: int, order: int = 0) -> unspool.Tokenizer:
    """Such a tokenizer of ours."""
    return unspool.Tokenizer(make_backend(vocab, order), special_tokens=SPECIAL)


def make_reference_tokenizer(vocab: int, order: int = 0) -> Any:
    """Such a tokenizer of transformers'."""
    return transformers.PreTrainedTokenizerFast(tokenizer_object=make_backend(vocab, order), **SPECIAL)


def draw_stops(rng: Random) -> list[str]:
    """Stop strings, most of which some text of two or three tokens has."""
    return rng.sample(STOPS, rng.choice([1, 1, 2]))


def ends_at(row: list[int], strings: Sequence[str], vocab: int) -> bool:
    """What stop strings mean, word for word: one of them ends in the row's last token.

    Nothing is found across a special token.
    """
    pieces = list_pieces(vocab)
    start = max((place + 1 for place, token in enumerate(row) if not pieces[token]), default=0)
    text = b"".join(pieces[token] for token in row[start:])
    ends = [text.rfind(target) + len(target) for target in (string.encode() for string in strings) if target in text]
    return any(end > len(text) - len(pieces[row[-1]]) for end in ends)


def read(tokens: Sequence[int], vocab: int) -> str:
    """The text of tokens; what is no character is a mark."""
    pieces = list_pieces(vocab)
    return b"".join(pieces[token] for token in tokens).decode("utf-8", errors="replace")

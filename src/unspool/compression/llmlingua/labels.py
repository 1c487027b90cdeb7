"""Words of a text and how likely each is to be kept, by a token classifier."""

from __future__ import annotations

import re
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import tokenizers

from unspool.errors import SettingError, UnsupportedError
from unspool.models.encoder.classifier import TokenClassifier
from unspool.text import Tokenizer

LONGEST: Final = 512  # tokens of a chunk, with the two around it
_KEEP: Final = 1  # the label of words that stay
_DIGIT: Final = re.compile(r"\d")
_WORD_PIECE, _WORD_START = "##", "▁"


@dataclass(frozen=True, slots=True)
class LabelledChunk:
    """A chunk's words, and the probabilities that they are kept: as forced, and as the classifier gives them."""

    words: list[str]
    forced: list[Any]  # floats: of 32 bits, or whole ones where a word is forced
    own: list[Any]  # by the first token of each, as the package ranks contexts


@dataclass(frozen=True, slots=True)
class Marks:
    """Texts that always stay, and the tokens that stand for those which the vocabulary does not have."""

    forced: tuple[str, ...]
    stand_ins: Mapping[str, str]
    keeps_digits: bool

    def hide(self, text: str) -> str:
        """The text with the stand-ins."""
        for mark, token in self.stand_ins.items():
            text = text.replace(mark, token)
        return text

    def show(self, text: str) -> str:
        """The text without them."""
        for mark, token in self.stand_ins.items():
            text = text.replace(token, mark)
        return text

    def has(self, word: str) -> bool:
        """Whether a word is one of the texts that stay."""
        return word in self.forced or word in self.stand_ins.values()

    def keeps(self, token: str) -> bool:
        """Whether a token has digits that stay."""
        return self.keeps_digits and _DIGIT.search(token) is not None


class Labeller:
    """A token classifier as LLMLingua-2 reads with it: chunks between two tokens, tokens joined to words."""

    def __init__(self, model: TokenClassifier, tokenizer: Tokenizer, *, batch_size: int, num_marks: int) -> None:
        if model.spec.num_labels <= _KEEP:
            raise UnsupportedError("the classifier has one label, and LLMLingua-2 needs two: to drop, and to keep")
        self._model, self._batch_size = model, batch_size
        self.is_word_piece = model.spec.prefix == "bert"
        self._special = set(tokenizer.all_special_tokens)
        backend = tokenizers.Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
        backend.no_truncation()
        backend.no_padding()
        self._stand_ins = [f"[NEW{number}]" for number in range(num_marks)]
        backend.add_special_tokens([tokenizers.AddedToken(token, normalized=False) for token in self._stand_ins])
        self._backend, self._tokenizer = backend, tokenizer
        unknown = tokenizer.unk_token_id
        if unknown is None:
            raise UnsupportedError("the classifier's tokenizer has no token for what it does not know")
        self._unknown: int = unknown
        # As in the package, whatever the vocabulary: where these names are unknown, so is the token.
        self._begin, self._end = self._find_id("[CLS]"), self._find_id("[SEP]")

    def tokenize(self, text: str) -> list[str]:
        """The tokens of a text, as the vocabulary spells them."""
        return list(self._backend.encode(text, add_special_tokens=False).tokens)

    def join(self, tokens: Sequence[str]) -> str:
        """The text of tokens."""
        return self._tokenizer.convert_tokens_to_string(list(tokens))

    def mark(self, forced: Sequence[str], *, keeps_digits: bool) -> Marks:
        """The texts that always stay; those of several tokens get a stand-in each."""
        if len(forced) > len(self._stand_ins):
            raise SettingError(
                f"{len(forced)} `force_tokens` were given, and at most {len(self._stand_ins)} are taken "
                "(llmlingua2_config={'max_force_token': …})"
            )
        stand_ins = {mark: self._stand_ins[place] for place, mark in enumerate(forced) if len(self.tokenize(mark)) != 1}
        room = self._model.spec.encoder.vocab_size
        if any(self._find_id(token) >= room for token in stand_ins.values()):
            raise SettingError(
                f"a text of several tokens in `force_tokens` needs an embedding of its own, and this classifier's "
                f"{room} are all taken; give texts of one token"
            )
        return Marks(tuple(forced), stand_ins, keeps_digits)

    def cut(self, text: str, ends: Sequence[str], marks: Marks) -> list[str]:
        """The text in chunks that fit the classifier, cut behind the last end that each holds."""
        tokens, known = self.tokenize(marks.hide(text)), {*ends}
        known |= {marks.stand_ins[end] for end in ends if end in marks.stand_ins}
        chunks, first = [], 0
        while first < len(tokens):
            end = first + LONGEST - 2
            if end >= len(tokens):
                chunks.append(self.join(tokens[first:]))
                break
            end = next((place for place in range(end, first, -1) if tokens[place] in known), end)
            chunks.append(self.join(tokens[first : end + 1]))
            first = end + 1
        return chunks

    def label(self, chunks: Sequence[str], marks: Marks, token_to_word: str) -> list[LabelledChunk]:
        """Every chunk's words and probabilities."""
        found = []
        for first in range(0, len(chunks), self._batch_size):
            rows = [self._encode(chunk) for chunk in chunks[first : first + self._batch_size]]
            ids, seen = [row for row, _ in rows], [flags for _, flags in rows]
            for row, flags, labels in zip(ids, seen, self._model.classify(ids, seen), strict=True):
                keeps = labels[:, _KEEP].cpu().numpy()
                pairs = [(token, keep) for token, keep, is_seen in zip(row, keeps, flags, strict=True) if is_seen]
                found.append(self._join_words(pairs, marks, token_to_word))
        return found

    def _encode(self, chunk: str) -> tuple[list[int], list[bool]]:
        """A chunk's ids, and which of its tokens the classifier sees: all but padding that its text spells."""
        tokens = self.tokenize(chunk)
        ids = [self._begin, *map(self._find_id, tokens), self._end][:LONGEST]
        seen = [True, *(token != "[PAD]" for token in tokens), True][:LONGEST]
        return ids, seen

    def _find_id(self, token: str) -> int:
        found = self._backend.token_to_id(token)
        return self._unknown if found is None else found

    def _join_words(self, pairs: Sequence[tuple[int, Any]], marks: Marks, token_to_word: str) -> LabelledChunk:
        words: list[str] = []
        forced: list[list[Any]] = []
        own: list[list[Any]] = []
        for number, keep in pairs:
            token = self._backend.id_to_token(number) or ""
            if token in self._special:
                continue
            bare = self._strip(token)
            if self._begins_word(token, bare, marks) or not words:
                words.append(marks.show(token))
                forced.append([1.0 if marks.has(bare) or marks.keeps(words[-1]) else keep])
                own.append([keep])
            else:
                words[-1] += bare
                forced[-1].append(1.0 if marks.keeps(token) else keep)
                own[-1].append(own[-1][0])  # as in the package: a context's words count by their first token
        return LabelledChunk(words, _reduce(forced, token_to_word), _reduce(own, token_to_word))

    def strip_words(self, words: Sequence[str]) -> list[str]:
        """Words without the mark that begins them."""
        return list(words) if self.is_word_piece else [word.lstrip(_WORD_START) for word in words]

    def _strip(self, token: str) -> str:
        return token.lstrip(_WORD_PIECE) if self.is_word_piece else token.lstrip(_WORD_START)

    def _begins_word(self, token: str, bare: str, marks: Marks) -> bool:
        if self.is_word_piece:
            return marks.has(bare) or not token.startswith(_WORD_PIECE)
        return token in string.punctuation or marks.has(token) or token.startswith(_WORD_START)


def _reduce(probabilities: Sequence[Sequence[Any]], token_to_word: str) -> list[Any]:
    if token_to_word == "first":
        return [each[0] for each in probabilities]
    return [sum(each) / len(each) for each in probabilities]


def find_percentile(numbers: Sequence[Any], percent: int) -> Any:
    """The number below which so many percent lie, interpolated."""
    return np.percentile(numbers, percent)

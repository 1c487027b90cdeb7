"""Biases on tokens and on the last token of sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from unspool.config.values import is_one_bias
from unspool.errors import SettingError
from unspool.logits.base import Joining, LogitsProcessor
from unspool.logits.rows import read_token_ids
from unspool.numeric import is_number
from unspool.wording import Setting, about, word

INF = float("inf")
MOST_SEQUENCES = 65_536
LONGEST_SEQUENCE = 4_096
TokenSequence = tuple[int, ...]


def _keep(own: Any, _theirs: Any) -> Any:
    return own


class SequenceBiasLogitsProcessor(LogitsProcessor):
    """Adds a bias to the last token of a sequence whenever the text ends with the tokens before it.

    Takes `{(ids, …): bias}` or `[[[ids, …], bias], …]`.
    """

    # What was made of equal biases is equal.
    joined_by: ClassVar[Joining] = MappingProxyType(
        dict.fromkeys(("_groups", "_forbidden", "_singles", "_checked", "bad_word_ids"), _keep)
    )
    _setting = "sequence_bias"

    def __init__(self, sequence_bias: Mapping[TokenSequence, float] | Sequence[Sequence[Any]]) -> None:
        self._arrange(read_sequence_bias(self._setting, sequence_bias))

    def _arrange(self, sequence_bias: dict[TokenSequence, float]) -> None:
        self.sequence_bias = sequence_bias
        # Sequences of one length are compared together: (sequences, length) ids, (sequences,) biases.
        self._groups: list[tuple[torch.Tensor, torch.Tensor]] = []
        for length in sorted({len(ids) for ids in self.sequence_bias}):
            group = [(ids, bias) for ids, bias in self.sequence_bias.items() if len(ids) == length]
            self._groups.append((torch.tensor([ids for ids, _ in group]), torch.tensor([bias for _, bias in group])))
        is_mask = all(len(ids) == 1 and bias == -INF for ids, bias in sequence_bias.items())
        self._forbidden = [ids[0] for ids in sequence_bias] if is_mask else None
        self._singles: torch.Tensor | None = None  # (vocab,), the biases of single tokens
        self._checked: tuple[int, torch.device] | None = None

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, starts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The scores with the biases that apply added."""
        if self._checked != (scores.shape[-1], scores.device):
            self._prepare(scores)
        longer = [group for group in self._groups if 1 < group[0].shape[1] <= input_ids.shape[-1] + 1]
        if not longer:
            return scores if self._singles is None else scores + self._singles.to(scores.dtype)
        bias = torch.zeros_like(scores)
        if self._singles is not None:
            bias += self._singles
        for ids, values in longer:
            end = input_ids[:, None, 1 - ids.shape[1] :]  # (rows, 1, length - 1)
            is_match = (end == ids[:, :-1]).all(dim=-1)  # (rows, sequences)
            if starts is not None:
                is_match &= (input_ids.shape[-1] - starts + 1 >= ids.shape[1])[:, None]
            added = torch.where(is_match, values, 0.0).to(scores.dtype)
            bias.scatter_add_(-1, ids[:, -1].expand(added.shape), added)
        return scores + bias

    def find_forbidden(self, width: int) -> Sequence[int] | None:
        """The tokens with a bias of -inf, if none has another one, and no sequence is longer."""
        return self._forbidden

    def _prepare(self, scores: torch.Tensor) -> None:
        vocab = scores.shape[-1]
        outside = sorted({token for ids in self.sequence_bias for token in ids if token >= vocab})
        if outside:
            raise SettingError(
                word(
                    "The model vocabulary size is {vocab}, but {name} names these tokens: {outside}.",
                    vocab=vocab,
                    name=Setting(self._setting),
                    outside=outside[:20],
                )
            )
        self._groups = [(ids.to(scores.device), values.to(scores.device)) for ids, values in self._groups]
        self._checked = (vocab, scores.device)
        self._singles = None
        for ids, values in self._groups:
            if ids.shape[1] == 1:
                self._singles = torch.zeros(vocab, device=scores.device).scatter_(0, ids[:, 0], values)


class NoBadWordsLogitsProcessor(SequenceBiasLogitsProcessor):
    """Forbids token sequences, by a bias of -inf; a lone end token can't be forbidden this way and is left out."""

    _setting = "bad_words_ids"

    def __init__(self, bad_words_ids: Sequence[Sequence[int]], eos_token_id: Any = None) -> None:
        if not isinstance(bad_words_ids, (list, tuple)) or not bad_words_ids:
            raise SettingError(about("bad_words_ids", f"has to be a non-empty list, but is {bad_words_ids!r}."))
        self.bad_word_ids = [self._read_word(word) for word in bad_words_ids]
        ends = [] if eos_token_id is None else read_token_ids("eos_token_id", eos_token_id, may_be_negative=True)
        forbidden = {tuple(word): -INF for word in self.bad_word_ids if not (len(word) == 1 and word[0] in ends)}
        # All of them may be end tokens: then there is nothing to do.
        self._arrange(read_sequence_bias(self._setting, forbidden) if forbidden else {})

    @staticmethod
    def _read_word(word: Any) -> list[int]:
        if not isinstance(word, (list, tuple)):
            raise SettingError(about("bad_words_ids", f"has to be a list of lists, but holds {word!r}."))
        return read_token_ids("bad_words_ids", word)


class LogitBiasLogitsProcessor(SequenceBiasLogitsProcessor):
    """Adds a bias to single tokens, `{id: bias}` (OpenAI's logit_bias)."""

    _setting = "logit_bias"

    def __init__(self, logit_bias: Mapping[Any, float]) -> None:
        if not isinstance(logit_bias, Mapping) or not logit_bias:
            raise SettingError(
                about("logit_bias", f"has to be a non-empty dict {{token id: bias}}, but is {logit_bias!r}.")
            )
        super().__init__({(_read_key(token),): bias for token, bias in logit_bias.items()})


def read_sequence_bias(name: str, given: Any) -> dict[TokenSequence, float]:
    """Sequences and their biases, from either form; each checked."""
    given = [given] if is_one_bias(given) else given
    if not isinstance(given, (Mapping, list, tuple)) or not given:
        raise SettingError(
            about(name, f"has to be a non-empty dictionary, or non-empty list of lists, but is {given!r}.")
        )
    if len(given) > MOST_SEQUENCES:
        raise SettingError(about(name, f"has {len(given)} sequences; at most {MOST_SEQUENCES} are taken."))
    pairs: list[Any] = list(given.items()) if isinstance(given, Mapping) else list(given)
    return dict(_read_pair(name, pair) for pair in pairs)


def _read_pair(name: str, pair: Any) -> tuple[TokenSequence, float]:
    if not isinstance(pair, (list, tuple)) or len(pair) != 2 or not isinstance(pair[0], (list, tuple)):
        raise SettingError(about(name, f"has to be made of pairs of token ids and a bias, but holds {pair!r}."))
    ids, bias = read_token_ids(name, pair[0]), pair[1]
    if not 0 < len(ids) <= LONGEST_SEQUENCE:
        raise SettingError(
            about(name, f"holds a sequence of {len(ids)} tokens; a bias needs 1 to {LONGEST_SEQUENCE} to stand on.")
        )
    if not is_number(bias, allows_infinity=True):
        raise SettingError(about(name, f"has to hold a number for each sequence, but holds {bias!r} for {ids}."))
    return tuple(ids), float(bias)


def _read_key(token: Any) -> int:
    if isinstance(token, str) and token.isdecimal():  # JSON has no other keys
        return int(token)
    if isinstance(token, bool) or not isinstance(token, Integral):
        raise SettingError(about("logit_bias", f"has to have token ids as keys, but has {token!r}."))
    return int(token)

"""Stopping at a text."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from unspool.errors import SettingError
from unspool.stopping.base import StoppingCriteria
from unspool.stopping.pieces import STATIC_PREFIX, Mode, Piece, Reading, TokenPieces

MOST_STRINGS = 256
LONGEST_STRING = 4_096
_TABLES_KEPT = 8

Positions = dict[Any, dict[int, list[int]]]
Tables = tuple[torch.Tensor, int, int]


class StopStringCriteria(StoppingCriteria):
    """Stops the rows whose last token completes a stop string, be it at the token's end or inside it.

    Of "stop", the tokens ["st", "op"], ["st", "opera"] and ["las", "topper"] end a row; ["stop", "at"] does not,
    because the row should have ended a token before. Only the tail of each row is read, as text, at each call:
    nothing is computed over the vocabulary, so setting one up costs next to nothing.
    """

    def __init__(self, tokenizer: Any, stop_strings: str | Sequence[str]) -> None:
        strings = (stop_strings,) if isinstance(stop_strings, str) else tuple(stop_strings)
        if not 0 < len(strings) <= MOST_STRINGS:
            raise SettingError(f"`stop_strings` must be 1 to {MOST_STRINGS} strings, but there are {len(strings)}.")
        for text in strings:
            if not isinstance(text, str) or not 0 < len(text) <= LONGEST_STRING:
                raise SettingError(f"A stop string has 1 to {LONGEST_STRING} characters; {text!r:.80} does not.")
        self.stop_strings: tuple[str, ...] = strings
        self.num_stop_strings = len(strings)
        self._tokenizer = tokenizer
        self._pieces = TokenPieces(tokenizer)
        self._targets: tuple[Any, ...] = tuple(self._pieces.encode(text) for text in strings)
        # No token of a match is empty, or it need not be looked at: one token a character (or byte) is enough.
        self.maximum_token_len = max(len(target) for target in self._targets)
        self.target_lens = torch.tensor([len(target) for target in self._targets], dtype=torch.int32)
        self.known_ends: dict[int, bool] = self._pieces.find_ends(self._targets)  # tokens that a stop string can end in

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """The rows that a stop string ends."""
        tails = input_ids[:, -self.maximum_token_len :].tolist()
        flags = [self.match(tail) is not None for tail in tails]
        return torch.tensor(flags, dtype=torch.bool, device=input_ids.device)  # (rows,)

    @property
    def reach(self) -> int:
        """How many of a row's last tokens may have to be looked at."""
        return self.maximum_token_len

    def match(self, ids: Sequence[int]) -> str | None:
        """The stop string that the last of `ids`, one row's tokens, completes, if any."""
        if not ids or not self._may_end(ids[-1]):
            return None
        last: Any = self._pieces.piece(ids[-1])
        before = self._text_before(ids)
        for text, target in zip(self.stop_strings, self._targets, strict=True):
            # All but one character may stand before the last token: whatever is found then reaches into it.
            start = max(len(before) - len(target) + 1, 0)
            if target in before[start:] + last:
                return text
        return None

    def _may_end(self, token_id: int) -> bool:
        """Whether a stop string can end in this token: what most tokens answer with no, from memory."""
        known = self.known_ends.get(token_id)
        if known is None:
            piece: Any = self._pieces.piece(token_id)
            if piece is None:
                return False
            known = any(_end_overlaps(piece, target) for target in self._targets)
            self.known_ends[token_id] = known
        return known

    def _text_before(self, ids: Sequence[int]) -> Any:
        """The text before the last token, as far back as the longest stop string can reach."""
        parts: list[Any] = []
        missing = self.maximum_token_len - 1
        for token_id in reversed(ids[-self.maximum_token_len : -1]):
            piece = self._pieces.piece(token_id) if missing > 0 else None
            if piece is None:  # far enough, or no token: nothing matches across it
                break
            parts.append(piece)
            missing -= len(piece)
        empty: Piece = "" if self._pieces.mode is None else b""
        return empty.join(reversed(parts))

    # The reference's tables over the vocabulary. Nothing here reads them; code written for it may.

    @cached_property
    def _tables(self) -> Tables:
        vocab = self._tokenizer.get_vocab()
        return self.clean_and_embed_tokens_with_cache(tuple(vocab), tuple(vocab.values()), self._tokenizer)

    @property
    def embedding_vec(self) -> torch.Tensor:
        """A row for each token: where it fits inside and at the end of each stop string, and its length."""
        return self._tables[0]

    @property
    def max_valid_positions(self) -> int:
        """The most places inside a stop string that a token fits in."""
        return self._tables[1]

    @property
    def max_valid_end_lens(self) -> int:
        """The most lengths by which a token overlaps the end of a stop string."""
        return self._tables[2]

    def clean_and_embed_tokens_with_cache(
        self, token_list: Sequence[str], token_indices: Sequence[int], tokenizer: Any
    ) -> Tables:
        """The tables for these stop strings and this vocabulary, kept for the last few."""
        # Sorted, because a vocabulary comes in another order each time.
        key = (tuple(sorted(zip(token_list, token_indices, strict=True))), self._targets)
        if key not in _TABLES:
            tokens, indices = self.clean_tokenizer_vocab(tokenizer, stop_string_matching_mode=self._pieces.mode)
            _TABLES[key] = self._stop_string_create_embedding_vec(tokens, indices, self._targets)
            if len(_TABLES) > _TABLES_KEPT:
                _TABLES.popitem(last=False)
        _TABLES.move_to_end(key)
        return _TABLES[key]

    @staticmethod
    def clean_tokenizer_vocab(
        tokenizer: Any, static_prefix: str = STATIC_PREFIX, stop_string_matching_mode: Mode = None
    ) -> tuple[tuple[Any, ...], tuple[int, ...]]:
        """Every token as it reads in the middle of a text, and its id."""
        pieces = TokenPieces(tokenizer, Reading.of(tokenizer, static_prefix, stop_string_matching_mode))
        vocab = tokenizer.get_vocab()
        return tuple(pieces.read(token) for token in vocab), tuple(vocab.values())

    @staticmethod
    def _stop_string_get_matching_positions(
        token_list: Sequence[Any], token_indices: Sequence[int], stop_strings: Sequence[Any]
    ) -> tuple[Positions, Positions]:
        """Where each token fits inside each stop string, counted from its end, and how it overlaps that end."""
        inside: Positions = {}
        at_end: Positions = {}
        for target in stop_strings:
            inside[target], at_end[target] = {}, {}
            for token, index in zip(token_list, token_indices, strict=True):
                if positions := _inner_positions(token, target):
                    inside[target][index] = positions
                if overlaps := _end_overlaps(token, target):
                    at_end[target][index] = overlaps
        return inside, at_end

    @staticmethod
    def _stop_string_create_embedding_vec(
        token_list: Sequence[Any], token_indices: Sequence[int], stop_strings: Sequence[Any]
    ) -> Tables:
        """The positions, the overlaps and the lengths as one table, with a last row for ids that are no tokens."""
        inside, at_end = StopStringCriteria._stop_string_get_matching_positions(token_list, token_indices, stop_strings)
        most_inside = max((len(found) for tokens in inside.values() for found in tokens.values()), default=1)
        most_at_end = max((len(found) for tokens in at_end.values() for found in tokens.values()), default=0)
        if most_at_end == 0:
            raise SettingError(
                "No token of the vocabulary can end any of the stop strings: they hold characters it has no token for."
            )
        width = len(stop_strings) * (most_inside + most_at_end) + 1
        table = np.full((max(token_indices) + 2, width), -1, dtype=np.int32)
        for place, target in enumerate(stop_strings):
            for first, found in (
                (most_inside * place, inside[target]),
                (most_inside * len(stop_strings) + most_at_end * place, at_end[target]),
            ):
                for index, values in found.items():
                    table[index, first : first + len(values)] = values
        table[list(token_indices), -1] = [len(token) for token in token_list]
        return torch.from_numpy(table), most_inside, most_at_end


_TABLES: OrderedDict[Any, Tables] = OrderedDict()


def _inner_positions(token: Any, target: Any) -> list[int]:
    """How many characters of `target` stand after `token` where it fits inside, or over the start."""
    found = []
    for after in range(1, len(target)):
        rest = target[: len(target) - after]
        if rest.endswith(token) or token.endswith(rest):
            found.append(after)
    return found


def _end_overlaps(token: Any, target: Any) -> list[int]:
    """How many characters of `target` the start of `token` can complete, for each place where it may end."""
    found = []
    for end in range(1, len(token) + 1):
        start = token[:end]
        if target.endswith(start) or start.endswith(target):
            found.append(min(end, len(target)))
    return found

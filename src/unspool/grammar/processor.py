"""The processor that keeps rows to their grammars: a function of the visible tokens, like every processor."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, TypeVar

import torch

from unspool.errors import SettingError
from unspool.grammar.choosing import Chooser
from unspool.grammar.compiling import Grammar, compile_grammar
from unspool.grammar.masks import Foreseen, MaskMaker
from unspool.grammar.sources import read_source
from unspool.grammar.states import MatcherState, States, Texts
from unspool.grammar.vocabulary import find_vocabulary, list_specials
from unspool.kernels.masks import keep_allowed
from unspool.kernels.sending import send_beside
from unspool.logits.base import LogitsProcessor
from unspool.logits.building import Build
from unspool.logits.whisper import WhisperTimeStampLogitsProcessor
from unspool.thoughts.budget import spread
from unspool.wording import about

Value = TypeVar("Value")


class GrammarLogitsProcessor(LogitsProcessor):
    """Leaves each row the tokens with which its text can still become what its grammar describes.

    `grammars` has one grammar for all rows, or one (or None) per row. Text begins after `first_column` columns, which
    rows that come from several requests have each their own of; the end tokens are allowed where the text is whole.
    """

    follows_moves = True

    def __init__(self, grammars: Sequence[Grammar | None], first_column: int, ends: Sequence[int]) -> None:
        if not ends:
            raise SettingError(
                "a text that keeps a grammar ends with an end token, and there is none; set eos_token_id to one"
            )
        present = [one for one in grammars if one is not None]
        self.grammars = list(grammars)
        self._first_columns = [first_column]  # one for all rows, or one for each
        self.ends = tuple(ends)
        self._states = States()
        self._masks = MaskMaker(present[0].vocabulary, self.ends)
        self._foreseen: Foreseen | None = None

    @classmethod
    def make(cls, build: Build) -> GrammarLogitsProcessor:
        """The processor that the call's setting asks for."""
        context = build.context
        if any(isinstance(one, WhisperTimeStampLogitsProcessor) for one in context.custom):
            raise SettingError(
                about(
                    build.setting,
                    "describes the whole text, and timestamps are written into this one: they were asked for, or the "
                    "sound has several windows; ask for none, and give one window at a time",
                )
            )
        values = build.value if build.is_per_row else [build.value]
        vocabulary = find_vocabulary(context.tokenizer, context.vocab_size, build.eos)
        specials = list_specials(context.tokenizer)
        made: dict[int, Grammar | None] = {}
        for one in values:
            if id(one) not in made:
                source = read_source(build.setting, one, specials)
                made[id(one)] = None if source is None else compile_grammar(source, vocabulary)
        grammars = [made[id(one)] for one in values]
        return cls(grammars, build.first_free_column, build.eos)

    # --- the scores ----------------------------------------------------------------------------------
    def __call__(
        self,
        input_ids: torch.Tensor,
        scores: torch.Tensor,
        host_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The scores (rows, vocab), -inf for tokens that no text of the grammar goes on with.

        `host_ids` are the `input_ids` on the host.
        """
        if input_ids.shape[1] < min(self._first_columns):
            return scores  # a forced beginning
        texts = self._cut(input_ids.cpu() if host_ids is None else host_ids)
        bits = None if self._foreseen is None else self._foreseen.find(texts)
        if bits is None:
            bits = send_bits(self._masks.make(self._find_states(texts), pinned=scores.is_cuda), scores.device)
        return keep_allowed(scores, bits)

    def states_of(self, host_ids: torch.Tensor) -> list[MatcherState | None]:
        """The state of each row after its text, for who wants to know what is forced."""
        if host_ids.shape[1] < min(self._first_columns):
            return [None] * len(host_ids)
        return self._find_states(self._cut(host_ids))

    def start_choosing(self, host_ids: torch.Tensor) -> Chooser:
        """What chooses the next tokens of rows, greedily and step by step, after the tokens that they have."""
        [first] = set(self._first_columns)  # rows of one call
        states = self._states.find_own(spread(self.grammars, len(host_ids)), self._cut(host_ids), self.ends)
        return Chooser(states, self._masks, num_free=max(0, first - host_ids.shape[1]))

    def foresee(self, rows: Sequence[list[int]], drafts: Sequence[list[int]], device: torch.device) -> None:
        """Make the masks behind rows (their columns) and along what is drafted for them in one call; the calls for
        scores on `device` that follow find theirs there."""
        self._foreseen = None
        firsts = self.find_starts(rows)
        if firsts is None:
            return
        texts = [row[first:] for row, first in zip(rows, firsts, strict=True)]
        states = self._states.find_apart(spread(self.grammars, len(rows)), texts, self.ends)
        bits, places = self._masks.make_along(states, drafts, pinned=device.type == "cuda")
        self._foreseen = Foreseen(texts, list(drafts), places, send_bits(bits, device))

    def find_starts(self, rows: Sequence[list[int]]) -> list[int] | None:
        """The columns in which the texts of rows begin; None if one has not begun."""
        firsts = spread(self._first_columns, len(rows))
        return None if any(len(row) < first for row, first in zip(rows, firsts, strict=True)) else firsts

    def _cut(self, host_ids: torch.Tensor) -> Texts:
        """What of rows' columns is their texts."""
        firsts = spread(self._first_columns, len(host_ids))
        first = min(min(firsts), host_ids.shape[1])
        return Texts(host_ids[:, first:], [own - first for own in firsts])

    def _find_states(self, texts: Texts) -> list[MatcherState | None]:
        return self._states.find(spread(self.grammars, len(texts.ids)), texts, self.ends)

    def join(self, other: Any, counts: tuple[int, int], shifts: tuple[int, int]) -> GrammarLogitsProcessor | None:
        """The processor for the rows of both, if their texts are of one vocabulary and end alike."""
        if self.ends != other.ends or self._masks.vocabulary is not other._masks.vocabulary:
            return None
        joined = copy.copy(self)
        joined.grammars = spread(self.grammars, counts[0]) + spread(other.grammars, counts[1])
        joined._first_columns = [
            first + shift
            for one, count, shift in zip((self, other), counts, shifts, strict=True)
            for first in spread(one._first_columns, count)
        ]
        joined._states, joined._foreseen = self._states.join(other._states, counts), None
        return joined

    def select_rows(self, index: torch.Tensor) -> GrammarLogitsProcessor:
        """The processor for the rows at `index`, which finds their states as this one does."""
        rows = index.tolist()
        chosen = copy.copy(self)
        chosen.grammars = _select(self.grammars, rows)
        chosen._first_columns = _select(self._first_columns, rows)
        chosen._states = self._states.select(rows)
        fits = self._foreseen is not None and max(rows, default=0) < len(self._foreseen.texts)
        chosen._foreseen = self._foreseen.select(rows) if self._foreseen is not None and fits else None
        return chosen


def _select(values: list[Value], index: Sequence[int]) -> list[Value]:
    """The values of the rows at `index`; one for all stays as it is."""
    return [values[row] for row in index] if len(values) > 1 else values


def send_bits(bits: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Masks where the scores are: beside the pass that they are waiting for, if that runs on a GPU."""
    return send_beside(bits, device) if device.type == "cuda" else bits.to(device)

"""The processor that keeps answers to their grammars, and leaves the thoughts before them free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from unspool.grammar.compiling import Grammar
from unspool.grammar.processor import GrammarLogitsProcessor, send_bits
from unspool.grammar.sources import OWN_HEADER
from unspool.grammar.states import MatcherState, Texts
from unspool.kernels.masks import keep_allowed
from unspool.kernels.sending import send
from unspool.logits.building import Build
from unspool.thoughts.budget import find_phases, spread
from unspool.thoughts.parts import Phase
from unspool.thoughts.places import Place, RowPlaces, ThoughtMarks, require_marks


class AnswerGrammarLogitsProcessor(GrammarLogitsProcessor):
    """Leaves each row the tokens with which its answer can still become what its grammar describes.

    Until an answer begins, no mask is made: only the end tokens are forbidden, and tokens that would end the thought
    and go on in one. Behind a thought come the words with which the model begins an answer, then the grammar's text.
    A prompt that does not begin a thought leaves the choice: a thought, or the answer at once.
    """

    start_choosing: Any = None  # a step by step choice knows no thoughts
    _marks: ThoughtMarks
    _phases: list[Phase]  # one for all rows, or one for each
    _places: RowPlaces

    @classmethod
    def make(cls, build: Build) -> AnswerGrammarLogitsProcessor:
        """The processor that the call's setting asks for."""
        marks = require_marks("thoughts", build.context.tokenizer)
        made = super().make(build)
        assert isinstance(made, cls)
        phases = find_phases(build, marks)
        made._marks, made._phases = marks, phases if len(set(phases)) > 1 else phases[:1]
        made._places = RowPlaces(marks)
        return made

    # --- the scores ----------------------------------------------------------------------------------
    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, host_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The scores (rows, vocab), -inf for tokens that no answer of the grammar goes on with."""
        if input_ids.shape[1] < min(self._first_columns):
            return scores  # a forced beginning
        ids = input_ids.cpu() if host_ids is None else host_ids
        places = self._find_places(ids)
        if self._are_free(places):
            return scores.index_fill(-1, send(self._list_ends(), scores.device), -torch.inf)
        texts = self._cut_answers(ids, places)
        bits = None if self._foreseen is None else self._foreseen.find(texts)
        if bits is None:
            bits = self._masks.make(self._find_states(texts), pinned=scores.is_cuda)
            self._mark_beginnings(bits, places)
            bits = send_bits(bits, scores.device)
        return keep_allowed(scores, bits)

    def _find_places(self, ids: torch.Tensor) -> list[Place]:
        num_rows = len(ids)
        firsts = spread(self._first_columns, num_rows)
        first = min(min(firsts), ids.shape[1])
        starts = [own - first for own in firsts]
        return self._places.find(ids[:, first:], starts, spread(self._phases, num_rows))

    def _are_free(self, places: Sequence[Place]) -> bool:
        """Whether all rows think, and nothing but an end token is forbidden."""
        grammars = spread(self.grammars, len(places))
        return all(
            grammar is not None and place.phase == "open" and not self._marks.list_overshooting(place)
            for grammar, place in zip(grammars, places, strict=True)
        )

    def _list_ends(self) -> list[int]:
        return sorted({*self.ends, *self._masks.vocabulary.ends})

    def _find_header(self, grammar: Grammar | None, place: Place) -> tuple[int, ...]:
        """The tokens between a thought and the answer that a grammar describes."""
        header = self._marks.header
        is_due = place.num or self._marks.kind.header.strip()  # a prompt that ends a thought has the white space
        has_own = grammar is None or grammar.source.is_free or OWN_HEADER in grammar.source.text
        return header if is_due and not place.is_said and not has_own else ()

    def _find_start(self, grammar: Grammar | None, place: Place) -> int | None:
        """How many of a row's tokens come before the text of its grammar; None while it has not begun."""
        if grammar is None or place.phase == "free":
            return 0
        if place.phase == "open":
            return None
        start = place.end + len(self._find_header(grammar, place))
        return start if place.seen >= start else None

    def _cut_answers(self, ids: torch.Tensor, places: Sequence[Place]) -> Texts:
        """What of rows' columns is their answers."""
        firsts, grammars = spread(self._first_columns, len(ids)), spread(self.grammars, len(ids))
        first = min(min(firsts), ids.shape[1])
        columns = ids.shape[1] - first
        starts = []
        for own, grammar, place in zip(firsts, grammars, places, strict=True):
            start = self._find_start(grammar, place)
            starts.append(columns + 1 if start is None else own - first + start)
        return Texts(ids[:, first:], starts)

    def _mark_beginnings(self, bits: torch.Tensor, places: Sequence[Place]) -> None:
        """Change the masks of rows whose answers have not begun."""
        masks = bits.numpy().view(np.uint32)
        grammars = spread(self.grammars, len(places))
        for row, (grammar, place) in enumerate(zip(grammars, places, strict=True)):
            if grammar is None:
                continue
            if place.phase == "open":
                forbidden = [*self._list_ends(), *self._marks.list_overshooting(place)]
                _put(masks[row], forbidden, is_allowed=False)
            elif place.phase == "free":
                is_direct = OWN_HEADER not in grammar.source.text
                if is_direct and self._marks.kind.direct:
                    masks[row] = 0
                _put(masks[row], self._marks.list_beginnings(place, is_direct=is_direct), is_allowed=True)
            elif self._find_start(grammar, place) is None:
                masks[row] = 0
                header = self._find_header(grammar, place)
                _put(masks[row], [header[place.seen - place.end]], is_allowed=True)

    # --- what others ask -----------------------------------------------------------------------------
    def states_of(self, host_ids: torch.Tensor) -> list[MatcherState | None]:
        """The state of each row after its text; None for one whose answer has not begun."""
        if host_ids.shape[1] < min(self._first_columns):
            return [None] * len(host_ids)
        places = self._find_places(host_ids)
        states = self._find_states(self._cut_answers(host_ids, places))
        return [None if place.phase == "free" else state for state, place in zip(states, places, strict=True)]

    def find_starts(self, rows: Sequence[list[int]]) -> list[int] | None:
        """The columns in which the texts of rows begin; None if one has not begun."""
        firsts = spread(self._first_columns, len(rows))
        if any(len(row) < first for row, first in zip(rows, firsts, strict=True)):
            return None
        starts = list[int]()
        phases, grammars = spread(self._phases, len(rows)), spread(self.grammars, len(rows))
        for row, first, phase, grammar in zip(rows, firsts, phases, grammars, strict=True):
            place = self._marks.follow(self._marks.start(phase), row[first:])
            start = self._find_start(grammar, place)
            if start is None or place.phase == "free":
                return None
            starts.append(first + start)
        return starts

    def join(self, other: Any, counts: tuple[int, int], shifts: tuple[int, int]) -> GrammarLogitsProcessor | None:
        """The processor for the rows of both."""
        if self._marks is not other._marks:
            return None
        joined = super().join(other, counts, shifts)
        if isinstance(joined, AnswerGrammarLogitsProcessor):
            joined._phases = spread(self._phases, counts[0]) + spread(other._phases, counts[1])
            joined._places = RowPlaces(self._marks)
        return joined

    def select_rows(self, index: torch.Tensor) -> GrammarLogitsProcessor:
        """The processor for the rows at `index`."""
        chosen = super().select_rows(index)
        if isinstance(chosen, AnswerGrammarLogitsProcessor) and len(self._phases) > 1:
            chosen._phases = [self._phases[row] for row in index.tolist()]
        return chosen


def _put(mask: np.ndarray[Any, np.dtype[np.uint32]], tokens: Sequence[int], *, is_allowed: bool) -> None:
    """Set or clear the bits of tokens in a mask."""
    ids = np.asarray(tokens, dtype=np.int64)
    words, bits = ids >> 5, np.left_shift(np.uint32(1), (ids & 31).astype(np.uint32), dtype=np.uint32)
    if is_allowed:
        np.bitwise_or.at(mask, words, bits)
    else:
        np.bitwise_and.at(mask, words, ~bits)

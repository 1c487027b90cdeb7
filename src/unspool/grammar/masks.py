"""Masks of the tokens that grammars allow: one bit per token, on the host; many rows' on several threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from unspool.grammar.sources import require_library
from unspool.grammar.states import MatcherState, Texts, check_state, find_executor
from unspool.grammar.vocabulary import GrammarVocabulary

Words = np.ndarray[Any, np.dtype[np.int32]]


@dataclass(frozen=True)
class MaskMaker:
    """Makes the masks of states; the call's end tokens are allowed where the vocabulary's own is."""

    vocabulary: GrammarVocabulary
    ends: tuple[int, ...]

    def make(self, states: Sequence[MatcherState | None], *, pinned: bool) -> torch.Tensor:
        """The masks (rows, words) of what follows the states; all bits for None."""
        bits = self._new(len(states), pinned=pinned)
        masks: Words = bits.numpy()
        firsts: dict[int, int] = {}  # where a state's mask is made; other rows of the state copy it
        work = []
        for row, state in enumerate(states):
            if state is None:
                masks[row] = -1
            elif state.is_broken:
                masks[row] = 0
            elif id(state) not in firsts:
                firsts[id(state)] = row
                work.append((state.matcher, row))
        if len(work) > 1:
            require_library().numpy.fill_next_token_bitmask_par(find_executor(), work, masks)
        elif work:
            require_library().numpy.fill_next_token_bitmask(work[0][0], masks, work[0][1])
        self._set_ends(masks, list(firsts.values()))
        for row, state in enumerate(states):
            first = row if state is None else firsts.get(id(state), row)
            if first != row:
                masks[row] = masks[first]
            elif state is not None:
                check_state(state)
        return bits

    def make_along(
        self, states: Sequence[MatcherState | None], drafts: Sequence[Sequence[int]], *, pinned: bool
    ) -> tuple[torch.Tensor, list[int]]:
        """The masks of what follows each state and each of the drafted tokens after it, and where each row's begin.

        Masks behind a drafted token that is not allowed have no bits. No two rows may have the same state.
        """
        counts = [1 + len(tokens) for tokens in drafts]
        firsts = [sum(counts[:row]) for row in range(len(counts))]
        bits = self._new(sum(counts), pinned=pinned)
        masks: Words = bits.numpy()
        masks[:] = 0
        alone, along, made = [], [], list[int]()
        for state, tokens, first, count in zip(states, drafts, firsts, counts, strict=True):
            if state is None:
                masks[first : first + count] = -1
            elif not state.is_broken:
                made += range(first, first + count)
                if tokens:
                    along.append((state.matcher, first, list(tokens)))
                else:
                    alone.append((state.matcher, first))
        library = require_library().numpy
        if alone:
            library.fill_next_token_bitmask_par(find_executor(), alone, masks)
        if along:
            library.fill_next_token_bitmask_par_with_draft_tokens(find_executor(), along, masks)
        self._set_ends(masks, made)
        for state in states:
            if state is not None:
                check_state(state)
        return bits, firsts

    def _new(self, count: int, *, pinned: bool) -> torch.Tensor:
        # torch keeps pinned memory, and does not give it out again before copies from it are done.
        return torch.empty(count, self.vocabulary.num_words, dtype=torch.int32, pin_memory=pinned)

    def _set_ends(self, masks: Words, rows: list[int]) -> None:
        """Allow the call's end tokens in the rows' masks that have the vocabulary's own, and in no others."""
        own = self.vocabulary.ends
        if own == self.ends or not rows:
            return
        words, one = masks.view(np.uint32), np.uint32(1)
        may_end = np.zeros(len(rows), dtype=np.uint32)
        for token in own:
            word, bit = token >> 5, np.uint32(token & 31)
            held = words[rows, word]
            may_end |= (held >> bit) & one
            words[rows, word] = held & ~(one << bit)
        # One that is also text would end the text where it is not whole, and would stand behind a whole one: it is
        # taken only if there is no other.
        closing = [token for token in self.ends if token in own or self.vocabulary.tokens.is_special_token(token)]
        for token in self.ends:
            word, bit = token >> 5, np.uint32(token & 31)
            ending = may_end if not closing or token in closing else np.uint32(0)
            words[rows, word] = (words[rows, word] & ~(one << bit)) | (ending << bit)


@dataclass(frozen=True, slots=True)
class Foreseen:
    """The masks along drafts, found again by the text that they follow."""

    texts: list[list[int]]  # of each row, before its draft
    drafts: list[list[int]]
    firsts: list[int]  # where each row's masks begin
    bits: torch.Tensor  # (masks, words), where the scores are

    def select(self, index: Sequence[int]) -> Foreseen:
        """The same for the rows at `index`."""
        return replace(
            self,
            texts=[self.texts[row] for row in index],
            drafts=[self.drafts[row] for row in index],
            firsts=[self.firsts[row] for row in index],
        )

    def find(self, texts: Texts) -> torch.Tensor | None:
        """The masks (rows, words) behind rows' texts; None if these do not follow the drafts."""
        if len(texts.ids) != len(self.texts):
            return None
        places = []
        for tokens, before, draft, first in zip(texts.list_rows(), self.texts, self.drafts, self.firsts, strict=True):
            if tokens is None:
                return None
            num_taken = len(tokens) - len(before)
            if not 0 <= num_taken <= len(draft) or tokens != before + draft[:num_taken]:
                return None
            places.append(first + num_taken)
        if len(places) == 1:
            return self.bits[places[0] : places[0] + 1]
        return self.bits[places]

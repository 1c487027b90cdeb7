"""The processor that keeps rows to their grammars: a function of the visible tokens, like every processor."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from unspool.errors import SettingError
from unspool.grammar.compiling import Grammar, compile_grammar
from unspool.grammar.sources import read_source, require_library
from unspool.grammar.states import State, States, check_state
from unspool.grammar.vocabulary import find_vocabulary, list_specials
from unspool.kernels.cpu.library import count_threads
from unspool.kernels.masks import keep_allowed
from unspool.logits.base import LogitsProcessor
from unspool.logits.building import Build

_MOST_THREADS = 8


class GrammarLogitsProcessor(LogitsProcessor):
    """Leaves each row the tokens with which its text can still become what its grammar describes.

    `grammars` has one grammar for all rows, or one (or None) per row. Text begins after `first_column` columns; the
    end tokens are allowed where the text is whole.
    """

    def __init__(self, grammars: Sequence[Grammar | None], first_column: int, ends: Sequence[int]) -> None:
        if not ends:
            raise SettingError(
                "a text that keeps a grammar ends with an end token, and there is none; set eos_token_id to one"
            )
        present = [one for one in grammars if one is not None]
        self.grammars = list(grammars)
        self.first_column = first_column
        self.ends = tuple(ends)
        self._vocabulary = present[0].vocabulary
        self._states = States()
        self._early: tuple[torch.Tensor, list[int] | None] | None = None  # a history, and how it went on
        self._masks = Masks(self._vocabulary.num_words)

    @classmethod
    def make(cls, build: Build) -> GrammarLogitsProcessor:
        """The processor that the call's setting asks for."""
        context = build.context
        values = build.value if build.is_per_row else [build.value]
        vocabulary = find_vocabulary(context.tokenizer, context.vocab_size)
        specials = list_specials(context.tokenizer)
        made: dict[int, Grammar | None] = {}
        for one in values:
            if id(one) not in made:
                source = read_source(build.setting, one, specials)
                made[id(one)] = None if source is None else compile_grammar(source, vocabulary)
        grammars = [made[id(one)] for one in values]
        return cls(grammars, build.first_free_column, build.eos)

    # --- the scores ----------------------------------------------------------------------------------
    def prepare(self, input_ids: torch.Tensor) -> None:
        """Read from a history what the next call needs, before the pass is under way that a copy would wait for."""
        self._early = (input_ids, self._find_step(input_ids))

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, logits: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The scores (rows, vocab), -inf for tokens that no text of the grammar goes on with.

        A readout such as DoLa's has left tokens out already. Where none of the others is allowed, the model's own
        `logits` choose among those that are.
        """
        if input_ids.shape[1] < self.first_column:
            return scores  # a forced beginning
        bits = self._fill(self._find_states(input_ids), pinned=scores.is_cuda)
        kept = keep_allowed(scores, bits)
        if logits is None:
            return kept
        is_empty = kept.isneginf().all(dim=-1, keepdim=True)
        return torch.where(is_empty, keep_allowed(logits, bits), kept) if bool(is_empty.any()) else kept

    def states_of(self, input_ids: torch.Tensor) -> list[State | None]:
        """The state of each row after its text, for who wants to know what is forced."""
        return self._find_states(input_ids) if input_ids.shape[1] >= self.first_column else [None] * len(input_ids)

    def _find_states(self, input_ids: torch.Tensor) -> list[State | None]:
        """Each row's state; None for a row without a grammar, or one that has ended."""
        early, self._early = self._early, None
        if early is not None and early[0].data_ptr() == input_ids.data_ptr() and early[0].shape == input_ids.shape:
            last = early[1]
        else:
            last = self._find_step(input_ids)
        states = None if last is None else self._states.step(last, self.ends)
        grammars = self._spread(len(input_ids))
        if states is None:
            rows = input_ids[:, self.first_column :].tolist()
            going = [
                None if any(token in self.ends for token in tokens) else grammar
                for grammar, tokens in zip(grammars, rows, strict=True)
            ]
            states = self._states.find(going, rows)
        self._states.remember(input_ids, grammars)
        return states

    def _spread(self, num_rows: int) -> list[Grammar | None]:
        """The grammar of each of so many rows."""
        return self.grammars if len(self.grammars) > 1 else self.grammars * num_rows

    def _find_step(self, now: torch.Tensor) -> list[int] | None:
        """The last column, if a history is the one seen last and a column more; else None."""
        if now.shape[1] <= self.first_column or not self._states.went_on(now, self._spread(len(now))):
            return None
        last: list[int] = now[:, -1].tolist()
        return last

    def _fill(self, states: Sequence[State | None], *, pinned: bool) -> torch.Tensor:
        """The masks (rows, words) of the rows' next tokens."""
        bits = self._masks.take(len(states), pinned=pinned)
        masks: np.ndarray[Any, np.dtype[np.int32]] = bits.numpy()
        firsts: dict[int, int] = {}  # where a state's mask is made first
        work = []
        for row, state in enumerate(states):
            if state is None:
                masks[row] = -1  # everything
            elif state.is_broken:
                masks[row] = 0
            elif id(state) not in firsts:
                firsts[id(state)] = row
                work.append((state.matcher, row))
        if len(work) > 1:
            require_library().numpy.fill_next_token_bitmask_par(_find_executor(), work, masks)
        elif work:
            require_library().numpy.fill_next_token_bitmask(work[0][0], masks, work[0][1])
        for row, state in enumerate(states):
            if state is None or id(state) not in firsts:
                continue
            if firsts[id(state)] == row:
                check_state(state)
                self._set_ends(masks[row])
            else:
                masks[row] = masks[firsts[id(state)]]
        return bits

    def _set_ends(self, mask: np.ndarray[Any, np.dtype[np.int32]]) -> None:
        """Allow the call's end tokens where the vocabulary's own is allowed, and no other end token."""
        bits = mask.view(np.uint32)
        own = self._vocabulary.ends
        if own == self.ends:
            return
        may_end = any(bits[token >> 5] >> np.uint32(token & 31) & 1 for token in own)
        for token in own:
            bits[token >> 5] &= ~np.uint32(1 << (token & 31))
        if may_end:
            for token in self.ends:
                bits[token >> 5] |= np.uint32(1 << (token & 31))

    def select_rows(self, index: torch.Tensor) -> GrammarLogitsProcessor:
        """The processor for the rows at `index`; the states are found again by the rows' tokens."""
        if len(self.grammars) == 1:
            return self
        chosen = copy.copy(self)
        chosen.grammars = [self.grammars[place] for place in index.tolist()]
        return chosen


class Masks:
    """Memory for masks, kept from step to step; a GPU's is pinned, and two take turns while copies are under way."""

    def __init__(self, num_words: int) -> None:
        self._num_words = num_words
        self._pinned: list[torch.Tensor] = []

    def take(self, num_rows: int, *, pinned: bool) -> torch.Tensor:
        """Masks (rows, words) that hold anything."""
        if not pinned:
            return torch.empty(num_rows, self._num_words, dtype=torch.int32)
        if not self._pinned or len(self._pinned[0]) < num_rows:
            # Pinning takes milliseconds, and waits for the device.
            shape = (num_rows, self._num_words)
            self._pinned = [torch.empty(shape, dtype=torch.int32, pin_memory=True) for _ in range(2)]
        self._pinned.reverse()
        return self._pinned[0][:num_rows]


@lru_cache(maxsize=1)
def _find_executor() -> Any:
    """Native threads that fill the masks of several rows."""
    return require_library().LLExecutor(min(count_threads(), _MOST_THREADS))

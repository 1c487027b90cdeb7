"""The processor that keeps rows to their grammars: a function of the visible tokens, like every processor."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

from unspool.errors import SettingError
from unspool.grammar.choosing import Chooser
from unspool.grammar.compiling import Grammar, compile_grammar
from unspool.grammar.masks import Foreseen, MaskMaker
from unspool.grammar.sources import read_source
from unspool.grammar.states import MatcherState, States
from unspool.grammar.vocabulary import find_vocabulary, list_specials
from unspool.kernels.masks import keep_allowed
from unspool.kernels.sending import send_beside
from unspool.logits.base import LogitsProcessor
from unspool.logits.building import Build
from unspool.logits.whisper import WhisperTimeStampLogitsProcessor
from unspool.wording import about


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
        logits: torch.Tensor | None = None,
        host_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The scores (rows, vocab), -inf for tokens that no text of the grammar goes on with.

        `host_ids` are the `input_ids` on the host. A readout such as DoLa's has left tokens out already. Where none of
        the others is allowed, the model's own `logits` choose among those that are.
        """
        if input_ids.shape[1] < self.first_column:
            return scores  # a forced beginning
        text = (input_ids.cpu() if host_ids is None else host_ids)[:, self.first_column :]
        bits = None if self._foreseen is None else self._foreseen.find(text)
        if bits is None:
            bits = _send(self._masks.make(self._find_states(text), pinned=scores.is_cuda), scores.device)
        kept = keep_allowed(scores, bits)
        if logits is None:
            return kept
        is_empty = kept.isneginf().all(dim=-1, keepdim=True)
        return torch.where(is_empty, keep_allowed(logits, bits), kept) if bool(is_empty.any()) else kept

    def states_of(self, host_ids: torch.Tensor) -> list[MatcherState | None]:
        """The state of each row after its text, for who wants to know what is forced."""
        if host_ids.shape[1] < self.first_column:
            return [None] * len(host_ids)
        return self._find_states(host_ids[:, self.first_column :])

    def start_choosing(self, host_ids: torch.Tensor) -> Chooser:
        """What chooses the next tokens of rows, greedily and step by step, after the tokens that they have."""
        states = self._states.find_own(self._spread(len(host_ids)), host_ids[:, self.first_column :], self.ends)
        return Chooser(states, self._masks, num_free=max(0, self.first_column - host_ids.shape[1]))

    def foresee(self, rows: Sequence[list[int]], drafts: Sequence[list[int]], device: torch.device) -> None:
        """Make the masks behind rows (their columns) and along what is drafted for them in one call; the calls for
        scores on `device` that follow find theirs there."""
        self._foreseen = None
        if any(len(row) < self.first_column for row in rows):
            return
        texts = [row[self.first_column :] for row in rows]
        states = self._states.find_apart(self._spread(len(rows)), texts, self.ends)
        bits, firsts = self._masks.make_along(states, drafts, pinned=device.type == "cuda")
        self._foreseen = Foreseen(texts, list(drafts), firsts, _send(bits, device))

    def _find_states(self, text: torch.Tensor) -> list[MatcherState | None]:
        return self._states.find(self._spread(len(text)), text, self.ends)

    def _spread(self, num_rows: int) -> list[Grammar | None]:
        """The grammar of each of so many rows."""
        return self.grammars if len(self.grammars) > 1 else self.grammars * num_rows

    def select_rows(self, index: torch.Tensor) -> GrammarLogitsProcessor:
        """The processor for the rows at `index`, which finds their states as this one does."""
        rows = index.tolist()
        chosen = copy.copy(self)
        chosen.grammars = [self.grammars[row] for row in rows] if len(self.grammars) > 1 else self.grammars
        chosen._states = self._states.select(rows)
        fits = self._foreseen is not None and max(rows, default=0) < len(self._foreseen.texts)
        chosen._foreseen = self._foreseen.select(rows) if self._foreseen is not None and fits else None
        return chosen


def _send(bits: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Masks where the scores are: beside the pass that they are waiting for, if that runs on a GPU."""
    return send_beside(bits, device) if device.type == "cuda" else bits.to(device)

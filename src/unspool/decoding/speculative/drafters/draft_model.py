"""Drafting with a model: a smaller one, or (early_exit.py) the model's own first layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence

import torch

from unspool.decoding.reader import Reader
from unspool.decoding.rows import Rows
from unspool.decoding.scorer import Scorer
from unspool.decoding.select import NO_TOKEN
from unspool.decoding.speculative.drafters.base import DRAFT_STREAM, Draft
from unspool.decoding.speculative.drafters.confidence import Confidence
from unspool.decoding.tails import choose_token
from unspool.kernels.sending import fetch


class ModelDrafter(ABC):
    """Guesses token after token with a model, under the same processors as the text itself.

    It takes the likeliest token where the call does, and draws where the call draws. A row's draft ends with an end
    token, or with a guess that the model is not sure of.
    """

    is_free = False

    def __init__(self, scorer: Scorer, *, do_sample: bool, confidence: Confidence, ends: Collection[int] = ()) -> None:
        self._scorer = scorer
        self._do_sample = do_sample
        self._confidence = confidence
        self._ends = frozenset(ends)
        self._probabilities: list[list[float]] = []  # of the last draft's tokens, one per row
        self._lengths: list[int] = []  # the rows', before it

    def propose(self, rows: Rows, limits: Sequence[int]) -> Draft:
        """Read what is new, and guess on from there."""
        self._lengths = list(rows.lengths)
        self._probabilities = [[] for _ in limits]
        guesses: list[list[int]] = [[] for _ in limits]
        places = [place for place, limit in enumerate(limits) if limit > 0]
        logits = self._begin(rows, places)
        columns, drawn_from = [], []
        while places:
            scores = self._scorer.score_places(rows, logits, places, whole=True)
            probabilities = torch.softmax(scores, dim=-1, dtype=torch.float32)
            numbers = rows.uniforms_from(rows.lengths, 1, DRAFT_STREAM)[:, 0] if self._do_sample else None
            chosen = choose_token(scores, numbers)
            if self._do_sample:
                drawn_from.append(probabilities)
            columns.append(chosen.clamp(min=0))
            places = self._take(chosen, probabilities, places, guesses, limits)
            if places:
                counts = [int(place in places) for place in range(len(limits))]
                rows.append(columns[-1][:, None], counts)
                logits = self._read(rows, places)
        rows.rewind(self._lengths)
        self._end()
        counts = [len(guess) for guess in guesses]
        if not any(counts):
            return Draft.empty(rows)
        return Draft(torch.stack(columns, dim=1), counts, torch.stack(drawn_from, dim=1) if drawn_from else None).cut(
            counts
        )

    def _take(
        self,
        chosen: torch.Tensor,
        probabilities: torch.Tensor,
        places: Sequence[int],
        guesses: list[list[int]],
        limits: Sequence[int],
    ) -> list[int]:
        """Write the guesses down; the places of the rows that guess on."""
        fetched = fetch(chosen), fetch(probabilities.gather(-1, chosen.clamp(min=0)[:, None]).squeeze(-1))
        tokens, sure = (part.read().tolist() for part in fetched)
        going = []
        for place, token in ((place, int(token)) for place, token in enumerate(tokens) if place in places):
            if token == NO_TOKEN:  # the processors leave it nothing: the model may see that otherwise
                continue
            guesses[place].append(token)
            self._probabilities[place].append(sure[place])
            is_full = len(guesses[place]) == limits[place] or token in self._ends
            if not is_full and self._confidence.is_enough(sure[place]):
                going.append(place)
        return going

    def observe(self, rows: Rows, draft: Draft, accepted: Sequence[int]) -> None:
        """Move the threshold by what was accepted."""
        if not any(draft.counts):
            return
        for place, count in enumerate(draft.counts):
            if count:
                num_new = rows.lengths[place] - self._lengths[place]
                was_refused = num_new > accepted[place] and accepted[place] < count
                self._confidence.learn(self._probabilities[place][:count], accepted[place], was_refused)

    @abstractmethod
    def keep_rows(self, index: Sequence[int]) -> None:
        """Follow the rows that stay."""

    @abstractmethod
    def _begin(self, rows: Rows, places: Sequence[int]) -> torch.Tensor:
        """Read what is new of the rows at `places`: logits (rows, vocab) for their next tokens."""

    @abstractmethod
    def _read(self, rows: Rows, places: Sequence[int]) -> torch.Tensor:
        """The same after the rows at `places` got a guess."""

    @abstractmethod
    def _end(self) -> None:
        """The draft is done, and the rows are as they were."""


class DraftModel(ModelDrafter):
    """A smaller model with the same tokens drafts, with a cache of its own kept in step."""

    def __init__(
        self,
        reader: Reader,
        scorer: Scorer,
        *,
        do_sample: bool,
        confidence: Confidence,
        ends: Collection[int] = (),
    ) -> None:
        super().__init__(scorer, do_sample=do_sample, confidence=confidence, ends=ends)
        self._reader = reader
        self._is_trying = False

    def propose(self, rows: Rows, limits: Sequence[int]) -> Draft:
        """Guess, as far as the draft model's own context goes."""
        longest = self._reader.model.info.max_context
        if longest is not None:
            limits = [max(0, min(n, longest - at)) for n, at in zip(limits, rows.lengths, strict=True)]
        return super().propose(rows, limits) if any(limits) else Draft.empty(rows)

    def _begin(self, rows: Rows, places: Sequence[int]) -> torch.Tensor:
        logits = self._read(rows, places)
        self._reader.begin_trial()  # from here on it reads guesses
        self._is_trying = True
        return logits

    def _read(self, rows: Rows, places: Sequence[int]) -> torch.Tensor:
        return self._reader.read_places(rows, places)

    def _end(self) -> None:
        pass  # what was read stays until it is known how much of it is right

    def observe(self, rows: Rows, draft: Draft, accepted: Sequence[int]) -> None:
        """Forget the guesses that were refused."""
        super().observe(rows, draft, accepted)
        if self._is_trying:
            self._reader.settle(rows)
            self._is_trying = False

    def keep_rows(self, index: Sequence[int]) -> None:
        """Let the cache follow the rows that stay."""
        self._reader.keep_rows(index)

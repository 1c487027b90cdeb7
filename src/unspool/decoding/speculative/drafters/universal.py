"""Drafting with a model of another tokenizer, through text: the guesses are re-encoded, and checked like any others."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from unspool.decoding.rows import Rows
from unspool.decoding.speculative.drafters.base import Draft
from unspool.decoding.speculative.drafters.confidence import Confidence
from unspool.decoding.speculative.drafters.draft_rows import DraftRows
from unspool.decoding.speculative.drafters.translation import Translation
from unspool.decoding.speculative.drafters.vocabulary import Vocabulary


class UniversalDraft:
    """Takes the likeliest tokens of a draft model that reads the rows in tokens of its own.

    Nothing is known of how likely the re-encoded guesses are, and nothing needs to be: a guess stays where it is what
    the model chooses. Processors speak of the model's tokens, so the draft model guesses without them.
    """

    is_free = False

    def __init__(
        self, rows: DraftRows, vocabulary: Vocabulary, translate: Callable[[], Translation], confidence: Confidence
    ) -> None:
        self._rows = rows
        self._plain = vocabulary.plain
        self._confidence = confidence
        self._translations = [translate() for _ in range(len(rows))]
        self._probabilities: list[list[float]] = [[] for _ in range(len(rows))]  # of the last guesses

    def propose(self, rows: Rows, limits: Sequence[int]) -> Draft:
        """Retell what is new, guess on from there, and put the guesses into the model's tokens."""
        places = [place for place, limit in enumerate(limits) if limit > 0]
        self._follow(rows, places)
        ids = [translation.ids for translation in self._translations]
        most = [min(limit, self._rows.find_room(len(own))) for limit, own in zip(limits, ids, strict=True)]
        places = [place for place in places if most[place] > 0]
        while places:
            logits = self._rows.read(ids, places)
            sure, chosen = (each.tolist() for each in torch.softmax(logits, dim=-1).max(dim=-1))
            for place in places:
                ids[place].append(chosen[place])
                self._probabilities[place].append(sure[place])
            places = [place for place in places if self._goes_on(place, most[place])]
        guesses = [
            translation.express()[:limit] if limit > 0 else []
            for translation, limit in zip(self._translations, limits, strict=True)
        ]
        return Draft.of(guesses, rows.device)

    def _goes_on(self, place: int, most: int) -> bool:
        sure = self._probabilities[place]
        is_text = self._translations[place].ids[-1] in self._plain
        return is_text and len(sure) < most and self._confidence.is_enough(sure[-1])

    def _follow(self, rows: Rows, places: Sequence[int]) -> None:
        """Bring the draft model's rows up to date, and learn how its last guesses fared."""
        unchanged = {}
        for place in places:
            translation, sure = self._translations[place], self._probabilities[place]
            num_before = translation.num_encoded
            kept = translation.follow(rows.tokens_from(place, translation.num_tokens))
            num_right = min(len(sure), max(0, kept - num_before))
            if sure:
                self._confidence.learn(sure, num_right, is_next_wrong=len(translation.ids) > kept)
            self._probabilities[place] = []
            unchanged[place] = min(kept, len(translation.ids) - 1)  # the last is read for what follows it
        self._rows.forget(unchanged)

    def observe(self, rows: Rows, draft: Draft, accepted: Sequence[int]) -> None:
        """Nothing: what became of the guesses is seen in the text, when it is retold."""

    def keep_rows(self, index: Sequence[int]) -> None:
        """Follow the rows that stay."""
        self._rows.keep_rows(index)
        self._translations = [self._translations[place] for place in index]
        self._probabilities = [self._probabilities[place] for place in index]

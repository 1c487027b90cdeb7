"""Drafting with a model of another tokenizer in the tokens that both have (Timor et al., 2025, arXiv 2502.05202)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from unspool.decoding.rows import Rows
from unspool.decoding.scorer import Scorer
from unspool.decoding.speculative.drafters.alignment import join_text
from unspool.decoding.speculative.drafters.base import Draft
from unspool.decoding.speculative.drafters.confidence import Confidence
from unspool.decoding.speculative.drafters.draft_model import ModelDrafter
from unspool.decoding.speculative.drafters.draft_rows import DraftRows
from unspool.decoding.speculative.drafters.translation import Translation
from unspool.decoding.speculative.drafters.vocabulary import Vocabularies


class SharedText:
    """One row in the draft model's tokens, token by token if both have them, otherwise through text."""

    def __init__(self, vocabularies: Vocabularies) -> None:
        self._both = vocabularies
        pairs = (*vocabularies.common.items(), *vocabularies.common_special.items())
        self._drafts = {own: draft for draft, own in pairs}
        self._unfinished = b""  # bytes of a character that no token of the draft model's stands for yet
        self.ids: list[int] = []
        self.num_tokens = 0

    def follow(self, tokens: Sequence[int]) -> None:
        """Add the row's new tokens; a prompt is encoded by the draft model's tokenizer, if that is another."""
        is_prompt = self.num_tokens == 0
        self.num_tokens += len(tokens)
        if is_prompt and self._both.relation == "other":
            prompt = Translation(self._both, target_lookbehind=1, assistant_lookbehind=1)
            prompt.follow(tokens)
            self.ids = prompt.ids
            return
        for token in tokens:
            if token in self._both.own.special:
                self._unfinished = b""
            draft = None if self._unfinished else self._drafts.get(token)
            if draft is not None:
                self.ids.append(draft)
            elif token not in self._both.own.special:
                self._encode(self._both.own.read([token])[0])

    @property
    def is_whole(self) -> bool:
        """Whether no character of the text is unfinished."""
        return not self._unfinished

    def _encode(self, piece: bytes) -> None:
        text, is_whole = join_text([self._unfinished, piece])
        self._unfinished = b"" if is_whole else self._unfinished + piece
        if is_whole:
            self.ids += self._both.drafts.encode(text)

    def guess(self, token: int) -> None:
        """Add a guess, one of the model's tokens."""
        self.ids.append(self._drafts[token])

    def take_back(self, num_ids: int, num_tokens: int) -> None:
        """Forget what came after so many tokens."""
        del self.ids[num_ids:]
        self.num_tokens = num_tokens


class SharedVocabulary(ModelDrafter):
    """A draft model's distribution over the tokens that both vocabularies have, under the model's numbers.

    Tokens that only one has are never guessed; the check makes up for that, as for any other distribution.
    """

    def __init__(
        self,
        rows: DraftRows,
        vocabularies: Vocabularies,
        scorer: Scorer,
        *,
        do_sample: bool,
        confidence: Confidence,
        ends: Collection[int] = (),
    ) -> None:
        special = vocabularies.own.special
        super().__init__(scorer, do_sample=do_sample, confidence=confidence, ends=frozenset(ends) | special)
        self._rows = rows
        self._texts = [SharedText(vocabularies) for _ in range(len(rows))]
        self._begun: dict[int, tuple[int, int]] = {}  # by place, the text's lengths before the guesses
        self._num_tokens = vocabularies.own.num_tokens
        pairs = [*vocabularies.common.items(), *vocabularies.common_special.items()]
        drafts, own = zip(*pairs, strict=True)
        self._draft_index = torch.tensor(drafts, device=scorer.reader.model.device)  # (common,): its numbers
        self._own_index = torch.tensor(own, device=scorer.reader.model.device)  # (common,): the model's

    def propose(self, rows: Rows, limits: Sequence[int]) -> Draft:
        """Guess, as far as the draft model's own context goes."""
        self._begun = {}
        unchanged = {}
        for place, limit in enumerate(limits):
            if limit > 0:
                text = self._texts[place]
                num_held = len(text.ids)
                text.follow(rows.tokens_from(place, text.num_tokens))
                self._begun[place] = (len(text.ids), text.num_tokens)
                unchanged[place] = max(0, min(num_held, len(text.ids) - 1))  # the last is read for what follows it
        self._rows.forget(unchanged)
        rooms = [self._rows.find_room(len(text.ids)) if text.is_whole else 0 for text in self._texts]
        limits = [min(limit, room) for limit, room in zip(limits, rooms, strict=True)]
        return super().propose(rows, limits) if any(limits) else Draft.empty(rows)

    def _begin(self, rows: Rows, places: Sequence[int]) -> torch.Tensor:  # noqa: ARG002 - the texts have read them
        return self._score(places)

    def _read(self, rows: Rows, places: Sequence[int]) -> torch.Tensor:
        for place in places:
            self._texts[place].guess(rows.tokens_from(place, rows.lengths[place] - 1)[0])
        return self._score(places)

    def _score(self, places: Sequence[int]) -> torch.Tensor:
        """The draft model's logits under the model's numbers: (rows, vocab); nothing if only one has a token."""
        logits = self._rows.read([text.ids for text in self._texts], places)
        scores = logits.new_full((logits.shape[0], self._num_tokens), -torch.inf)
        scores[:, self._own_index] = logits[:, self._draft_index]
        return scores

    def _end(self) -> None:
        pass  # what was read stays until it is known how much of it is right

    def observe(self, rows: Rows, draft: Draft, accepted: Sequence[int]) -> None:
        """Forget the guesses that were refused."""
        super().observe(rows, draft, accepted)
        for place, (num_ids, num_tokens) in self._begun.items():
            text = self._texts[place]
            num_right = min(accepted[place], len(text.ids) - num_ids)
            text.take_back(num_ids + num_right, num_tokens + num_right)
        self._begun = {}

    def keep_rows(self, index: Sequence[int]) -> None:
        """Follow the rows that stay."""
        self._rows.keep_rows(index)
        self._texts = [self._texts[place] for place in index]

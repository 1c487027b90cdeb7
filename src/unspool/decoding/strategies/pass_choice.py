"""What chooses the tokens of steps that are launched together: the end of each pass, on the device."""

from __future__ import annotations

from dataclasses import replace

import torch

from unspool.decoding.rows import Rows
from unspool.decoding.scorer import Scorer
from unspool.decoding.tails import DescribedDraw, describe_draw
from unspool.kernels.sending import send
from unspool.kernels.token_choice import ChoiceSizes, TokenChoice
from unspool.logits.fused import FusedTail


class PassChoices:
    """Makes the choices of a call's steps; what stays the same is made once, so that the device has it already."""

    def __init__(self, scorer: Scorer, *, do_sample: bool) -> None:
        self._scorer, self._do_sample = scorer, do_sample
        self._drawn: tuple[FusedTail | None, int, DescribedDraw | None] | None = None  # by what, for how many rows: how
        self._masks: dict[tuple[int, ...], torch.Tensor] = {}  # by the tokens that are forbidden
        self._last: TokenChoice | None = None

    def count(self, rows: Rows, num_steps: int) -> int:
        """How many of the next steps passes can choose, all in the same way."""
        scorer, whole = self._scorer, not self._do_sample
        forbidden = scorer.find_forbidden(rows, whole=whole)
        if forbidden is None or (self._do_sample and self._find_draw(rows) is None):
            return 0
        if not scorer.divide(whole=whole)[0]:
            return num_steps
        ahead = range(1, num_steps)
        return next((n for n in ahead if scorer.find_forbidden(rows, whole=whole, ahead=n) != forbidden), num_steps)

    def make(self, rows: Rows) -> TokenChoice | None:
        """How these steps choose; None: they take the likeliest tokens."""
        forbidden = self._scorer.find_forbidden(rows, whole=not self._do_sample)
        assert forbidden is not None
        found = self._find_draw(rows) if self._do_sample else (ChoiceSizes(), {})
        assert found is not None
        if not self._do_sample and not forbidden:
            return None
        sizes, settings = found
        mask = self._find_mask(forbidden, rows.device) if forbidden else None
        seeds = rows.seeds if self._do_sample else None
        last = self._last
        if last is None or last.seeds is not seeds or last.settings is not settings or last.mask is not mask:
            sizes = replace(sizes, is_masked=mask is not None)
            self._last = last = TokenChoice(sizes, seeds, settings, mask)
        return last

    def _find_draw(self, rows: Rows) -> DescribedDraw | None:
        tail, known = self._scorer.tail, self._drawn
        if known is None or known[0] is not tail or known[1] != len(rows):
            self._drawn = known = (tail, len(rows), describe_draw(tail, len(rows), rows.device))
        return known[2]

    def _find_mask(self, forbidden: tuple[int, ...], device: torch.device) -> torch.Tensor:
        mask = self._masks.get(forbidden)
        if mask is None:
            vocab = self._scorer.reader.model.info.vocab_size
            inside = send([token for token in forbidden if 0 <= token < vocab], device)
            mask = torch.zeros(vocab, dtype=torch.bool, device=device).index_fill_(0, inside, True)
            self._masks[forbidden] = mask
        return mask

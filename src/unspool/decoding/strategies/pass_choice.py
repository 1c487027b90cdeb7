"""What chooses the tokens of steps that are launched together: the end of each pass, on the device."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import torch

from unspool.decoding.forbidden import ForbiddenMasks
from unspool.decoding.rows import Rows
from unspool.decoding.scorer import Scorer
from unspool.decoding.tails import DescribedDraw, describe_draw
from unspool.kernels.token_choice import ChoiceSizes, TokenChoice
from unspool.logits.fused import FusedTail

_NO_SETTINGS: Final[dict[str, torch.Tensor]] = {}  # of a choice without a draw


class PassChoices:
    """Makes the choices of a call's steps; what stays the same is made once, so that the device has it already."""

    def __init__(self, scorer: Scorer, *, do_sample: bool) -> None:
        self._scorer, self._do_sample = scorer, do_sample
        self._drawn: tuple[FusedTail | None, int, DescribedDraw | None] | None = None  # by what, for how many rows: how
        self._masks = ForbiddenMasks(scorer.reader.model.info.vocab_size)
        self._last: TokenChoice | None = None

    def find(self, rows: Rows, num_steps: int) -> tuple[int, TokenChoice | None]:
        """How many of the next steps passes can choose, all in the same way, and how; None: by the likeliest tokens."""
        whole = not self._do_sample
        num_steps, forbidden = self._scorer.find_forbidden_ahead(rows, num_steps, whole=whole)
        found: DescribedDraw | None = (ChoiceSizes(), _NO_SETTINGS) if whole else self._find_draw(rows)
        if forbidden is None or found is None:
            return 0, None
        return num_steps, self._make(rows, forbidden, found) if forbidden or self._do_sample else None

    def _make(self, rows: Rows, forbidden: tuple[int, ...], found: DescribedDraw) -> TokenChoice:
        sizes, settings = found
        mask = self._masks.find(forbidden, rows.device) if forbidden else None
        seeds = rows.seeds if self._do_sample else None
        last = self._last
        if last is None or last.seeds is not seeds or last.settings is not settings or last.mask is not mask:
            self._last = last = TokenChoice(replace(sizes, is_masked=mask is not None), seeds, settings, mask)
        return last

    def _find_draw(self, rows: Rows) -> DescribedDraw | None:
        tail, known = self._scorer.tail, self._drawn
        if known is None or known[0] is not tail or known[1] != len(rows):
            self._drawn = known = (tail, len(rows), describe_draw(tail, len(rows), rows.device))
        return known[2]

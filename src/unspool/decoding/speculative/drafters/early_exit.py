"""Early exit: the model's first layers and its own head draft (Elhoushi et al., 2024, arXiv 2404.16710)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from unspool.cache import ROLL_BACK
from unspool.decoding.reader import Reader
from unspool.decoding.rows import Rows
from unspool.decoding.scorer import Scorer
from unspool.decoding.speculative.drafters.confidence import Confidence
from unspool.decoding.speculative.drafters.draft_model import ModelDrafter
from unspool.errors import UnsupportedError
from unspool.protocols import Want


class EarlyExit(ModelDrafter):
    """Drafts with the model's first layers, in the model's own cache.

    The first layers' keys of the text are there already. What a draft writes after them is taken back, and the pass
    that checks the draft writes it again, in all layers.
    """

    def __init__(
        self, scorer: Scorer, exit_layer: int, *, do_sample: bool, confidence: Confidence, ends: Collection[int] = ()
    ) -> None:
        super().__init__(scorer, do_sample=do_sample, confidence=confidence, ends=ends)
        own = scorer.reader  # drafts are passes of their own, which the call's figures don't count
        self._reader = Reader(own.model, own.cache, want=Want(exit_layer=exit_layer), answer=own.answer)
        self._held: list[int] = []

    def _begin(self, rows: Rows, places: Sequence[int]) -> torch.Tensor:
        self._held = list(self._reader.cache.lengths)
        return self._read(rows, places)

    def _read(self, rows: Rows, places: Sequence[int]) -> torch.Tensor:
        return self._reader.read_places(rows, places)

    def _end(self) -> None:
        self._reader.cache.truncate(self._held)

    def keep_rows(self, index: Sequence[int]) -> None:
        """Nothing to follow: the cache is the model's, and moves with its rows."""


def check_shared_cache(can: Collection[str], name: str) -> None:
    """Raise for a cache that can't be lent to a drafter."""
    if ROLL_BACK not in can:
        raise UnsupportedError(
            f"`assistant_early_exit` drafts in the model's own cache and takes the drafts back, which a {name} can't; "
            "use cache_implementation='dynamic', or prompt_lookup_num_tokens"
        )

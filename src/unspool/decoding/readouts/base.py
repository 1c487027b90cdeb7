"""How a forward pass becomes logits: what it reads, and what the processors are given of what it returned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from unspool.decoding.observer import Observer
from unspool.decoding.rows import Rows
from unspool.kernels.ranks import log_probabilities
from unspool.logits.fused import FusedTail
from unspool.protocols import Forward, Want


@dataclass(slots=True)
class Scores:
    """A step's logits (rows, vocab), float32: the model's own, and what has become of them so far."""

    logits: torch.Tensor
    scores: torch.Tensor  # as the readout gives them to the processors; later as the processors left them
    likeliest: torch.Tensor | None = None  # (rows,): the first token of the highest score, if the model found it
    epilogue: Any = None  # what followed the pass, if no processor has changed the scores
    tail: FusedTail | None = None  # processors that have not run, because the draw can do their work


class Readout:
    """The plain readout: rows are read once, and processors are given the last layer's logits.

    DoLa and guidance override what they change; reader and scorer know no more of them than this.
    """

    num_sets = 1  # rows of the cache for each row of the call; those of the call itself come first
    is_plain = True  # it knows nothing of single rows
    cuts = False  # it may take tokens out, down to one
    needs_every_row = False  # rows that are done must stay, because others' scores depend on them
    observer: Observer | None = None  # is shown what the readout made the logits from

    def widen(self, want: Want) -> Want:
        """What a pass must return besides."""
        return want

    def longest_prompt(self, rows: Sequence[int]) -> int:
        """Positions of the longest prompt among the `rows` (their lengths) and what is read beside them."""
        return max(rows)

    def unread(self, rows: Rows, held: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
        """Tokens after the first `held` positions of every row of the cache, right-filled, and how many they are."""
        return rows.unread(held)

    def select_rows(self, index: Sequence[int]) -> None:
        """Follow rows of the call that are repeated or stay."""

    def forget(self, num_steps: int) -> None:
        """Undo the last steps."""

    def admit(self, others: Sequence[Any], firsts: Sequence[int]) -> None:
        """Take in the rows of other readouts that differ in nothing but those, after these; their row 0 has the number
        in `firsts` from now on."""

    def read(self, forward: Forward, rows: Rows, *, normalise: bool) -> Scores:
        """The logits of a pass for the call's rows; with `normalise` log-probabilities are given, as beams need,
        unless something followed the pass."""
        logits = forward.logits.float()
        if normalise and forward.epilogue is None:
            return Scores(logits, log_probabilities(logits))
        return Scores(logits, logits, forward.likeliest, forward.epilogue)

    def result(self, emitted: Sequence[Sequence[int]]) -> dict[str, Any]:
        """Fields that it adds to the output, given each row's new tokens."""
        return {}

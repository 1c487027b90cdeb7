"""How a forward pass becomes logits: what it reads, and what the processors are given of what it returned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unspool.decoding.rows import Rows
from unspool.kernels.contests import Won
from unspool.protocols import Forward, Want


@dataclass(slots=True)
class Reading:
    """A step's logits (rows, vocab), float32: the model's own, and what the processors are given instead."""

    logits: torch.Tensor
    given: torch.Tensor
    likeliest: torch.Tensor | None = None  # (rows,): of the highest score given, where the model found it on its way
    won: Won | None = None  # how a contest of candidates ended in the pass


class Readout:
    """The plain readout: rows are read once, and processors are given the last layer's logits.

    DoLa and guidance override what they change; the one step knows no more of them than this.
    """

    num_sets = 1  # rows of the cache for each row of the call; those of the call itself come first

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

    def read(self, forward: Forward, rows: Rows, *, normalise: bool) -> Reading:  # noqa: ARG002 - others need them
        """The logits of a pass for the call's rows; with `normalise` log-probabilities are given, as beams need."""
        logits = forward.logits.float()
        if normalise:
            return Reading(logits, torch.log_softmax(logits, dim=-1))
        return Reading(logits, logits, forward.likeliest, forward.won)

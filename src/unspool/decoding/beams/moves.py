"""What the rows of a beam search go on with."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Moves(NamedTuple):
    """What rows go on with."""

    parents: list[int]  # the row that each goes on from
    tokens: torch.Tensor  # (rows,): its next token
    sources: torch.Tensor | None = None  # (rows,): the parents where the rows are, if they are known there


class MovedTokens(NamedTuple):
    """What rows go on with, where they are."""

    parents: torch.Tensor  # (rows,)
    column: torch.Tensor  # (rows, 1)

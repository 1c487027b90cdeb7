"""What decoding reports while it runs, to the one observer of a call; where there is none, nothing is made.

An observed call takes its steps one at a time, over whole vocabularies, with every processor run by itself: fast paths
that keep scores to themselves are left (`Record.keeps_any`). Its tokens are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from unspool.decoding.loop import Emitted


@dataclass(frozen=True, slots=True)
class ProcessorStep:
    """One processor's work on the scores (rows, vocab)."""

    processor: Any
    before: torch.Tensor
    after: torch.Tensor


@dataclass(frozen=True, slots=True)
class Scored:
    """The scores (rows, vocab) of every row's next token; a strategy chooses from `scores`."""

    logits: torch.Tensor  # the model's own
    given: torch.Tensor  # as the readout gave them to the processors
    scores: torch.Tensor  # as the processors left them
    steps: Sequence[ProcessorStep]


@dataclass(frozen=True, slots=True)
class LayersContrasted:
    """DoLa's layers at one step, reported before the scores that it made."""

    layers: Sequence[int]
    early: torch.Tensor  # (layers, rows, vocab): their logits
    divergences: torch.Tensor  # (layers, rows): from the last layer
    chosen: torch.Tensor  # (rows,): places among the layers


@dataclass(frozen=True, slots=True)
class Guided:
    """Guidance at one step, reported before the scores that it made: (rows, vocab) each."""

    own: torch.Tensor  # logits after the prompt
    other: torch.Tensor  # logits after the negative prompt
    guided: torch.Tensor  # log-probabilities, not normalised again


@dataclass(frozen=True, slots=True)
class CandidatesCompared:
    """Contrastive search's candidates at one step: (rows, candidates) each, the likeliest first."""

    tokens: torch.Tensor
    weights: torch.Tensor  # probabilities; -inf where one may not be taken
    likeness: torch.Tensor  # the highest cosine with a state of the past
    alpha: float
    chosen: torch.Tensor  # (rows,): places among the candidates


@dataclass(frozen=True, slots=True)
class TokenChosen:
    """The token that was chosen from the scores just reported, if a turn reports scores of several positions."""

    token: int


@dataclass(frozen=True, slots=True)
class DraftChecked:
    """A row's draft, and how many of its tokens were accepted, reported after the scores that judged it."""

    tokens: Sequence[int]
    num_accepted: int


class Observer(Protocol):
    """Is shown what happens in a call of one prompt. Tensors are the call's own: they may be read, and not be kept."""

    def see(self, report: Any) -> None:
        """Called with each report of a turn, in order: those above, and a beam trace's `TraceStep` and `Returned`."""
        ...

    def sum_up(self, emitted: Emitted) -> Any:
        """Called after each turn; what it returns goes with what the turn emitted (`Emitted.seen`)."""
        ...

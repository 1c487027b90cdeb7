"""Mirostat: a cut that is steered towards a target surprise."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch

from unspool.logits.base import LogitsProcessor
from unspool.logits.rows import Numbers, RowValues, as_positive_float, in_range

INF = float("inf")


@dataclass(frozen=True)
class MirostatState:
    """What a step leaves for the next: the cut it used, and the log-probabilities that were drawn from."""

    width: int  # columns of the history it was for
    cut: torch.Tensor  # (rows, 1), in bits
    logprobs: torch.Tensor  # (rows, vocab), natural, after the cut


class MirostatLogitsWarper(LogitsProcessor):
    """Mirostat v2: drops tokens more surprising than a cut that follows the surprise of what was drawn.

    Basu et al. 2020, arXiv 2007.14966; v2 as in llama.cpp. The target `tau` is in bits. It remembers the last
    step, recognises the same step when asked again, and starts anew with another history.
    """

    remembers_steps = True

    def __init__(self, tau: Numbers = 5.0, eta: Numbers = 0.1, filter_value: float = -INF) -> None:
        self.filter_value = filter_value
        self._tau = RowValues.read("mirostat_tau", tau, as_positive_float("mirostat_tau"))
        self._eta = RowValues.read("mirostat_eta", eta, in_range("mirostat_eta", 0, with_low=False))
        self._state: MirostatState | None = None

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores with all that is too surprising set to `filter_value`."""
        cut = self._find_cut(input_ids, scores)
        logprobs = scores.log_softmax(dim=-1)
        is_dropped = -logprobs > cut * math.log(2)  # (rows, vocab)
        highest = scores.amax(dim=-1, keepdim=True)
        result = scores.masked_fill(is_dropped & (scores < highest), self.filter_value)
        self._state = MirostatState(input_ids.shape[-1], cut, result.log_softmax(dim=-1))
        return result

    def _find_cut(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        tau, state = self._tau.column(scores), self._state
        width, rows = input_ids.shape[-1], scores.shape[0]
        if state is not None and state.cut.shape[0] == rows:
            if width == state.width:
                return state.cut
            if width == state.width + 1:
                surprise = -state.logprobs.gather(-1, input_ids[:, -1:]) / math.log(2)  # (rows, 1), in bits
                # A row that was forced past the cut has no finite surprise: it moves nothing.
                error = torch.where(surprise.isfinite(), surprise - tau, 0.0)
                return state.cut - self._eta.column(scores) * error
        return (2 * tau).expand(rows, 1)

    def select_rows(self, index: torch.Tensor) -> LogitsProcessor:
        """The processor for the rows at `index`, with what it remembers of them."""
        chosen = copy.copy(self)
        chosen._tau, chosen._eta = self._tau.select(index), self._eta.select(index)
        state = self._state
        if state is not None:
            at = index.to(state.cut.device)
            chosen._state = MirostatState(state.width, state.cut[at], state.logprobs[at])
        return chosen

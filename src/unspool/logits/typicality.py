"""Processors that cut by probability and entropy: typical, epsilon, eta and top-H sampling."""

from __future__ import annotations

from typing import Any, Literal

import torch

from unspool.kernels.presence import takes_kernels
from unspool.logits.base import LogitsProcessor
from unspool.logits.highest import take_highest
from unspool.logits.rows import Numbers, RowValues, as_positive_integer, holds_rows, in_range
from unspool.logits.temperature import exact_dtype

INF = float("inf")
NEAREST = 8_192  # tokens that typical sampling sorts before it sorts all
CutKind = Literal["epsilon", "eta"]
TOP_H_TOKENS = 100  # among how many of the likeliest top-H chooses, as in the reference


class TypicalLogitsWarper(LogitsProcessor):
    """Keeps the tokens whose surprise is nearest to the entropy, up to a mass (Meister et al. 2022, arXiv 2202.00666).

    With one mass a row, 1.0 leaves that row as it is.
    """

    counts_columns = False

    def __init__(self, mass: Numbers = 0.9, filter_value: float = -INF, min_tokens_to_keep: int = 1) -> None:
        self.filter_value = filter_value
        self.min_tokens_to_keep = as_positive_integer("min_tokens_to_keep", min_tokens_to_keep)
        neutral = 1.0 if holds_rows(mass) else None
        check = in_range("typical_p", 0, 1, with_low=False, with_high=False, neutral=neutral)
        self._values = RowValues.read("typical_p", mass, check)
        self._mass = self._values.map(lambda values: values.masked_fill(values == 1, 2.0))  # never reached

    @property
    def mass(self) -> Any:
        """The probability to reach, or a tensor with one per row."""
        return self._values.given

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores with all that is untypical set to `filter_value`."""
        if self.min_tokens_to_keep == 1 and takes_kernels(scores):
            from unspool.kernels.gpu.sampling.nearest import cut_beyond  # Triton is imported where a GPU is used

            return cut_beyond(scores, self.column(scores), "typical", self.filter_value)
        logprobs = scores.log_softmax(dim=-1)  # (rows, vocab)
        probabilities = logprobs.exp()
        entropy = torch.special.entr(probabilities).sum(dim=-1, keepdim=True)  # (rows, 1)
        distance = (-logprobs - entropy).abs()  # (rows, vocab), infinite for what is impossible
        # On a CPU a look at the numbers is free: most rows reach their mass among the nearest few.
        vocab = scores.shape[-1]
        sizes = [NEAREST, vocab] if scores.device.type == "cpu" and vocab >= 4 * NEAREST else [vocab]
        for size in sizes:
            nearest, order = distance.sort(dim=-1) if size == vocab else distance.topk(size, largest=False)
            reached = probabilities.gather(-1, order).cumsum(dim=-1)
            last = (reached < self._mass.column(scores)).sum(dim=-1, keepdim=True)  # (rows, 1)
            if size == vocab or bool((last < size).all()):
                break
        is_far = distance > nearest.gather(-1, last.clamp(max=size - 1))
        if self.min_tokens_to_keep > 1:
            is_far = is_far.scatter(-1, order[:, : self.min_tokens_to_keep], False)
        return scores.masked_fill(is_far, self.filter_value)

    def column(self, scores: torch.Tensor) -> torch.Tensor:
        """What is to be reached, 2 if nothing is cut: (rows, 1), or (1, 1) for all rows."""
        return self._mass.column(scores)


class EpsilonLogitsWarper(LogitsProcessor):
    """Keeps tokens with at least a probability of epsilon (Hewitt et al. 2022, arXiv 2210.15191).

    With one epsilon a row, 0 leaves that row as it is.
    """

    counts_columns = False

    _name = "epsilon_cutoff"
    _kind: CutKind = "epsilon"

    def __init__(self, epsilon: Numbers, filter_value: float = -INF, min_tokens_to_keep: int = 1) -> None:
        self.filter_value = filter_value
        self.min_tokens_to_keep = as_positive_integer("min_tokens_to_keep", min_tokens_to_keep)
        neutral = 0.0 if holds_rows(epsilon) else None
        check = in_range(self._name, 0, 1, with_low=False, with_high=False, neutral=neutral)
        self._values = RowValues.read(self._name, epsilon, check)
        self._log = self._values.map(torch.log)

    @property
    def epsilon(self) -> Any:
        """The lowest probability that is kept, or a tensor with one per row."""
        return self._values.given

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores with all that is too unlikely set to `filter_value`."""
        if self.min_tokens_to_keep == 1 and takes_kernels(scores):
            from unspool.kernels.gpu.sampling.cuts import cut_below  # Triton is imported where a GPU is used

            return cut_below(scores, self.column(scores), self._kind, self.filter_value)
        exact = exact_dtype(scores)
        floor = self._find_floor(scores.to(exact))  # (rows, 1), as a log-probability
        threshold = floor + torch.logsumexp(scores.to(exact), dim=-1, keepdim=True)
        few = min(self.min_tokens_to_keep, scores.shape[-1])
        highest = scores.amax(-1, keepdim=True) if few == 1 else torch.topk(scores, few).values[:, -1:]
        return scores.masked_fill(scores < torch.minimum(threshold, highest.to(exact)), self.filter_value)

    def column(self, scores: torch.Tensor) -> torch.Tensor:
        """The logarithm of epsilon: (rows, 1), or (1, 1) for all rows."""
        return self._log.column(scores)

    def _find_floor(self, scores: torch.Tensor) -> torch.Tensor:
        return self.column(scores)


class EtaLogitsWarper(EpsilonLogitsWarper):
    """Keeps tokens above a floor that falls with the entropy (Hewitt et al. 2022, arXiv 2210.15191).

    With one epsilon a row, 0 leaves that row as it is.
    """

    _name = "eta_cutoff"
    _kind = "eta"

    def __init__(
        self, epsilon: Numbers, filter_value: float = -INF, min_tokens_to_keep: int = 1, device: Any = "cpu"
    ) -> None:
        super().__init__(epsilon, filter_value, min_tokens_to_keep)
        self.device = torch.device(device)  # as the reference takes it; values follow the scores anyway

    def _find_floor(self, scores: torch.Tensor) -> torch.Tensor:
        entropy = torch.special.entr(scores.softmax(dim=-1)).sum(dim=-1, keepdim=True)  # (rows, 1)
        log = self.column(scores)
        return torch.minimum(log, log / 2 - entropy)


class TopHLogitsWarper(LogitsProcessor):
    """Keeps the likeliest tokens that hold a share of the entropy (Potraghloo et al. 2025, arXiv 2509.02510)."""

    counts_columns = False

    def __init__(self, top_h: Numbers, filter_value: float = -INF) -> None:
        self.filter_value = filter_value
        self._values = RowValues.read("top_h", top_h, in_range("top_h", 0, 1, with_low=False))

    @property
    def top_h(self) -> Any:
        """The share of the entropy, or a tensor with one per row."""
        return self._values.given

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores with all but the head of each row set to `filter_value`."""
        values, tokens = take_highest(scores, min(TOP_H_TOKENS, scores.shape[-1]))  # (rows, head)
        probs = values.softmax(dim=-1)
        parts = torch.special.entr(probs).cumsum(dim=-1)  # each token's part of the entropy, added up
        is_kept = (parts <= parts[:, -1:] * self._values.column(scores)) & (probs > 0)
        is_kept[:, 0] = True
        kept = values.masked_fill(~is_kept, self.filter_value)
        return torch.full_like(scores, self.filter_value).scatter_(-1, tokens, kept)

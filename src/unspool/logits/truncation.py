"""Processors that leave only part of the vocabulary."""

from __future__ import annotations

import copy

import torch

from unspool.errors import SettingError
from unspool.logits.base import LogitsProcessor
from unspool.logits.rows import Numbers, RowValues, as_finite_float, as_positive_integer, holds_rows


class TopKLogitsWarper(LogitsProcessor):
    """Keeps the k highest scores, and those that tie with the k-th (Fan et al. 2018, arXiv 1805.04833).

    With one k a row, 0 leaves that row as it is.
    """

    def __init__(self, top_k: Numbers, filter_value: float = float("-inf"), min_tokens_to_keep: int = 1) -> None:
        fewest = as_positive_integer("min_tokens_to_keep", min_tokens_to_keep)
        is_per_row = holds_rows(top_k)

        def check(value: float) -> int:
            k = as_positive_integer("top_k", value, at_least=0 if is_per_row else 1)
            return max(k, fewest) if k else 0

        self.filter_value = filter_value
        self.min_tokens_to_keep = min_tokens_to_keep
        self._values = RowValues.read("top_k", top_k, check)
        self._largest = int(self._values.values.max())
        self.top_k = self._values.values if is_per_row else self._largest

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """The scores with all but the top k of each row set to `filter_value`."""
        vocab = scores.shape[-1]
        highest = torch.topk(scores, min(max(self._largest, 1), vocab)).values  # (rows, largest k)
        if self._values.is_per_row:
            k = self._values.column(scores, torch.int64)  # (rows, 1)
            threshold = highest.gather(-1, (k - 1).clamp(0, highest.shape[-1] - 1))  # (rows, 1)
            threshold = threshold.masked_fill(k == 0, float("-inf"))
        else:
            threshold = highest[..., -1:]
        return scores.masked_fill(scores < threshold, self.filter_value)

    def select_rows(self, index: torch.Tensor) -> LogitsProcessor:
        """The processor for the rows at `index`."""
        if not self._values.is_per_row:
            return self
        chosen = copy.copy(self)
        chosen._values = self._values.select(index)
        # The largest k stays, though these rows may need less: to know costs a look at the device.
        chosen.top_k = chosen._values.values
        return chosen


class TopPLogitsWarper(LogitsProcessor):
    """Keeps the fewest highest scores whose probability reaches p (Holtzman et al. 2019, arXiv 1904.09751).

    With one p a row, 1.0 leaves that row as it is.
    """

    def __init__(self, top_p: Numbers, filter_value: float = float("-inf"), min_tokens_to_keep: int = 1) -> None:
        self.top_p = top_p
        self.filter_value = filter_value
        self.min_tokens_to_keep = as_positive_integer("min_tokens_to_keep", min_tokens_to_keep)
        is_per_row = holds_rows(top_p)

        def check(value: float) -> float:
            p = as_finite_float("top_p", value)
            if not 0 <= p <= 1:
                raise SettingError(f"`top_p` has to be a float from 0 to 1, but is {value}.")
            # What is kept is the probability that may be dropped; none can be below -1.
            return -1.0 if is_per_row and p == 1 else 1 - p

        self._dropped = RowValues.read("top_p", top_p, check)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """The scores with the tail of each row set to `filter_value`."""
        ordered, positions = torch.sort(scores, descending=False)  # (rows, vocab), lowest first
        below = ordered.softmax(dim=-1).cumsum(dim=-1)  # (rows, vocab), the probability up to and with each
        is_tail = below <= self._dropped.column(scores, scores.dtype)
        is_tail[..., -self.min_tokens_to_keep :] = False
        return scores.masked_fill(is_tail.scatter(-1, positions, is_tail), self.filter_value)

    def select_rows(self, index: torch.Tensor) -> LogitsProcessor:
        """The processor for the rows at `index`."""
        if not self._dropped.is_per_row:
            return self
        chosen = copy.copy(self)
        chosen._dropped = self._dropped.select(index)
        chosen.top_p = (1 - chosen._dropped.values).clamp(max=1.0)
        return chosen

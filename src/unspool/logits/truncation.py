"""Processors that leave only the likeliest part of the vocabulary."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any, ClassVar, cast

import torch

from unspool.errors import SettingError
from unspool.kernels.presence import takes_kernels
from unspool.logits.base import Joining, LogitsProcessor
from unspool.logits.highest import take_highest
from unspool.logits.rows import Numbers, RowValues, as_finite_float, as_positive_integer, holds_rows, in_range
from unspool.logits.temperature import exact_dtype
from unspool.wording import about

INF = float("inf")
EDGE = 1e-6  # of probability: what lies nearer to where a head ends is left to a sort
ALMOST_ALL = 0.9999  # beyond it, rounding decides where the head ends
HEAD = 256  # tokens among which the end of a top-p head is looked for first
NUM_BINS, BINNED_RANGE = 4_096, 32.0  # of the histogram for longer heads, which reaches so far below the highest score
LARGEST_BIN = 512


class TopKLogitsWarper(LogitsProcessor):
    """Keeps the k highest scores, and those that tie with the k-th (Fan et al. 2018, arXiv 1805.04833).

    With one k a row, 0 leaves that row as it is.
    """

    counts_columns = False
    joined_by: ClassVar[Joining] = MappingProxyType({"largest": max})

    def __init__(self, top_k: Numbers, filter_value: float = -INF, min_tokens_to_keep: int = 1) -> None:
        fewest = as_positive_integer("min_tokens_to_keep", min_tokens_to_keep)
        is_per_row = holds_rows(top_k)

        def check(value: Any) -> int:
            k = as_positive_integer("top_k", value, at_least=0 if is_per_row else 1)
            return max(k, fewest) if k else 0

        self.filter_value = filter_value
        self.min_tokens_to_keep = min_tokens_to_keep
        self._values = RowValues.read("top_k", top_k, check)
        # Stays when rows leave, though those that stay may need less: to know costs a look at the device.
        self.largest = int(self._values.values.max())
        self.leaves_rows_whole = bool((self._values.values == 0).any())

    @property
    def top_k(self) -> Any:
        """How many are kept, or a tensor with one number per row."""
        return self._values.given

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores with all but the top k of each row set to `filter_value`."""
        if takes_kernels(scores):
            from unspool.kernels.gpu.sampling.nearest import cut_beyond  # Triton is imported where a GPU is used

            return cut_beyond(scores, self.column(scores), "top_k", self.filter_value)
        highest, _ = take_highest(scores, min(max(self.largest, 1), scores.shape[-1]))  # (rows, largest k)
        return scores.masked_fill(scores < self.find_threshold(scores, highest), self.filter_value)

    def find_threshold(self, scores: torch.Tensor, highest: torch.Tensor) -> torch.Tensor:
        """Each row's k-th score (rows, 1), out of its highest ones in falling order."""
        if not self._values.is_per_row:
            return highest[:, min(self.largest, highest.shape[-1]) - 1, None]
        k = self.column(scores)
        threshold = highest.gather(-1, (k - 1).clamp(0, highest.shape[-1] - 1))
        return threshold.masked_fill(k == 0, -INF)

    def column(self, scores: torch.Tensor) -> torch.Tensor:
        """How many scores are kept: (rows, 1), or (1, 1) for all rows."""
        return self._values.column(scores, torch.int64)


class TopPLogitsWarper(LogitsProcessor):
    """Keeps the fewest highest scores whose probability reaches p (Holtzman et al. 2019, arXiv 1904.09751).

    With one p a row, 1.0 leaves that row as it is.
    """

    counts_columns = False

    def __init__(self, top_p: Numbers, filter_value: float = -INF, min_tokens_to_keep: int = 1) -> None:
        self.filter_value = filter_value
        self.min_tokens_to_keep = as_positive_integer("min_tokens_to_keep", min_tokens_to_keep)
        is_per_row = holds_rows(top_p)

        def check(value: Any) -> float:
            p = as_finite_float("top_p", value)
            if not 0 <= p <= 1:
                raise SettingError(about("top_p", f"has to be a float from 0 to 1, but is {value}."))
            return p

        self._values = RowValues.read("top_p", top_p, check)
        # What must be reached by the tokens above one for it to go; a row that is left as it is never reaches 2.
        self._reached = self._values.map(lambda p: p.masked_fill(p == 1, 2.0) if is_per_row else p)
        self._dropped = self._reached.map(lambda p: 1 - p)
        self._needs_few = self.min_tokens_to_keep > 1 or bool((self._reached.values == 0).any())

    @property
    def top_p(self) -> Any:
        """The probability to reach, or a tensor with one per row."""
        return self._values.given

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores with the tail of each row set to `filter_value`."""
        if scores.device.type == "cpu" and scores.dtype == torch.float32 and scores.shape[-1] >= 4 * HEAD:
            return self._cut_without_sorting(scores)
        if self.min_tokens_to_keep == 1 and takes_kernels(scores):
            from unspool.kernels.gpu.sampling.nearest import cut_beyond  # Triton is imported where a GPU is used

            return cut_beyond(scores, self.column(scores), "top_p", self.filter_value)
        return self._cut_sorted(scores)

    def _cut_sorted(self, scores: torch.Tensor) -> torch.Tensor:
        """The plain way: sort everything, and drop what the lowest add up to."""
        # Stable, so that which of equals goes (the last) depends on nothing else.
        ordered, positions = torch.sort(scores, descending=True, stable=True)  # (rows, vocab), highest first
        below = ordered.flip(-1).softmax(dim=-1).cumsum(dim=-1)  # the probability from the lowest up to each
        is_tail = (below <= self._dropped.column(scores)).flip(-1)
        is_tail[:, : self.min_tokens_to_keep] = False
        return scores.masked_fill(is_tail.scatter(-1, positions, is_tail), self.filter_value)

    def _cut_without_sorting(self, scores: torch.Tensor) -> torch.Tensor:
        """The same on a CPU, where a look at the numbers is free and sorting a vocabulary is slow."""
        result, is_open = self._cut_head(scores)
        for cut in (self._cut_binned, None):
            if not bool(is_open.any()):
                return result
            rows = torch.nonzero(is_open).squeeze(-1)
            these = cast(TopPLogitsWarper, self.select_rows(rows))
            if cut is None or self._needs_few:
                result[rows] = these._cut_sorted(scores[rows])
                return result
            result[rows], is_open[rows] = these._cut_binned(scores[rows])
        return result

    def _cut_head(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The result for rows whose head ends among the highest few, and the rows (rows,) where it does not."""
        values, tokens = take_highest(scores, HEAD)  # (rows, head)
        whole = torch.logsumexp(scores, dim=-1, keepdim=True)  # (rows, 1)
        values, tokens = order_ties(values, tokens)
        is_kept, is_open = self._find_kept_surely((values - whole).exp())
        # The end of the head must lie inside, with all that ties with it: a sort would drop the last of equals.
        lowest = values.masked_fill(~is_kept, INF).amin(dim=-1)  # (rows,)
        is_open |= is_kept[:, -1] | (lowest == values[:, -1]) | ~lowest.isfinite()
        is_open |= self.column(scores)[:, 0] > ALMOST_ALL
        kept = values.masked_fill(~is_kept, self.filter_value)
        return torch.full_like(scores, self.filter_value).scatter_(-1, tokens, kept), is_open

    def _cut_binned(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The result by a histogram: only the bin that the head ends in is sorted. And the rows where it can't be."""
        below = scores.amax(dim=-1, keepdim=True) - scores  # (rows, vocab)
        # What is no number as an integer differs from machine to machine: it goes to the last bin.
        bins = (below * (NUM_BINS / BINNED_RANGE)).nan_to_num_(NUM_BINS - 1).clamp_(max=NUM_BINS - 1).long()
        probabilities = scores.softmax(dim=-1)
        mass = torch.zeros(scores.shape[0], NUM_BINS).scatter_add_(-1, bins, probabilities)
        reached = mass.cumsum(dim=-1, dtype=torch.float64)  # (rows, bins)
        wanted = self.column(scores)
        last = (reached < wanted).sum(dim=-1, keepdim=True).clamp(max=NUM_BINS - 1)  # (rows, 1)
        is_last = bins == last
        values, tokens = take_highest(torch.where(is_last, scores, -INF), LARGEST_BIN)
        values, tokens = order_ties(values, tokens)
        own = probabilities.gather(-1, tokens).masked_fill(values == -INF, 0.0)
        before = reached.gather(-1, last) - mass.gather(-1, last)
        passed = before + own.cumsum(dim=-1, dtype=torch.float64) - own
        is_kept, is_near = passed < wanted, ((passed - wanted).abs() < EDGE).any(dim=-1)
        result = torch.where(bins < last, scores, self.filter_value)
        kept = torch.where(is_kept, values, self.filter_value)
        result.scatter_(-1, tokens, torch.where(values > -INF, kept, result.gather(-1, tokens)))
        is_open = is_near | (is_last.sum(dim=-1) > LARGEST_BIN) | (last == NUM_BINS - 1).squeeze(-1)
        is_open |= reached[:, -1].isnan()
        return result, is_open | (wanted > ALMOST_ALL).squeeze(-1)

    def _find_kept_surely(self, probabilities: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`find_kept`, and the rows (rows,) where what is added up comes so near that rounding decides: equals do."""
        reached = probabilities.cumsum(dim=-1, dtype=torch.float64) - probabilities
        is_near = ((reached - self.column(probabilities)).abs() < EDGE)[:, 1:].any(dim=-1)
        return self.find_kept(probabilities), is_near

    def find_kept(self, probabilities: torch.Tensor) -> torch.Tensor:
        """Which of a row's tokens, likeliest first, make up its head: (rows, tokens)."""
        reached = probabilities.cumsum(dim=-1, dtype=torch.float64) - probabilities
        is_kept = reached < self.column(probabilities)
        if self._needs_few:
            is_kept[:, : self.min_tokens_to_keep] = True
        return is_kept

    def column(self, scores: torch.Tensor) -> torch.Tensor:
        """What the tokens above one must reach for it to go, float64: (rows, 1), or (1, 1) for all rows."""
        return self._reached.column(scores, torch.float64)


class MinPLogitsWarper(LogitsProcessor):
    """Keeps tokens at least `min_p` times as likely as the likeliest (Nguyen et al. 2024, arXiv 2407.01082)."""

    counts_columns = False

    def __init__(self, min_p: Numbers, filter_value: float = -INF, min_tokens_to_keep: int = 1) -> None:
        self.filter_value = filter_value
        self.min_tokens_to_keep = as_positive_integer("min_tokens_to_keep", min_tokens_to_keep)
        self._values = RowValues.read("min_p", min_p, in_range("min_p", 0, 1))
        self._below = self._values.map(torch.log)

    @property
    def min_p(self) -> Any:
        """The share of the likeliest token's probability, or a tensor with one per row."""
        return self._values.given

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores with all that is too unlikely set to `filter_value`."""
        if self.min_tokens_to_keep == 1 and takes_kernels(scores):
            return _cut_below(scores, self.column(scores), "min_p", self.filter_value)
        # A ratio of probabilities is a difference of scores: no softmax is needed.
        is_low = scores < self.find_threshold(scores)
        if self.min_tokens_to_keep > 1:
            few = torch.topk(scores, min(self.min_tokens_to_keep, scores.shape[-1])).indices
            is_low = is_low.scatter(-1, few, False)
        return scores.masked_fill(is_low, self.filter_value)

    def find_threshold(self, scores: torch.Tensor) -> torch.Tensor:
        """The lowest score that is kept: (rows, 1)."""
        return scores.amax(dim=-1, keepdim=True).to(exact_dtype(scores)) + self.column(scores)

    def column(self, scores: torch.Tensor) -> torch.Tensor:
        """How far below the highest score the lowest kept one lies, as a sum: (rows, 1), or (1, 1) for all rows."""
        return self._below.column(scores, exact_dtype(scores))


class TopALogitsWarper(LogitsProcessor):
    """Keeps tokens with at least `top_a` times the square of the likeliest's probability (KoboldAI's top-a)."""

    counts_columns = False

    def __init__(self, top_a: Numbers, filter_value: float = -INF) -> None:
        self.filter_value = filter_value
        self._values = RowValues.read("top_a", top_a, in_range("top_a", 0, 1))
        self._below = self._values.map(torch.log)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores with all that is too unlikely set to `filter_value`."""
        exact = exact_dtype(scores)
        if takes_kernels(scores):
            return _cut_below(scores, self.column(scores), "top_a", self.filter_value)
        highest = scores.amax(dim=-1, keepdim=True).to(exact)
        whole = torch.logsumexp(scores.to(exact), dim=-1, keepdim=True)
        threshold = 2 * highest - whole + self.column(scores)  # (rows, 1)
        return scores.masked_fill(scores < threshold, self.filter_value)

    def column(self, scores: torch.Tensor) -> torch.Tensor:
        """The logarithm of the share: (rows, 1), or (1, 1) for all rows."""
        return self._below.column(scores, exact_dtype(scores))


class TopNSigmaLogitsWarper(LogitsProcessor):
    """Keeps scores within n standard deviations of the highest (Tang et al. 2024, arXiv 2411.07641).

    Only the scores that are still possible count; with one n a row, 0 leaves that row as it is.
    """

    counts_columns = False

    def __init__(self, top_n_sigma: Numbers, filter_value: float = -INF) -> None:
        self.filter_value = filter_value
        neutral = 0.0 if holds_rows(top_n_sigma) else None
        check = in_range("top_n_sigma", 0, with_low=False, neutral=neutral)
        self._values = RowValues.read("top_n_sigma", top_n_sigma, check)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores with all that is too low set to `filter_value`."""
        exact = exact_dtype(scores)
        n = self._values.column(scores, exact)
        if takes_kernels(scores):
            return _cut_below(scores, n, "sigma", self.filter_value)
        is_possible = scores > -INF
        values = scores.to(exact).masked_fill(~is_possible, 0.0)
        num_possible = is_possible.sum(dim=-1, keepdim=True).clamp(min=1)
        mean = values.sum(dim=-1, keepdim=True) / num_possible
        deviations = (values - mean).masked_fill(~is_possible, 0.0)
        sigma = (deviations.square().sum(dim=-1, keepdim=True) / num_possible).sqrt()  # (rows, 1)
        threshold = scores.amax(dim=-1, keepdim=True).to(exact) - n * sigma
        return scores.masked_fill(scores < threshold.masked_fill(n == 0, -INF), self.filter_value)


def _cut_below(scores: torch.Tensor, values: torch.Tensor, kind: str, filler: float) -> torch.Tensor:
    """The same in two kernels."""
    from unspool.kernels.gpu.sampling.cuts import cut_below  # Triton is imported where a GPU is used

    return cut_below(scores, values, kind, filler)


def order_ties(values: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Highest first, and of equals the earlier token first: the order of a stable sort of everything."""
    tokens, places = tokens.sort(dim=-1)
    values, order = values.gather(-1, places).sort(dim=-1, descending=True, stable=True)
    return values, tokens.gather(-1, order)

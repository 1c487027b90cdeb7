"""What a text says about a mark, token by token: one scorer for each watermark.

A scorer gives every token a value that marked text has more of, and knows which distribution sums of it have in text
without the mark, if each n-gram (or context) is counted once: over keys, values of different ones are independent.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from unspool.config import (
    BaseWatermarkingConfig,
    GumbelWatermarkingConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from unspool.errors import UnsupportedError
from unspool.watermark.green_list import WatermarkLogitsProcessor
from unspool.watermark.gumbel import GumbelWatermarkLogitsProcessor
from unspool.watermark.statistics import binomial_tail, gamma_tail, normal_tail
from unspool.watermark.synthid import INCREMENT, MULTIPLIER, SynthIDTextWatermarkLogitsProcessor
from unspool.watermark.tournament import find_shifts

Array = npt.NDArray[np.float64]
HEAVIEST, LIGHTEST = 10.0, 1.0  # weights of the first and the last round, as in SynthID-Text's paper


@dataclass(frozen=True)
class Evidence:
    """One text's tokens: where scoring begins, each one's value, and whether it is the first of its kind."""

    first: int
    values: Array  # (tokens - first,)
    is_new: npt.NDArray[np.bool_]  # whether the n-gram or context stands here for the first time
    is_independent: npt.NDArray[np.bool_]  # whether no token before has its value by the same chance
    is_marked_side: npt.NDArray[np.bool_]  # green, or what stands for it


class MarkScorer(ABC):
    """One watermark's way to value tokens."""

    num_before: int  # tokens that are needed before the first that can be scored
    threshold: float  # above it, a value is on the marked side
    mean: float  # of a value in unmarked text
    deviation: float

    @abstractmethod
    def value(self, contexts: torch.Tensor, tokens: torch.Tensor) -> Array:
        """The values of tokens (n,) after contexts (n, tokens before)."""

    @abstractmethod
    def tail(self, totals: Array, counts: Array) -> Array:
        """The probability that unmarked text has at least such totals of so many new tokens."""

    def standardise(self, totals: Array, counts: Array) -> Array:
        """How many standard deviations totals lie above what unmarked text has; 0 if nothing was counted."""
        spread = self.deviation * np.sqrt(np.maximum(counts, 1))
        return np.where(counts > 0, (totals - self.mean * counts) / spread, 0.0)

    def list_kinds(self, windows: torch.Tensor) -> list[tuple[int, ...]]:
        """What is counted once if repeats are left out, for windows (n, tokens before and one): contexts."""
        return list(map(tuple, windows[:, :-1].tolist()))

    def list_chances(self, windows: torch.Tensor) -> list[tuple[int, ...]]:
        """What the values of windows' last tokens are decided by, beside the key: equal ones are one chance."""
        return self.list_kinds(windows)

    def read(self, tokens: Sequence[int]) -> Evidence:
        """The evidence of a text that has at least one token to score."""
        first, ids = self.num_before, torch.tensor(list(tokens))
        windows = ids.unfold(0, first + 1, 1)  # (scored, first + 1)
        found, places = np.unique(windows.numpy(), axis=0, return_inverse=True)
        ngrams = torch.from_numpy(found)
        values = self.value(ngrams[:, :-1], ngrams[:, -1])[places.reshape(-1)]
        is_new, is_independent = _find_new(self.list_kinds(windows)), _find_new(self.list_chances(windows))
        return Evidence(first, values, is_new, is_independent, values > self.threshold)


class GreenScorer(MarkScorer):
    """1 for a token on its green list. Tokens of one list are nearly independent, so n-grams are counted."""

    def __init__(self, mark: WatermarkLogitsProcessor, ratio: float, most_cached: int = 0) -> None:
        self.mark = mark
        self.num_before = mark.context_width - mark.is_self_seeded
        self.rate = mark.greenlist_size / mark.vocab_size
        self.threshold, self.mean = 0.5, ratio
        self.deviation = math.sqrt(ratio * (1 - ratio))
        self._most_cached = most_cached
        self._cache: dict[tuple[int, ...], float] = {}

    def value(self, contexts: torch.Tensor, tokens: torch.Tensor) -> Array:
        """1 or 0; the last few n-grams are remembered."""
        windows = torch.cat((contexts, tokens[:, None]), dim=1)
        keys = list(map(tuple, windows.tolist()))
        missing = [place for place, key in enumerate(keys) if key not in self._cache]
        if missing:
            is_green = self.mark.are_green(self._take_contexts(windows[missing]), tokens[missing]).tolist()
            self._cache.update({keys[place]: float(green) for place, green in zip(missing, is_green, strict=True)})
        values = np.array([self._cache[key] for key in keys])
        for key in list(self._cache)[: max(0, len(self._cache) - self._most_cached)]:
            del self._cache[key]
        return values

    def list_kinds(self, windows: torch.Tensor) -> list[tuple[int, ...]]:
        """N-grams, as the reference counts them."""
        return list(map(tuple, windows.tolist()))

    def list_chances(self, windows: torch.Tensor) -> list[tuple[int, ...]]:
        """A list's seed and the token. Many n-grams have one seed: `lefthash` looks at the last token of a context,
        and `selfhash` at the one of the least product, which often is the token itself."""
        seeds = self.mark.find_seeds(self._take_contexts(windows))
        return list(zip(seeds.tolist(), windows[:, -1].tolist(), strict=True))

    def _take_contexts(self, windows: torch.Tensor) -> torch.Tensor:
        """What chooses the lists of windows' last tokens."""
        return windows if self.mark.is_self_seeded else windows[:, :-1]

    def tail(self, totals: Array, counts: Array) -> Array:
        """Exact: a binomial count."""
        return binomial_tail(totals, counts, self.rate)


class GumbelScorer(MarkScorer):
    """`-log` of the token's noise: the winner's is small, and in unmarked text the value is exponential."""

    mean = deviation = 1.0
    threshold = math.log(2)

    def __init__(self, mark: GumbelWatermarkLogitsProcessor) -> None:
        self.mark = mark
        self.num_before = mark.context_width

    def value(self, contexts: torch.Tensor, tokens: torch.Tensor) -> Array:
        """Surprise of the noise."""
        noise = self.mark.draw_noise(self.mark.hash_contexts(contexts), tokens)
        values: Array = -noise.log().numpy()
        return values

    def tail(self, totals: Array, counts: Array) -> Array:
        """Exact: a sum of exponential numbers has a gamma distribution."""
        return gamma_tail(totals, counts)


class SynthIDScorer(MarkScorer):
    """The mean of a token's g-values, the first rounds' weighing more if asked for."""

    def __init__(self, mark: SynthIDTextWatermarkLogitsProcessor, *, is_weighted: bool = True) -> None:
        self.mark = mark
        self.num_before = mark.ngram_len - 1
        self.weights = weigh_rounds(mark.depth) if is_weighted else torch.full((mark.depth,), 1 / mark.depth)
        self.mean, self.deviation = self._find_moments()
        self.threshold = self.mean

    def value(self, contexts: torch.Tensor, tokens: torch.Tensor) -> Array:
        """The weighted mean of the g-values."""
        ngrams = torch.cat((contexts, tokens[:, None]), dim=1)[None]
        bits = self.mark.sample_g_values(self.mark.compute_ngram_keys(ngrams))[0]
        values: Array = (bits.double() @ self.weights.double()).numpy()
        return values

    def tail(self, totals: Array, counts: Array) -> Array:
        """A sum of many bits, which is nearly normal."""
        return normal_tail(self.standardise(totals, counts))

    def _find_moments(self) -> tuple[float, float]:
        """Mean and deviation of a value in unmarked text, over all places of the table: its bits are not quite fair."""
        table, size = self.mark.sampling_table.double(), len(self.mark.sampling_table)
        rate = float(table.mean())
        if size & (size - 1):  # no shifts of one table: the rounds' bits are nearly independent
            return rate, math.sqrt(rate * (1 - rate) * float((self.weights**2).sum()))
        shifts = find_shifts(self.mark.keys, size, MULTIPLIER, INCREMENT).tolist()
        sums = torch.zeros(size, dtype=torch.float64)
        for shift, weight in zip(shifts, self.weights.tolist(), strict=True):
            sums += weight * table.roll(-shift)
        return float(sums.mean()), float(sums.std(correction=0))


def _find_new(kinds: Sequence[tuple[int, ...]]) -> npt.NDArray[np.bool_]:
    """Which are not among those before them."""
    first_at = {kind: place for place, kind in reversed(list(enumerate(kinds)))}
    return np.array([first_at[kind] == place for place, kind in enumerate(kinds)])


def weigh_rounds(depth: int) -> torch.Tensor:
    """Weights of the rounds (depth,), falling and with a sum of 1: later rounds have less to choose from."""
    weights = torch.linspace(HEAVIEST, LIGHTEST, depth)
    return weights / weights.sum()


def make_scorer(config: BaseWatermarkingConfig, vocab_size: int, most_cached: int = 0) -> MarkScorer:
    """The scorer of a watermark's settings."""
    mark: Any = config.construct_processor(vocab_size, "cpu")
    if isinstance(config, WatermarkingConfig):
        return GreenScorer(mark, config.greenlist_ratio, most_cached)
    if isinstance(config, GumbelWatermarkingConfig):
        return GumbelScorer(mark)
    if isinstance(config, SynthIDTextWatermarkingConfig):
        return SynthIDScorer(mark)
    raise UnsupportedError(f"no detector knows {type(config).__name__}")

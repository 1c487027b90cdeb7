"""Tails of the distributions that counts and sums have in unmarked text, exact, without scipy."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch


def binomial_tail(
    successes: npt.NDArray[np.float64], trials: npt.NDArray[np.float64], rate: float
) -> npt.NDArray[np.float64]:
    """The probability of at least so many successes in so many trials."""
    return np.array([_tail_of_binomial(int(k), int(n), rate) for k, n in zip(successes, trials, strict=True)])


def gamma_tail(totals: npt.NDArray[np.float64], counts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The probability that as many exponential numbers of mean 1 sum to at least this much."""
    shape, total = torch.from_numpy(np.maximum(counts, 1.0)), torch.from_numpy(totals)
    tail: npt.NDArray[np.float64] = torch.special.gammaincc(shape, total).numpy()
    return np.where(counts > 0, tail, 1.0)


def normal_tail(z: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The probability of a standard normal number of at least z."""
    return np.array([0.5 * math.erfc(float(one) / math.sqrt(2)) for one in z])


def _tail_of_binomial(successes: int, trials: int, rate: float) -> float:
    if successes <= 0:
        return 1.0
    counts = np.arange(successes, trials + 1)
    logs = [
        math.lgamma(trials + 1) - math.lgamma(k + 1) - math.lgamma(trials - k + 1) for k in (int(one) for one in counts)
    ]
    terms = np.array(logs) + counts * math.log(rate) + (trials - counts) * math.log1p(-rate)
    return float(min(1.0, np.exp(terms).sum())) if len(terms) else 0.0

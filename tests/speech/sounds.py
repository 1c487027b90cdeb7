"""Sounds for tests."""

from __future__ import annotations

import numpy as np

from unspool.speech.resample import Resampler


def resample(samples: np.ndarray, rate_in: int, rate_out: int) -> np.ndarray:
    """A whole sound at another rate."""
    resampler = Resampler(rate_in, rate_out)
    return np.concatenate((resampler.push(samples.astype(np.float32)), resampler.finish()))

"""`set_seed`: every random source at once."""

from __future__ import annotations

import random

import numpy as np
import torch

from unspool.errors import SettingError


def set_seed(seed: int, deterministic: bool = False) -> None:
    """Seed Python's, numpy's and torch's generators, from which calls without a `seed` draw theirs."""
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**32:
        raise SettingError(f"set_seed({seed!r:.40}) is not a whole number from 0 to {2**32 - 1}")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    if deterministic:
        torch.use_deterministic_algorithms(True)

"""Is this a number that can be computed with? The one check for numbers that come from outside."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, TypeGuard


def is_number(value: Any, *, allows_infinity: bool = False) -> TypeGuard[float]:
    """Whether a value is a real number that a float can hold; a bool, NaN and 10**400 are none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        number = float(value)
    except OverflowError:  # an int beyond the largest float
        return False
    return not math.isnan(number) if allows_infinity else math.isfinite(number)

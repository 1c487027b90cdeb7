"""Is this a number that can be computed with, or a token's? The checks of numbers that come from outside."""

from __future__ import annotations

import math
from numbers import Real
from typing import Any, Final, TypeGuard

LARGEST_TOKEN_ID: Final = 2**31 - 1


def is_number(value: Any, *, allows_infinity: bool = False) -> TypeGuard[float]:
    """Whether a value is a real number that a float can hold; a bool, NaN and 10**400 are none."""
    if isinstance(value, bool) or not isinstance(value, Real):
        return False
    try:
        number = float(value)
    except OverflowError:  # an int beyond the largest float
        return False
    return not math.isnan(number) if allows_infinity else math.isfinite(number)


def is_whole(value: Any) -> TypeGuard[int]:
    """Whether a value is an int; a bool is none."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_token_id(value: Any) -> TypeGuard[int]:
    """Whether a value can be the id of a token, of whatever vocabulary; a bool is none."""
    return is_whole(value) and 0 <= value <= LARGEST_TOKEN_ID


def to_plain(value: Any) -> Any:
    """Numbers and arrays of numpy and torch as Python's numbers and lists; anything else as it is."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, (list, tuple)) and value and hasattr(value[0], "tolist"):
        return [to_plain(one) for one in value]
    return value

"""What the compressor is given, bounded before any model runs."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Final

from unspool.errors import InputError, SettingError, excerpt

MOST_CHARACTERS: Final = 1 << 24  # of all texts of a call
MOST_CONTEXTS: Final = 1 << 16
MOST_TOKENS: Final = 1 << 24

_BUDGET = re.compile(r"([-+*/])\s{0,16}(\d{1,12}(?:\.\d{1,12})?)")


def read_contexts(context: Any) -> list[str]:
    """The contexts of a call: a text, or a list of texts; never the caller's own list."""
    if not context:
        return [" "]  # as the package has it
    texts = [context] if isinstance(context, str) else context
    if not isinstance(texts, list | tuple):
        raise InputError(f"`context` is a text or a list of texts, not a {type(context).__name__}")
    if len(texts) > MOST_CONTEXTS:
        raise InputError(f"{len(texts)} contexts in one call; at most {MOST_CONTEXTS} are taken")
    for place, text in enumerate(texts):
        if not isinstance(text, str):
            raise InputError(f"`context` holds a {type(text).__name__} at place {place}; it takes texts")
    check_size(texts)
    return list(texts)


def check_size(texts: Sequence[str]) -> None:
    """Raise for more characters than a call takes."""
    total = sum(map(len, texts))
    if total > MOST_CHARACTERS:
        raise InputError(f"the texts have {total} characters; at most {MOST_CHARACTERS} are compressed in one call")


def check_text(name: str, value: Any) -> str:
    """A text that is given by name."""
    if not isinstance(value, str):
        raise InputError(f"`{name}` is a text, not a {type(value).__name__}")
    check_size([value])
    return value


def check_number(name: str, value: Any, least: float, most: float) -> float:
    """A number within bounds; NaN is in none."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or not least <= value <= most:
        raise SettingError(f"`{name}`={excerpt(value)} must be a number from {least:g} to {most:g}")
    return float(value)


def check_count(name: str, value: Any, least: int, most: int = MOST_TOKENS) -> int:
    """A whole number within bounds."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise SettingError(f"`{name}`={excerpt(value)} must be a whole number from {least} to {most}")
    return value


def check_switch(name: str, value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise SettingError(f"`{name}`={excerpt(value)} is neither True nor False")
    return value


def check_choice(name: str, value: Any, choices: Sequence[str]) -> str:
    """One of several names."""
    if value not in choices:
        raise SettingError(f"`{name}`={excerpt(value)} is not known; use one of {', '.join(map(repr, choices))}")
    return str(value)


def check_target(value: Any, name: str = "target_token") -> float:
    """A number of tokens to come down to; -1: none was asked for."""
    if value == -1 and not isinstance(value, bool):
        return -1
    return check_number(name, value, 0, MOST_TOKENS)


def read_budget(budget: Any, target: float) -> float:
    """What a budget such as "+100" or "*1.5" makes of a target: an operator and a number, and never an expression."""
    found = _BUDGET.fullmatch(budget.strip()) if isinstance(budget, str) else None
    if found is None:
        raise SettingError(
            f"`context_budget`={excerpt(budget)} must be an operator and a number, as '+100', '-30', '*1.5' or '/2'"
        )
    number = float(found[2])
    if found[1] == "+":
        return target + number
    if found[1] == "-":
        return target - number
    if found[1] == "*":
        return target * number
    if number == 0:
        raise SettingError("`context_budget` divides by 0; give another number")
    return target / number


def read_ids(name: str, ids: Any, count: int) -> list[int]:
    """Places of contexts, in a list of our own."""
    if ids is None:
        return []
    if not isinstance(ids, list | tuple) or len(ids) > MOST_CONTEXTS:
        raise SettingError(f"`{name}`={excerpt(ids)} must be a list of at most {MOST_CONTEXTS} places of contexts")
    for place in ids:
        if isinstance(place, bool) or not isinstance(place, int) or not 0 <= place < count:
            raise SettingError(f"`{name}` names context {excerpt(place)}, and there are {count}, counted from 0")
    return list(ids)

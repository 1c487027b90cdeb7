"""Reading plain values that came from a file: every number, list and text bounded, NaN refused."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Literal

from unspool.errors import InputError

LARGEST_JSON = 256 << 20  # characters
LONGEST_TEXT = 64


def read_json(text: str | bytes) -> Any:
    """The value of a JSON text."""
    if len(text) > LARGEST_JSON:
        raise InputError(f"the JSON has {len(text)} characters; at most {LARGEST_JSON} are read")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"this is not JSON: {error}") from error


class Fields:
    """An object's fields, each read with its bounds; what is not as it should be is an InputError."""

    def __init__(self, values: Any, what: str) -> None:
        if not isinstance(values, Mapping):
            raise InputError(f"{what} must be an object, but is a {type(values).__name__}")
        self._values, self._what = values, what

    def take(self, name: str) -> Any:
        """A field as it is, or None."""
        return self._values.get(name)

    def integer(self, name: str, least: int, most: int) -> int:
        """An integer field."""
        return self._check_integer(name, self.take(name), least, most)

    def number(self, name: str) -> float:
        """A number; null stands for minus infinity."""
        return self._check_number(name, self.take(name))

    def text(self, name: str) -> str:
        """A short text."""
        return self._check_text(name, self.take(name))

    def items(self, name: str, most: int) -> list[Any]:
        """A list."""
        value = self.take(name)
        if not isinstance(value, list | tuple) or len(value) > most:
            raise self._refuse(name, f"a list of at most {most} items", value)
        return list(value)

    def integers(self, name: str, most_items: int, least: int, most: int) -> list[int]:
        """A list of integers."""
        return [self._check_integer(name, one, least, most) for one in self.items(name, most_items)]

    def numbers(self, name: str, most_items: int) -> list[float]:
        """A list of numbers, with null for minus infinity."""
        return [self._check_number(name, one) for one in self.items(name, most_items)]

    def pairs(self, name: str, last: int, kind: Literal["text", "number"]) -> dict[int, Any]:
        """A list of [place, value], as a dictionary; places go up to `last`."""
        check = self._check_text if kind == "text" else self._check_number
        found: dict[int, Any] = {}
        for pair in self.items(name, last + 1):
            if not isinstance(pair, list | tuple) or len(pair) != 2:
                raise self._refuse(name, "a list of pairs", pair)
            found[self._check_integer(name, pair[0], 0, last)] = check(name, pair[1])
        return found

    def _check_integer(self, name: str, value: Any, least: int, most: int) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self._refuse(name, f"an integer from {least} to {most}", value)
        return value

    def _check_number(self, name: str, value: Any) -> float:
        if value is None:
            return -math.inf
        if not isinstance(value, int | float) or isinstance(value, bool) or not abs(value) < 1e30:  # NaN fails too
            raise self._refuse(name, "a finite number or null", value)
        return float(value)

    def _check_text(self, name: str, value: Any) -> str:
        if not isinstance(value, str) or len(value) > LONGEST_TEXT:
            raise self._refuse(name, f"a text of at most {LONGEST_TEXT} characters", value)
        return value

    def _refuse(self, name: str, wanted: str, value: Any) -> InputError:
        return InputError(f"`{name}` of {self._what} must be {wanted}, but is {value!r:.80}")

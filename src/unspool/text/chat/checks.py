"""Refusing, before it is made, what a chat template would make too large."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sized
from typing import Any

from unspool.text.chat.budget import check_bits, check_text_size, current_budget, refuse

MAX_WIDTH = 1000  # of padding, indents and precisions

# Filters and methods whose numbers are sizes: a large one makes a large result.
_SIZED_FILTERS = frozenset({"batch", "indent", "round", "slice", "tojson", "truncate"})
_SIZED_METHODS = frozenset({"center", "expandtabs", "ljust", "rjust", "zfill"})
_REFUSED_METHODS = frozenset({"maketrans", "to_bytes", "translate"})
# A width of five digits or more, or one that is given as an argument.
_WIDE_PRINTF = re.compile(r"%[^a-zA-Z%]*(?:\*|\d{5})")
_WIDE_BRACES = re.compile(r":[^{}]*\d{5}|\{[^{}]*\{")


def check_filter(name: str, values: list[Any], kwargs: dict[str, Any]) -> None:
    """Refuse a filter's call for the sizes that it is given."""
    subject = values[0] if values else None
    if name in _SIZED_FILTERS:
        _check_widths([*values[1:], *kwargs.values()])
    if name in ("indent", "tojson"):
        width = kwargs.get("width", kwargs.get("indent", values[1] if len(values) > 1 else 0))
        num_lines = subject.count("\n") + 1 if isinstance(subject, str) else 1
        width = width if isinstance(width, int) else len(str(width or ""))
        check_text_size(num_lines * width)
    elif name == "join":
        separator = kwargs.get("d", values[1] if len(values) > 1 else "")
        check_text_size(len(str(separator)) * (len(subject) if isinstance(subject, Sized) else 0))
    elif name == "replace" and len(values) > 2:
        _check_replacement(str(subject), str(values[1]), str(values[2]))
    elif name == "format":
        check_printf(str(subject))
    elif name == "sum" and not isinstance(kwargs.get("start", values[2] if len(values) > 2 else 0), int | float):
        raise refuse("it sums what are not numbers")


def check_method(owner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse a method's call for its name, or for the sizes that it is given."""
    if name in _REFUSED_METHODS or isinstance(owner, type):
        raise refuse(f"it calls the method {name!r}, which chat templates may not")
    if name in _SIZED_METHODS:
        _check_widths([*args, *kwargs.values()])
        if name == "expandtabs":
            tab_size = next((value for value in (*args, *kwargs.values()) if isinstance(value, int)), 8)
            check_text_size(len(owner) + owner.count("\t") * tab_size)
    elif name == "replace" and len(args) > 1 and isinstance(owner, str):
        _check_replacement(owner, str(args[0]), str(args[1]))
    elif name == "join" and args:
        check_text_size(len(owner) * (len(args[0]) if isinstance(args[0], Sized) else 0))
        current_budget().charge_value(args[0])


def _check_widths(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > MAX_WIDTH:
            raise refuse(f"it asks for a width of {value}; the largest is {MAX_WIDTH}")


def _check_replacement(text: str, old: str, new: str) -> None:
    count = text.count(old) if old else len(text) + 1
    check_text_size(len(text) + count * max(0, len(new) - len(old)))


def check_printf(template: str) -> None:
    """Refuse wide fields of `%` formatting."""
    if _WIDE_PRINTF.search(template):
        raise refuse("it formats with a width that is an argument or very large")


def check_product(left: Any, right: Any) -> None:
    """Refuse the product of large numbers, or of a text or list with a large one."""
    if isinstance(left, int) and isinstance(right, int):
        check_bits(left.bit_length() + right.bit_length())
        return
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | bytes | list | tuple) and isinstance(count, int) and count > 0:
            check_text_size(len(sequence) * count)
            if isinstance(sequence, list | tuple):
                current_budget().charge(len(sequence) * count)


def check_power(base: Any, exponent: Any) -> None:
    """Refuse a power that is a large number."""
    if isinstance(base, int) and isinstance(exponent, int) and exponent > 0:
        check_bits(base.bit_length() * exponent)


def check_braces(template: str) -> None:
    """Refuse wide fields of `str.format`."""
    if _WIDE_BRACES.search(template):
        raise refuse("it formats with a width that is nested or very large")

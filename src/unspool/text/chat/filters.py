"""The filters and tests that chat templates may use: jinja2's, with what is checked before each runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from typing import Any

import jinja2.exceptions
import jinja2.filters
import jinja2.tests
import markupsafe

from unspool.text.chat.budget import Counted, check_key, current_budget, refuse
from unspool.text.chat.formats import Pieces, format_printf
from unspool.text.chat.methods import check_lines, check_recasing, check_replacing, check_stripping
from unspool.text.chat.writing import MAX_WIDTH, to_json, to_text

MAX_ATTRIBUTE = 256  # characters of an attribute's name
MAX_DIGITS = 1000  # characters of a text that is read as a number

_WORD = re.compile(r"\w+")


def _check_recased(value: Any, *_: Any) -> None:
    text = to_text(value)
    check_recasing(text)
    current_budget().charge(len(text) // 4)  # `title` makes a list of the words


def _check_truncated(value: Any, *args: Any, end: Any = "...", **_: Any) -> None:
    current_budget().charge_text(len(value) + len(args[2] if len(args) > 2 else end))


def _check_indented(value: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    if not isinstance(value, str):
        raise TypeError(f"indent needs a text, not {type(value).__name__}")
    check_lines(value)
    width = width if isinstance(width, int) else len(width)
    if width > MAX_WIDTH:
        raise refuse(f"it asks for a width of more than {MAX_WIDTH}")
    num_lines = 2 + value.count("\n") + value.count("\r")
    current_budget().charge_text(len(value) + (num_lines if value.isascii() else len(value)) * max(0, width))


def _check_number(value: Any, *_: Any, **__: Any) -> None:
    if isinstance(value, str) and len(value) > MAX_DIGITS:
        raise refuse(f"it reads a text of more than {MAX_DIGITS} characters as a number")


def _check_rounded(_: Any, precision: Any = 0, *__: Any, **___: Any) -> None:
    if isinstance(precision, int) and abs(precision) > MAX_WIDTH:
        raise refuse(f"it rounds to more than {MAX_WIDTH} places")


def _check_filled(
    value: Any, number: Any = None, *_: Any, linecount: Any = None, slices: Any = None, **__: Any
) -> None:
    if any(isinstance(width, int) and width > MAX_WIDTH for width in (number, linecount, slices)):
        raise refuse(f"it asks for a width of more than {MAX_WIDTH}")
    _check_listed(value)


def _check_listed(value: Any, *_: Any, **__: Any) -> None:
    if hasattr(value, "__len__"):
        current_budget().charge(len(value))


def _check_sorted(value: Any, *_: Any, **__: Any) -> None:
    """Pay for the list, the keys, and the lower case of what is in it."""
    if hasattr(value, "__len__"):
        current_budget().charge(4 * len(value) + current_budget().measure(value))


def _check_summed(value: Any, _: Any = None, start: Any = 0, **__: Any) -> None:
    if not isinstance(start, int | float):
        raise refuse("it sums what are not numbers")
    _check_listed(value)


def _check_encoded(value: Any) -> None:
    if isinstance(value, str):
        current_budget().charge_text(12 * len(value))
    elif current_budget().measure(value) > 10_000:
        raise refuse("it encodes too many values for an address")


def _check_nothing(*_: Any, **__: Any) -> None:
    """Filters that make nothing, or make it piece by piece."""


# Each with its check. Those that are jinja2's return lists here where jinja2's own are lazy.
_FROM_JINJA: Mapping[str, Callable[..., None]] = {
    **dict.fromkeys(("capitalize", "lower", "title", "upper"), _check_recased),
    **dict.fromkeys(("batch", "slice"), _check_filled),
    **dict.fromkeys(("list", "map", "max", "min", "reject", "rejectattr", "reverse", "select"), _check_listed),
    **dict.fromkeys(("items", "selectattr"), _check_listed),
    **dict.fromkeys(("dictsort", "groupby", "sort"), _check_sorted),
    **dict.fromkeys(("float", "int"), _check_number),
    **dict.fromkeys(("abs", "count", "d", "default", "first", "last", "length"), _check_nothing),
    "indent": _check_indented,
    "round": _check_rounded,
    "sum": _check_summed,
    "truncate": _check_truncated,
    "urlencode": _check_encoded,
}


def make_filters() -> dict[str, Any]:
    """Every filter by its name."""
    builtin = jinja2.filters.FILTERS
    own: dict[str, Callable[..., Any]] = {
        **dict.fromkeys(("e", "escape"), _escape),
        **dict.fromkeys(("safe", "string"), to_text),
        "format": _format,
        "join": _join,
        "replace": _replace,
        "tojson": to_json,
        "trim": _trim,
        "unique": _list_unique,
        "wordcount": _count_words,
    }
    return {
        **{name: _guard(builtin[name], check) for name, check in _FROM_JINJA.items()},
        **{name: _guard(function, _check_nothing) for name, function in own.items()},
    }


def make_tests() -> dict[str, Any]:
    """Every test by its name: jinja2's, none of which makes anything."""
    return {name: _guard(test, _check_nothing) for name, test in jinja2.tests.TESTS.items()}


def _guard(function: Any, check: Callable[..., None]) -> Callable[..., Any]:
    """A filter that checks what it is given, and pays for what it makes."""
    num_passed = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        values = args[num_passed:]
        for value in (*values[1:], *kwargs.values()):
            _check_attribute(value, function)
        check(*values, **kwargs)
        result = function(*args, **kwargs)
        if isinstance(result, Iterator):
            result = list(Counted(result, 1))
        current_budget().charge_value(result)
        return result

    return guarded


# Filters whose texts are attributes: `a.b.c` is looked up part by part for every item.
_BY_ATTRIBUTE = frozenset(
    jinja2.filters.FILTERS[name] for name in ("groupby", "map", "max", "min", "rejectattr", "selectattr", "sort", "sum")
)


def _check_attribute(value: Any, function: Callable[..., Any]) -> None:
    if function in _BY_ATTRIBUTE and isinstance(value, str) and value.count(".") + value.count(",") > MAX_ATTRIBUTE:
        raise refuse(f"it looks up an attribute of more than {MAX_ATTRIBUTE} parts")


def _escape(value: Any) -> str:
    """The text with HTML's characters escaped: a plain text, unlike jinja2's, which escapes what is added to it."""
    text = to_text(value)
    current_budget().charge_text(len(text) + 4 * sum(map(text.count, "&<>'\"")))
    return str(markupsafe.escape(text))


def _format(value: Any, *args: Any, **kwargs: Any) -> str:
    if args and kwargs:
        raise jinja2.exceptions.FilterArgumentError("can't handle positional and keyword arguments at the same time")
    return format_printf(to_text(value), kwargs or args)


@jinja2.pass_environment
def _join(environment: jinja2.Environment, value: Iterable[Any], d: Any = "", attribute: Any = None) -> str:
    separator, pieces = to_text(d), Pieces()
    if isinstance(attribute, str) and len(attribute) > MAX_ATTRIBUTE:
        raise refuse(f"it looks up an attribute of more than {MAX_ATTRIBUTE} characters")
    get = jinja2.filters.make_attrgetter(environment, attribute)
    for number, item in enumerate(Counted(value, 1)):
        if number:
            pieces.add(separator)
        pieces.add(to_text(item if attribute is None else get(item)))
    return pieces.join()


def _replace(s: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, searched, replacement = to_text(s), to_text(old), to_text(new)
    times = -1 if count is None else count
    check_replacing(text, searched, replacement, times)
    return text.replace(searched, replacement, times)


def _trim(value: Any, chars: str | None = None) -> str:
    text = to_text(value)
    check_stripping(text, chars)
    return text.strip(chars)


@jinja2.pass_environment
def _list_unique(
    environment: jinja2.Environment, value: Iterable[Any], case_sensitive: bool = False, attribute: Any = None
) -> list[Any]:
    if isinstance(attribute, str) and len(attribute) > MAX_ATTRIBUTE:
        raise refuse(f"it looks up an attribute of more than {MAX_ATTRIBUTE} characters")
    get = jinja2.filters.make_attrgetter(environment, attribute)
    seen: set[Any] = set()
    kept: list[Any] = []
    for item in Counted(value, 2):
        key = get(item)
        check_key(key)
        if isinstance(key, str):
            current_budget().charge_text(len(key))
            key = key if case_sensitive else key.lower()
        if key not in seen:
            seen.add(key)
            kept.append(item)
    return kept


def _count_words(value: Any) -> int:
    text = to_text(value)
    current_budget().charge(len(text) // 2)
    return sum(1 for _ in _WORD.finditer(text))

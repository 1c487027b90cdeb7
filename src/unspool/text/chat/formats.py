"""`%` and `str.format` in chat templates: field by field, each checked before it is made."""

from __future__ import annotations

import re
from _string import formatter_field_name_split, formatter_parser  # type: ignore[import-not-found]  # Python's own, in C
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from unspool.text.chat.budget import check_text_size, current_budget, refuse
from unspool.text.chat.writing import MAX_WIDTH, to_repr, to_text

_PRINTF = re.compile(
    r"%(?:\((?P<key>[^()]*)\))?(?P<flags>[-+ #0]*)(?P<width>\*|\d*)(?:\.(?P<precision>\*|\d*))?[hlL]?(?P<kind>.)?", re.S
)
_SPEC = re.compile(r"(?:.?[<>=^])?[-+ ]?#?0?(?P<width>\d*)[,_]?(?:\.(?P<precision>\d+))?[a-zA-Z%]?", re.S)


class Pieces:
    """A text that is put together; it is refused as soon as it is too long."""

    def __init__(self) -> None:
        self._pieces: list[str] = []
        self._size = 0

    def add(self, piece: str) -> None:
        current_budget().charge(1)
        self._size += len(piece)
        check_text_size(self._size)
        self._pieces.append(piece)

    def join(self) -> str:
        current_budget().charge_text(self._size)
        return "".join(self._pieces)


def format_printf(template: str, given: Any) -> str:
    """`template % given`."""
    pieces, position = Pieces(), 0
    arguments = iter(given if isinstance(given, tuple) else (given,))
    uses_arguments = False
    while (start := template.find("%", position)) >= 0:
        pieces.add(template[position:start])
        found = _PRINTF.match(template, start)
        if found is None or found["kind"] is None:
            raise ValueError("incomplete format")
        position = found.end()
        if found["kind"] == "%":
            pieces.add("%")
            continue
        _check_field(found)
        if found["key"] is not None:
            if not isinstance(given, Mapping):
                raise TypeError("format requires a mapping")
            argument = given[found["key"]]
        else:
            uses_arguments = True
            argument = next(arguments, pieces)
            if argument is pieces:
                raise TypeError("not enough arguments for format string")
        pieces.add(_print_field(found, argument))
    pieces.add(template[position:])
    left = next(arguments, pieces) is not pieces
    if left and (uses_arguments or isinstance(given, tuple) or not isinstance(given, Mapping | list)):
        raise TypeError("not all arguments converted during string formatting")
    return pieces.join()


def _print_field(found: re.Match[str], argument: Any) -> str:
    kind = found["kind"]
    if kind == "s":
        argument = to_text(argument)
    elif kind in "ra":
        argument = to_repr(argument)
        check_text_size(10 * len(argument) if kind == "a" else 0)
        argument, kind = argument if kind == "r" else argument.encode("ascii", "backslashreplace").decode(), "s"
    elif not isinstance(argument, int | float | str):
        raise TypeError(f"%{kind} format: a number is required, not {type(argument).__name__}")
    precision = "" if found["precision"] is None else f".{found['precision']}"
    return f"%{found['flags']}{found['width']}{precision}{kind}" % (argument,)


def format_braces(
    template: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], look_up: Callable[[Any, bool, Any], Any]
) -> str:
    """`template.format(*args, **kwargs)`; `look_up(value, is_attribute, name)` follows `{0.name}` and `{0[name]}`."""
    pieces, numbers = Pieces(), iter(range(len(args)))
    for literal, field, spec, conversion in formatter_parser(template):
        pieces.add(literal)
        if field is None:
            continue
        value = _find_argument(field, args, kwargs, numbers, look_up)
        if conversion not in (None, "s", "r"):
            raise refuse(f"it formats with the conversion {conversion!r}")
        if conversion is not None:
            value = to_text(value) if conversion == "s" else to_repr(value)
        pieces.add(_format_field(value, spec))
    return pieces.join()


def _find_argument(
    field: str,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    numbers: Iterator[int],
    look_up: Callable[[Any, bool, Any], Any],
) -> Any:
    first, rest = formatter_field_name_split(field)
    if first == "":
        first = next(numbers, len(args))
    if isinstance(first, int) and first >= len(args):
        raise IndexError(f"Replacement index {first} out of range for positional args tuple")
    value = args[first] if isinstance(first, int) else kwargs[first]
    for is_attribute, name in rest:
        value = look_up(value, is_attribute, name)
    return value


def _format_field(value: Any, spec: str) -> str:
    if not spec:
        return to_text(value)
    found = _SPEC.fullmatch(spec)
    if found is None:
        raise refuse(f"it formats with {spec[:40]!r}, which chat templates may not")
    _check_field(found)
    if not isinstance(value, str | int | float):
        raise TypeError(f"unsupported format string passed to {type(value).__name__}.__format__")
    return format(value, spec)


def _check_field(found: re.Match[str]) -> None:
    for size in (found["width"], found["precision"]):
        if size and (size == "*" or len(size) > 4 or int(size) > MAX_WIDTH):
            raise refuse(f"it formats with a width that is an argument or more than {MAX_WIDTH}")

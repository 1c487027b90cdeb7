"""The methods that chat templates may call, each with what is checked before it runs. There are no others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2.runtime import LoopContext, Macro
from jinja2.utils import Cycler

from unspool.text.chat.budget import Counted, check_text_size, current_budget, refuse
from unspool.text.chat.formats import Pieces
from unspool.text.chat.writing import MAX_WIDTH

MAX_PARTS = 500_000  # of a text that is split
MAX_SEARCH = 1 << 28  # characters compared by searches that take time by the product of their sizes
_LINE_ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"

_PLAIN_STR = frozenset(
    {
        *("count", "endswith", "find", "index", "isalnum", "isalpha", "isascii", "isdecimal", "isdigit"),
        *("islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper", "partition", "removeprefix"),
        *("isidentifier", "removesuffix", "startswith"),
    }
)
_RECASING_STR = frozenset({"capitalize", "casefold", "lower", "swapcase", "title", "upper"})
_PADDING_STR = frozenset({"center", "ljust", "rjust", "zfill"})
_STRIPPING_STR = frozenset({"lstrip", "rstrip", "strip"})
_REVERSE_STR = frozenset({"rfind", "rindex", "rpartition"})

# What may be read off the other things that a template can hold.
ATTRIBUTES: Mapping[type, frozenset[str]] = {
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    range: frozenset({"start", "step", "stop"}),
    int: frozenset({"bit_length"}),
    float: frozenset({"is_integer"}),
    LoopContext: frozenset(
        {
            *("changed", "cycle", "depth", "depth0", "first", "index", "index0", "last", "length", "nextitem"),
            *("previtem", "revindex", "revindex0"),
        }
    ),
    Cycler: frozenset({"current", "next", "reset"}),
    Macro: frozenset({"arguments", "name"}),
}


class TemplateMethod:
    """A method that was looked up by a template; nothing else of a value can be called."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def find_method(text: str, name: str) -> TemplateMethod | None:
    """A string's method by its name, if chat templates may call it; `format` is the environment's."""
    check = _CHECKS.get(name)
    if check is None:
        return None

    def call(*args: Any, **kwargs: Any) -> Any:
        check(text, *args, **kwargs)
        return getattr(text, name)(*args, **kwargs)

    return TemplateMethod(join_all(text) if name == "join" else call)


def join_all(separator: str) -> Callable[[Any], str]:
    """`separator.join`, which sees how long the result is before it is made."""

    def join(items: Iterable[Any]) -> str:
        pieces = Pieces()
        for number, item in enumerate(Counted(items, 1)):
            if not isinstance(item, str):
                raise TypeError(f"sequence item {number}: expected str instance, {type(item).__name__} found")
            if number:
                pieces.add(separator)
            pieces.add(item)
        return pieces.join()

    return join


def check_recasing(text: str, *_: Any) -> None:
    """Refuse another case of a text that could become too long: a character can become three."""
    current_budget().charge_text(len(text) if text.isascii() else 3 * len(text))


def check_replacing(text: str, old: Any, new: Any, count: Any = -1) -> None:
    """Refuse a replacement that makes a text too long."""
    if isinstance(old, str) and isinstance(new, str):
        times = text.count(old) if old else len(text) + 1
        times = min(times, count) if isinstance(count, int) and count >= 0 else times
        current_budget().charge_text(len(text) + times * max(0, len(new) - len(old)))


def check_stripping(text: str, characters: Any = None) -> None:
    """Refuse to strip a long text of very many characters, which takes the product of both."""
    _check_search(text, characters)


def check_lines(text: str, *_: Any, **__: Any) -> None:
    """Refuse to cut a text into too many lines."""
    _check_parts(1 + sum(map(text.count, _LINE_ENDS)))


def _check_plain(*_: Any) -> None:
    current_budget().charge(1)


def _check_reverse(text: str, sub: Any, *_: Any) -> None:
    _check_search(text, sub)


def _check_search(text: str, searched: Any) -> None:
    if isinstance(searched, str) and len(searched) > 16 and len(text) * len(searched) > MAX_SEARCH:
        raise refuse("it searches a long text for another one from its end, or strips it of too many characters")
    current_budget().charge_text(len(text))


def _check_split(text: str, sep: Any = None, maxsplit: Any = -1) -> None:
    _check_search(text, sep)
    if isinstance(maxsplit, int) and 0 <= maxsplit < MAX_PARTS:
        return
    if isinstance(sep, str) and sep:
        _check_parts(1 + text.count(sep))
    elif len(text) > MAX_PARTS:  # more words than this many can't be in a shorter one
        _check_parts(len(text.split(None, MAX_PARTS)))


def _check_parts(number: int) -> None:
    if number > MAX_PARTS:
        raise refuse(f"it cuts a text into more than {MAX_PARTS} parts")


def _check_padding(text: str, width: Any, *_: Any) -> None:
    if isinstance(width, int) and width > MAX_WIDTH:
        raise refuse(f"it asks for a width of more than {MAX_WIDTH}")
    current_budget().charge_text(len(text) + MAX_WIDTH)


def _check_tabs(text: str, tabsize: Any = 8) -> None:
    if isinstance(tabsize, int):
        current_budget().charge_text(len(text) + text.count("\t") * max(0, tabsize))


def _check_join(*_: Any) -> None:
    """Nothing: `join_all` checks as it goes."""


_CHECKS: Mapping[str, Callable[..., None]] = {
    **dict.fromkeys(_PLAIN_STR, _check_plain),
    **dict.fromkeys(_RECASING_STR, check_recasing),
    **dict.fromkeys(_PADDING_STR, _check_padding),
    **dict.fromkeys(_STRIPPING_STR, check_stripping),
    **dict.fromkeys(_REVERSE_STR, _check_reverse),
    **dict.fromkeys(("split", "rsplit"), _check_split),
    "splitlines": check_lines,
    "replace": check_replacing,
    "expandtabs": _check_tabs,
    "join": _check_join,
}


def check_product(left: Any, right: Any) -> None:
    """Refuse the product of a text or list with a large number."""
    for sequence, count in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(count, int) and count > 0:
            check_text_size(len(sequence) * count)
            if not isinstance(sequence, str):
                current_budget().charge(len(sequence) * count)

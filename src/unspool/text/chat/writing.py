"""Turning a template's values into text: as Python prints them, and as JSON, no more than fits."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from json.encoder import encode_basestring, encode_basestring_ascii
from typing import Any

from jinja2.runtime import Undefined

from unspool.text.chat.budget import ChatNamespace, check_text_size, current_budget, refuse

MAX_WIDTH = 1000  # of padding, indents and precisions
_CHUNK = 1 << 16
_MAX_MARK = 64  # characters of an indent or a separator in JSON


def to_text(value: Any) -> str:
    """What `str` makes of a value, refused before it is made if that is too long."""
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, int | float | Undefined):
        return str(value)
    _measure_repr(value)
    return str(value)


def to_repr(value: Any) -> str:
    """What `repr` makes of a value, refused before it is made if that is too long."""
    _measure_repr(value)
    return repr(value)


def to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models saw it in training: characters as they are, no HTML escapes."""
    marks = [indent, *(separators if separators is not None else ())]
    for mark in marks:
        if (isinstance(mark, str) and len(mark) > _MAX_MARK) or (isinstance(mark, int) and mark > _MAX_MARK):
            raise refuse(f"it writes JSON with an indent or separator of more than {_MAX_MARK} characters")
    _measure_json(value, bool(ensure_ascii), indent, separators)
    return json.dumps(
        value, ensure_ascii=bool(ensure_ascii), indent=indent, separators=separators, sort_keys=bool(sort_keys)
    )


def _measure_repr(value: Any) -> None:
    """Refuse a value whose `repr` is too long, without making it."""
    budget, size, pending = current_budget(), 0, [value]
    while pending:
        item = pending.pop()
        budget.charge(1)
        if isinstance(item, ChatNamespace):
            raise refuse("it prints a namespace")
        if isinstance(item, str):
            size += _measure_escaped(item, repr) + item.count("'")
        elif isinstance(item, list | tuple | Mapping):
            size += 4 * len(item) + 2
            pending += [*item.keys(), *item.values()] if isinstance(item, Mapping) else item
        elif hasattr(item, "mapping"):  # a dict's keys, values or items
            pending.append(dict(item.mapping))
            size += 2 * len(item) + 16
        else:
            size += 64
        check_text_size(size)


def _measure_json(value: Any, is_ascii: bool, indent: int | str | None, separators: tuple[str, str] | None) -> None:
    """Refuse a value whose JSON is too long, without making it."""
    budget, size = current_budget(), 0
    width = indent if isinstance(indent, int) else len(indent or "")
    between = sum(map(len, separators)) if separators is not None else 4
    escape = encode_basestring_ascii if is_ascii else encode_basestring
    pending = [(value, 1)]
    while pending:
        item, depth = pending.pop()
        budget.charge(1)
        if isinstance(item, str):
            size += _measure_escaped(item, escape)
        elif isinstance(item, list | tuple | Mapping):
            size += (len(item) + 1) * (width * depth + 1 + between) + 2
            parts = [*item.keys(), *item.values()] if isinstance(item, Mapping) else item
            pending += [(part, depth + 1) for part in parts]
        else:
            size += 64
        check_text_size(size)


def _measure_escaped(text: str, escape: Callable[[str], str]) -> int:
    """The length of an escaped string: a long one is escaped piece by piece, and the pieces are dropped."""
    if len(text) <= _CHUNK:
        return len(escape(text))
    size = 0
    for start in range(0, len(text), _CHUNK):
        size += len(escape(text[start : start + _CHUNK]))
        check_text_size(size)
    return size

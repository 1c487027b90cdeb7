"""The sandbox of chat templates: jinja2's own, with every operation that can make something large kept in bounds."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime
from functools import wraps
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from unspool.text.chat.budget import ChatNamespace, Counted, check_text_size, current_budget, refuse
from unspool.text.chat.checks import (
    check_braces,
    check_filter,
    check_method,
    check_power,
    check_printf,
    check_product,
)
from unspool.text.chat.instrument import INSTRUMENT_FILTERS, join_output

MAX_RANGE = 100_000
MAX_FORMAT = 256  # characters of a date format

# What chat templates use of jinja2's filters; the rest is not worth its risk.
_FILTERS = (
    *("abs", "batch", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "format"),
    *("groupby", "indent", "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject"),
    *("rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "slice", "sort", "string", "sum"),
    *("title", "trim", "truncate", "unique", "upper", "urlencode", "wordcount"),
)


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`, which marks the assistant's words for training: its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Where chat templates run: the filters and globals that they use, and a price on everything that grows."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_GenerationTag, jinja2.ext.loopcontrols],
            # Folding constants would run expressions while compiling, where no budget holds.
            optimized=False,
            finalize=_pay_for_output,
            cache_size=0,
        )
        builtin = {name: self.filters[name] for name in _FILTERS}
        self.filters = {name: _guard_filter(name, function) for name, function in builtin.items()}
        self.filters["tojson"] = _guard_filter("tojson", _to_json)
        self.filters |= INSTRUMENT_FILTERS
        self.globals = {
            "dict": _make_dict,
            "joiner": jinja2.utils.Joiner,
            "cycler": jinja2.utils.Cycler,
            "namespace": ChatNamespace,
            "raise_exception": _raise_exception,
            "range": _make_range,
            "strftime_now": _format_now,
        }
        self.concat: Callable[[Iterable[str]], str] = join_output

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse the result of an operator before it is made, and pay for it after."""
        if operator == "*":
            check_product(left, right)
        elif operator == "**":
            check_power(left, right)
        elif operator == "%" and isinstance(left, str):
            check_printf(left)
        elif operator == "+" and isinstance(left, str) and isinstance(right, str):
            check_text_size(len(left) + len(right))
        result = super().call_binop(context, operator, left, right)
        current_budget().charge_value(result)
        return result

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - names that a template's own can't meet
        """Check what is called with which sizes, and pay for the result."""
        current_budget().charge(1)
        if isinstance(__obj, jinja2.runtime.LoopContext) and args:  # {% for … recursive %} called again
            args = (Counted(args[0], 100), *args[1:])
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes | int | float | type):
            check_method(owner, str(getattr(__obj, "__name__", "")), args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        current_budget().charge_value(result)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Refuse wide fields in `str.format`, whose result could be of any size."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            check_braces(value.__self__)
        return wrapped


@jinja2.pass_context
def _pay_for_output(_context: jinja2.runtime.Context, value: Any) -> Any:
    current_budget().charge_value(value)
    return value


def _guard_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that checks what it is given, and pays for what it makes."""
    num_passed = 1 if hasattr(function, "jinja_pass_arg") else 0

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        values = [_settle(value) for value in args[num_passed:]]
        check_filter(name, values, kwargs)
        result = function(*args[:num_passed], *values, **kwargs)
        current_budget().charge_value(result)
        return result

    return guarded


def _settle(value: Any) -> Any:
    """What is still to be computed, as a list: its size must be known, and its items paid for."""
    return list(Counted(value, 1)) if isinstance(value, Iterator) else value


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _make_range(*args: int) -> range:
    numbers = range(*args)
    if len(numbers) > MAX_RANGE:
        raise refuse(f"it asks for a range of {len(numbers)}; the longest is {MAX_RANGE}")
    return numbers


def _format_now(date_format: str) -> str:
    if not isinstance(date_format, str) or len(date_format) > MAX_FORMAT:
        raise refuse(f"it gives strftime_now a format that is not a text of at most {MAX_FORMAT} characters")
    return datetime.now().strftime(date_format)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(str(message))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models saw it in training: characters as they are, no HTML escapes."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

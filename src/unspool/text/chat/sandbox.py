"""The sandbox of chat templates: jinja2's own, in which only known operations exist, each kept in bounds."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.utils
from jinja2.sandbox import ImmutableSandboxedEnvironment

from unspool.text.chat.budget import ChatNamespace, Counted, check_bits, check_key, current_budget, refuse
from unspool.text.chat.filters import make_filters, make_tests
from unspool.text.chat.formats import format_braces, format_printf
from unspool.text.chat.instrument import INSTRUMENT_FILTERS, join_output
from unspool.text.chat.methods import ATTRIBUTES, TemplateMethod, check_product, find_method
from unspool.text.chat.writing import to_text

MAX_RANGE = 100_000
MAX_FORMAT = 256  # characters of a date format


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %}`, which marks the assistant's words for training: its body is rendered as it is."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Where chat templates run: the filters, methods and functions that they use, and a price on everything."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})

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
        self.filters = {**make_filters(), **INSTRUMENT_FILTERS}
        self.tests = make_tests()
        self.globals = {
            "dict": _make_dict,
            "joiner": jinja2.utils.Joiner,
            "cycler": jinja2.utils.Cycler,
            "namespace": ChatNamespace,
            "raise_exception": _raise_exception,
            "range": _make_range,
            "strftime_now": _format_now,
        }
        self._callable_globals = frozenset(self.globals.values())
        self.concat: Callable[[Iterable[str]], str] = join_output

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:
        """Refuse the result of an operator before it is made, and pay for it."""
        current_budget().charge(1)
        if operator == "%" and isinstance(left, str):
            return format_printf(left, right)
        if isinstance(left, int) and isinstance(right, int):
            _check_whole_numbers(operator, left, right)
        elif operator == "*":
            check_product(left, right)
        elif operator == "+" and isinstance(left, str) and isinstance(right, str):
            current_budget().charge_text(len(left) + len(right))
            return left + right
        elif operator == "+" and isinstance(left, list | tuple) and isinstance(right, list | tuple):
            current_budget().charge(len(left) + len(right))
        elif not isinstance(left, _OPERANDS) or not isinstance(right, _OPERANDS):
            raise TypeError(
                f"unsupported operand types for {operator}: {type(left).__name__!r} and {type(right).__name__!r}"
            )
        result = super().call_binop(context, operator, left, right)
        current_budget().charge_value(result)
        return result

    def getattr(self, obj: Any, attribute: str) -> Any:
        """A known method or attribute of a value, or else its item of that name."""
        if isinstance(obj, jinja2.runtime.Undefined):
            return super().getattr(obj, attribute)
        found = self._find_attribute(obj, attribute)
        return _find_item(obj, attribute, self.undefined) if found is None else found

    def getitem(self, obj: Any, argument: Any) -> Any:
        """An item of a value, or else the known method or attribute of that name."""
        if isinstance(obj, jinja2.runtime.Undefined):
            return super().getitem(obj, argument)
        item = _find_item(obj, argument, self.undefined)
        if isinstance(argument, str) and isinstance(item, jinja2.runtime.Undefined):
            found = self._find_attribute(obj, argument)
            return item if found is None else found
        return item

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - names that a template's own can't meet
        """Call what may be called, and pay for the result."""
        current_budget().charge(1)
        if isinstance(__obj, jinja2.runtime.LoopContext) and args:  # {% for … recursive %} called again
            args = (Counted(args[0], 100), *args[1:])
        elif not isinstance(__obj, _CALLABLES) and not (
            callable(__obj) and __obj.__hash__ is not None and __obj in __self._callable_globals
        ):
            raise TypeError(f"{type(__obj).__name__!r} object is not callable")
        result = super().call(__context, __obj, *args, **kwargs)
        current_budget().charge_value(result)
        return result

    def _find_attribute(self, obj: Any, name: str) -> Any:
        """A method or attribute that is known to be harmless, or None."""
        if isinstance(obj, str):
            if name == "format":
                return TemplateMethod(lambda *args, **kwargs: format_braces(obj, args, kwargs, self._look_up))
            if name == "format_map":
                return TemplateMethod(lambda mapping: format_braces(obj, (), mapping, self._look_up))
            return find_method(obj, name)
        if isinstance(obj, ChatNamespace):
            return None  # its names are items
        for kind, names in ATTRIBUTES.items():
            if isinstance(obj, kind) and name in names:
                value = getattr(obj, name)
                return TemplateMethod(value) if callable(value) and not isinstance(value, _CALLABLES) else value
        if isinstance(obj, tuple) and name in getattr(obj, "_fields", ()):  # `groupby`'s grouper and list
            return getattr(obj, name)
        return None

    def _look_up(self, value: Any, is_attribute: bool, name: Any) -> Any:
        return self.getattr(value, name) if is_attribute else self.getitem(value, name)


_OPERANDS = (int, float, str, list, tuple, jinja2.runtime.Undefined)
_CALLABLES = (
    *(TemplateMethod, jinja2.runtime.Macro, jinja2.runtime.LoopContext, jinja2.runtime.Undefined, jinja2.utils.Joiner),
)


def _find_item(obj: Any, argument: Any, undefined: Callable[..., jinja2.runtime.Undefined]) -> Any:
    if isinstance(obj, ChatNamespace):
        # The class answers every name with what a template put there; this one is jinja2's own.
        obj_items: Mapping[str, Any] = object.__getattribute__(obj, "_Namespace__attrs")
        return obj_items[argument] if argument in obj_items else undefined(obj=obj, name=argument)
    if isinstance(obj, str | list | tuple | dict | range):
        try:
            return obj[argument]
        except (LookupError, TypeError):
            pass
    return undefined(obj=obj, name=argument)


def _check_whole_numbers(operator: str, left: int, right: int) -> None:
    if operator == "*":
        check_bits(left.bit_length() + right.bit_length() - 1)
    elif operator == "**" and right > 0:
        check_bits((left.bit_length() - 1) * right + 1)


@jinja2.pass_context
def _pay_for_output(_context: jinja2.runtime.Context, value: Any) -> str:
    text = to_text(value)
    current_budget().charge_text(len(text))
    return text


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    if len(args) > 1:
        raise TypeError(f"dict expected at most 1 argument, got {len(args)}")
    pairs: Any = args[0] if args else ()
    found: dict[Any, Any] = {}
    for key, value in Counted(pairs.items() if isinstance(pairs, Mapping) else pairs, 2):
        check_key(key)
        found[key] = value
    return {**found, **kwargs}


def _make_range(*args: int) -> range:
    numbers = range(*args)
    for end in (numbers.start, numbers.stop, numbers.step):
        check_bits(end.bit_length())
    if len(numbers) > MAX_RANGE:
        raise refuse(f"it asks for a range of {len(numbers)}; the longest is {MAX_RANGE}")
    return numbers


def _format_now(date_format: str) -> str:
    if not isinstance(date_format, str) or len(date_format) > MAX_FORMAT:
        raise refuse(f"it gives strftime_now a format that is not a text of at most {MAX_FORMAT} characters")
    return datetime.now().strftime(date_format)


def _raise_exception(message: object) -> None:
    raise jinja2.TemplateError(to_text(message))

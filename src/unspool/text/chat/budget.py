"""What running a chat template may cost, in work, size and time."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jinja2.exceptions
import jinja2.runtime
import jinja2.utils

MAX_WORK = 5_000_000  # tree nodes run, values made, and sixteenths of characters
MAX_TEXT = 8 << 20  # characters of one string
MAX_BITS = 4096  # of one whole number
MAX_SECONDS = 5.0
_CHARACTERS_A_UNIT = 16


def refuse(reason: str) -> jinja2.exceptions.SecurityError:
    """The error for a template that wants too much."""
    return jinja2.exceptions.SecurityError(f"it was stopped because {reason}")


class Budget:
    """The work that one render may still do."""

    def __init__(self) -> None:
        self._left = MAX_WORK
        self._deadline = time.monotonic() + MAX_SECONDS

    def charge(self, units: int) -> None:
        """Pay for work."""
        self._left -= units
        if self._left < 0:
            raise refuse("it does too much work (loops, calls or text)")
        if time.monotonic() > self._deadline:
            raise refuse(f"it ran for more than {MAX_SECONDS:.0f} seconds")

    def charge_value(self, value: Any) -> None:
        """Pay for a value that was made: each part of it, each time that it is reached, as if it were written out."""
        self.charge(1)
        pending = [value]
        while pending:
            item = pending.pop()
            if isinstance(item, str | bytes):
                check_text_size(len(item))
                self.charge(len(item) // _CHARACTERS_A_UNIT)
            elif isinstance(item, int):
                check_bits(item.bit_length())
            elif isinstance(item, Mapping):
                self.charge(2 * len(item))
                pending.extend(item.keys())
                pending.extend(item.values())
            elif isinstance(item, list | tuple | set | frozenset):
                self.charge(len(item))
                pending.extend(item)
            elif isinstance(item, ChatNamespace):
                self.charge(1)
                # The class answers every name with what a template put there; this one is jinja2's own.
                pending.append(object.__getattribute__(item, "_Namespace__attrs"))


_CURRENT: ContextVar[Budget] = ContextVar("chat_budget")


@contextmanager
def spending(budget: Budget) -> Iterator[None]:
    """Have everything that is run inside pay from this budget."""
    token = _CURRENT.set(budget)
    try:
        yield
    finally:
        _CURRENT.reset(token)


def current_budget() -> Budget:
    """The budget of the render that is going on."""
    return _CURRENT.get()


def check_text_size(num_characters: int) -> None:
    """Refuse a string before (or just after) it is made."""
    if num_characters > MAX_TEXT:
        raise refuse(f"it makes a text of more than {MAX_TEXT} characters")


def check_bits(num_bits: int) -> None:
    """Refuse a number before (or just after) it is made."""
    if num_bits > MAX_BITS:
        raise refuse(f"it makes a number of more than {MAX_BITS} bits")


class Counted:
    """An iterable whose every item costs `cost`."""

    def __init__(self, iterable: Any, cost: int) -> None:
        self._iterable = iterable
        self._cost = cost

    def __iter__(self) -> Iterator[Any]:
        budget = current_budget()
        for item in self._iterable:
            budget.charge(self._cost)
            yield item

    def __len__(self) -> int:
        return len(self._iterable)


class ChatNamespace(jinja2.utils.Namespace):
    """A template's `namespace()`: no private names in it, and what is put there is paid for."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self: Any = args[0]
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        current_budget().charge_value(value)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise refuse(f"it sets the private name {name!r} on a namespace")

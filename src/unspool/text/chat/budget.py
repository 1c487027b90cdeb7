"""What running a chat template may cost, in work, size and time.

Three promises hold for everything that a template does, and together they bound a render:

1. No value is larger than `MAX_TEXT` characters or, written out with all that it holds, `MAX_SIZE` units. What would
   be larger is refused before it is made: every operator, method, filter and function that a template can reach is in
   a list of known ones, and each works out the size of its result first. Nothing else can be called.
2. Whatever is made is paid for, by its own size, out of `MAX_WORK` units. A unit is at most about 100 bytes, so
   everything that one render ever made, even if it kept all of it, is below 400 MB; whole numbers have at most
   `MAX_BITS`, and keys of dicts are plain, so that no hashes can be made to collide.
3. Between any two operations the clock is looked at, and one operation takes time in proportion to the sizes above
   (those that don't, such as a search from the right, are refused by the product of their sizes).
"""

from __future__ import annotations

import time
from collections.abc import ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jinja2.exceptions
import jinja2.runtime
import jinja2.utils

MAX_WORK = 4_000_000  # units: values made, tree nodes run, and sixteenths of characters
MAX_TEXT = 8 << 20  # characters of one string
MAX_SIZE = 2_000_000  # units of one value, as if it were written out
MAX_BITS = 64  # of one whole number
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
        # The sizes of containers by identity. Templates can't change one, and those listed here stay alive.
        self._sizes: dict[int, tuple[object, int]] = {}

    def charge(self, units: int) -> None:
        """Pay for work."""
        self._left -= units
        if self._left < 0:
            raise refuse("it does too much work (loops, calls or text)")
        if time.monotonic() > self._deadline:
            raise refuse(f"it ran for more than {MAX_SECONDS:.0f} seconds")

    def charge_text(self, num_characters: int) -> None:
        """Refuse a string that is too long, or pay for it, before it is made."""
        check_text_size(num_characters)
        self.charge(1 + num_characters // _CHARACTERS_A_UNIT)

    def charge_value(self, value: Any) -> None:
        """Pay for a value: its characters, or its items without what is in them."""
        if isinstance(value, str):
            self.charge_text(len(value))
        elif isinstance(value, int):
            check_bits(value.bit_length())
            self.charge(1)
        elif isinstance(value, list | tuple | Mapping):
            self.charge(len(value))
            self.measure(value)
        else:
            self.charge(1)

    def measure(self, value: Any) -> int:
        """The units of a value written out: shared parts count each time. One that is too large is refused."""
        if isinstance(value, str):
            return 1 + len(value) // _CHARACTERS_A_UNIT
        if isinstance(value, ItemsView | KeysView | ValuesView):
            seen: Any = value  # typeshed has `mapping` for dicts' own views alone
            return sum(self.measure(item) for pair in seen.mapping.items() for item in pair)
        if not isinstance(value, list | tuple | Mapping):
            return 1
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1]
        self.charge(4 + 2 * len(value))  # an empty one and its entry below take some 300 bytes
        size = 1 + len(value)
        for part in value.items() if isinstance(value, Mapping) else value:
            size += self.measure(part[0]) + self.measure(part[1]) if isinstance(value, Mapping) else self.measure(part)
            if size > MAX_SIZE:
                raise refuse("it makes a list or dict that holds too much")
        self._sizes[id(value)] = (value, size)
        return size


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
    """Refuse a string before it is made."""
    if num_characters > MAX_TEXT:
        raise refuse(f"it makes a text of more than {MAX_TEXT} characters")


def check_bits(num_bits: int) -> None:
    """Refuse a number before (or just after) it is made."""
    if num_bits > MAX_BITS:
        raise refuse(f"it makes a number of more than {MAX_BITS} bits")


def check_key(key: Any) -> None:
    """Refuse a key of a dict or set whose hash a template could make equal to many others'."""
    if isinstance(key, int):
        check_bits(key.bit_length())
    elif key is not None and not isinstance(key, str | float):
        raise refuse(f"it uses a {type(key).__name__} as a key")


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
        for name, value in attributes.items():
            _check_name(name)
            current_budget().measure(value)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        current_budget().charge(1)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise refuse(f"it sets the private name {str(name)[:40]!r} on a namespace")

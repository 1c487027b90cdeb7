"""What a forked child makes anew: of its parent's threads it has the one that forked, and the locks of all.

A lock that another thread held at the fork would never be released. Every lock of the library is made by `make_lock`;
whoever has more that belongs to a thread says by `after_fork` what becomes of it.
"""

from __future__ import annotations

import functools
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeVar, overload

T = TypeVar("T")
_PACKAGE: Final = __name__.partition(".")[0]
_renewals: dict[int, tuple[weakref.ref[Any], Callable[[Any], object]]] = {}  # in the order in which they were asked for
_numbers: Final = iter(range(1 << 62))


def after_fork(owner: T, renew: Callable[[T], object]) -> None:
    """Have `renew(owner)` called in each forked child, as long as there is the owner, which may be a module."""
    number = next(_numbers)
    _renewals[number] = weakref.ref(owner, lambda _: _renewals.pop(number, None)), renew


@overload
def make_lock(owner: Any, name: str) -> threading.Lock: ...
@overload
def make_lock(owner: Any, name: str, make: Callable[[], T]) -> T: ...
def make_lock(owner: Any, name: str, make: Callable[[], Any] = threading.Lock) -> Any:
    """A lock that is to be the attribute `name` of its owner, where a forked child finds a new one.

    Whoever is inside it at the fork leaves the old one, so that it is looked up each time that it is taken.
    """
    after_fork(owner, lambda found: vars(found).update({name: make()}))
    return make()


def _renew_all() -> None:
    for owner, renew in list(_renewals.values()):
        found = owner()
        if found is not None:
            renew(found)
    if sys.version_info < (3, 12):
        _renew_properties()


def _renew_properties() -> None:
    """Before Python 3.12, a `cached_property` has one lock for all objects, held while a value is computed."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _PACKAGE:
            for kind in list(vars(module).values()):
                if isinstance(kind, type) and kind.__module__ == name:
                    for part in list(vars(kind).values()):
                        if isinstance(part, functools.cached_property):
                            vars(part).update(lock=threading.RLock())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_renew_all)

"""What was worked out of late, by the values it follows from: a server's requests differ in little."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Final, Generic, TypeVar

from unspool.registry.tables import count_changes

T = TypeVar("T")

_PLAIN: Final = frozenset({str, int, float, bool, type(None)})
_MOST_KEPT: Final = 64
_LONGEST: Final = 256  # values of a list


class Memo(Generic[T]):
    """The results of the last calls; all are forgotten when there are too many."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, T] = {}

    def find(self, key: Hashable | None) -> T | None:
        """What was kept for equal values; None if nothing was, or if they can't be compared (a key of None)."""
        return None if key is None else self._kept.get(key)

    def keep(self, key: Hashable, result: T) -> None:
        """Keep a result."""
        if len(self._kept) >= _MOST_KEPT:
            self._kept.clear()
        self._kept[key] = result


def describe_values(*layers: Mapping[str, Any]) -> tuple[Any, ...] | None:
    """A key for mappings of plain values and short lists of them, equal for equal ones; None if they hold others.

    It also stands for what plug-ins have registered by now.
    """
    described: list[Any] = [count_changes()]
    for values in layers:
        kinds, held = tuple(map(type, values.values())), list(values.values())
        for place, kind in enumerate(kinds):
            if kind not in _PLAIN:
                held[place] = _freeze(held[place])
                if held[place] is None:
                    return None
        described += (tuple(values), kinds, tuple(held))  # the kinds too: True is equal to 1, and means something else
    return tuple(described)


def _freeze(value: Any) -> tuple[Any, ...] | None:
    """A list of plain values, a set of names or an empty dict as a tuple; None for anything else."""
    if type(value) in (list, tuple, frozenset) and len(value) <= _LONGEST and _PLAIN.issuperset(map(type, value)):
        return (tuple(map(type, value)), tuple(value)) if type(value) is not frozenset else (value,)
    return () if type(value) is dict and not value else None

"""What was worked out of late, by the values it follows from: a server's requests differ in little."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Final, Generic, TypeVar

from unspool.config import BaseWatermarkingConfig
from unspool.registry.tables import count_changes

T = TypeVar("T")

_PLAIN: Final = frozenset({str, int, float, bool, type(None)})
_MOST_KEPT: Final = 64
_LONGEST: Final = 256  # values of a list or a dict
_DEEPEST: Final = 8  # of these in each other


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
    """A key for mappings of plain values, of short lists and dicts of them and of watermarks' settings, equal for equal
    ones; None if they hold others.

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


def _freeze(value: Any, depth: int = 0) -> tuple[Any, ...] | None:
    """A list, a set of names, a dict or a watermark's settings as a tuple; None for anything else."""
    kind = type(value)
    if isinstance(value, BaseWatermarkingConfig):
        kind, value = type(value), vars(value)
    elif kind not in (list, tuple, frozenset, dict):
        return None
    if len(value) > _LONGEST or depth > _DEEPEST:
        return None
    if kind is frozenset:
        return (value,) if _PLAIN.issuperset(map(type, value)) else None
    held = [*value.keys(), *value.values()] if isinstance(value, dict) else list(value)
    kinds = tuple(map(type, held))
    for place, own in enumerate(kinds):
        if own not in _PLAIN:
            held[place] = _freeze(held[place], depth + 1)
            if held[place] is None:
                return None
    return kind, kinds, tuple(held)

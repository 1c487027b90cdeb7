"""A table of entries: the built-in ones in their order, and those that others register."""

from __future__ import annotations

import re
from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, ValuesView
from typing import Any, Generic, TypeVar

from unspool.errors import PluginError
from unspool.registry.plugins import load_plugins

Entry = TypeVar("Entry")

_NAME = re.compile(r"[A-Za-z][\w.-]{0,99}", re.ASCII)
_changes = 0


def count_changes() -> int:
    """A number that changes whenever any table does: what is derived from tables is made anew then."""
    return _changes


class Table(Mapping[str, Entry], Generic[Entry]):
    """Entries by name, in order. Reading it loads the plug-ins first, once."""

    def __init__(
        self,
        what: str,
        built_in: Iterable[Entry],
        name_of: Callable[[Entry], str],
        check: Callable[[Any], None] | None = None,
    ) -> None:
        """`check` raises a PluginError for an entry that can't be added."""
        self.what = what
        self._name_of, self._check = name_of, check
        self._entries = {name_of(entry): entry for entry in built_in}
        self._built_in = frozenset(self._entries)

    def __getitem__(self, name: str) -> Entry:
        load_plugins()
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        load_plugins()
        return iter(self._entries)

    def __len__(self) -> int:
        load_plugins()
        return len(self._entries)

    def values(self) -> ValuesView[Entry]:
        """The entries; the dict's own view, because every call goes through some tables several times."""
        load_plugins()
        return self._entries.values()

    def items(self) -> ItemsView[str, Entry]:
        """The names and entries, likewise."""
        load_plugins()
        return self._entries.items()

    @property
    def built_in(self) -> tuple[Entry, ...]:
        """The entries that unspool itself has; reading them loads no plug-ins."""
        return tuple(entry for name, entry in self._entries.items() if name in self._built_in)

    def check(self, entry: Entry) -> None:
        """Raise a PluginError if an entry can't be added."""
        try:
            name = self._name_of(entry)
        except (AttributeError, TypeError, IndexError) as error:
            raise PluginError(f"the entry of a {self.what} is wrong: {error}") from error
        if name in self._entries:
            raise PluginError(f"there is a {self.what} {name!r} already; give yours another name")
        if self._check is not None:
            self._check(entry)
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise PluginError(f"a {self.what} needs a name of letters, digits, '_', '.' and '-', not {name!r:.80}")

    def add(self, entry: Entry) -> None:
        """Add an entry: behind the entry that its `after` names, or last."""
        self.check(entry)
        after = getattr(entry, "after", None)
        if after is not None and after not in self._entries:
            raise PluginError(
                f"the {self.what} {self._name_of(entry)!r} is to come after {after!r}, which there is not"
            )
        entries: dict[str, Entry] = {}
        for name, one in self._entries.items():
            entries[name] = one
            if name == after:
                entries[self._name_of(entry)] = entry
        self._entries = entries if after is not None else {**entries, self._name_of(entry): entry}
        _note_change()

    def remove(self, entry: Entry) -> None:
        """Take back an entry that was added; a built-in one stays."""
        name = self._name_of(entry)
        if self._entries.get(name) is not entry or name in self._built_in:
            raise PluginError(f"{name!r} is not a {self.what} that was registered")
        self._entries = {known: one for known, one in self._entries.items() if known != name}
        _note_change()


def _note_change() -> None:
    global _changes
    _changes += 1

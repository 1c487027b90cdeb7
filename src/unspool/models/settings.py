"""Reading numbers and names out of a `config.json` or a GGUF header, checked and bounded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from unspool.errors import LoadError, UnsupportedError
from unspool.models.bounds import INTEGERS, MOST_TOKENS, NUMBERS
from unspool.numeric import is_number

_REQUIRED: Final = object()
T = TypeVar("T")


class Settings:
    """An untrusted mapping, read value by value; a value of the wrong kind raises an error that names it."""

    def __init__(self, values: Mapping[str, Any], where: str = "config.json", prefix: str = "") -> None:
        self.values = values
        self.where = where
        self._prefix = prefix

    def find(self, *names: str) -> Any:
        """The value of the first name that is present and not null; None otherwise."""
        for name in names:
            value = self.values.get(self._prefix + name)
            if value is not None:
                return value
        return None

    def has(self, name: str) -> bool:
        """Whether the name is present and not null."""
        return self.find(name) is not None

    def part(self, name: str) -> Settings | None:
        """A mapping inside this one."""
        value = self.find(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(name, value, "a mapping")
        return Settings(value, f"{self.where}'s {name}")

    def integer(self, *names: str, default: Any = _REQUIRED) -> int:
        """A whole number within the bounds of its name."""
        value = self._get(names, default)
        least, most = INTEGERS[names[0]]
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            raise self._wrong(names[0], value, f"a whole number from {least} to {most}")
        return value

    def number(self, *names: str, default: Any = _REQUIRED) -> float:
        """A finite number within the bounds of its name."""
        value = self._get(names, default)
        least, most = NUMBERS[names[0]]
        if not is_number(value) or not least <= value <= most:
            raise self._wrong(names[0], value, f"a number from {least:g} to {most:g}")
        return float(value)

    def optional_number(self, name: str, default: float | None = None) -> float | None:
        """A number as above, or None if the file says null."""
        return default if self._is_absent(name) else self.number(name) if self.has(name) else None

    def optional_integer(self, name: str, default: int | None = None) -> int | None:
        """A whole number as above, or None if the file says null."""
        return default if self._is_absent(name) else self.integer(name) if self.has(name) else None

    def _is_absent(self, name: str) -> bool:
        return self._prefix + name not in self.values

    def boolean(self, *names: str, default: bool) -> bool:
        """True or false."""
        value = self._get(names, default)
        if not isinstance(value, bool):
            raise self._wrong(names[0], value, "true or false")
        return value

    def text(self, *names: str, default: Any = _REQUIRED) -> str:
        """A short string."""
        value = self._get(names, default)
        if not isinstance(value, str) or len(value) > 200:
            raise self._wrong(names[0], value, "a short string")
        return value

    def token(self, name: str) -> int | None:
        """A token id, or None."""
        ids = self.tokens(name)
        return ids[0] if isinstance(ids, tuple) else ids  # never an empty tuple

    def tokens(self, name: str) -> int | tuple[int, ...] | None:
        """A token id, several, or None."""
        value = self.find(name)
        if value is None:
            return None
        ids = value if isinstance(value, list | tuple) else [value]
        if not ids or len(ids) > 10_000 or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise self._wrong(name, value, "a token id or a list of them")
        if any(not -1 <= i < MOST_TOKENS for i in ids):
            raise self._wrong(name, value, "token ids that are not negative")
        kept = tuple(i for i in ids if i >= 0)  # some files say -1 for "none"
        return None if not kept else kept if isinstance(value, list | tuple) else kept[0]

    def refuse(self, name: str, *values: Any, because: str) -> None:
        """Raise if a setting has one of the values that this version does not support."""
        value = self.find(name)
        if value is not None and value in values:
            raise UnsupportedError(f"{self.where} has {name}={value!r}: {because}")

    def _get(self, names: tuple[str, ...], default: Any) -> Any:
        value = self.find(*names)
        if value is not None:
            return value
        if default is _REQUIRED:
            asked = " or ".join(self._prefix + name for name in names)
            raise LoadError(f"{self.where} has no {asked}, without which this model can't be built")
        return default

    def _wrong(self, name: str, value: Any, wanted: str) -> LoadError:
        return LoadError(f"{self.where} has {self._prefix}{name}={value!r:.100}, where {wanted} is needed")

"""Messages that name settings, in the words of the caller who reads them.

A message is text with settings in between. In Python a setting has the library's name; a client of the server reads the
name of the field that it sent. So a message keeps its settings apart from its text, and `Names` words them.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from string import Formatter
from typing import Any, Final


@dataclass(frozen=True)
class Setting:
    """A setting that a message names, alone or with a value."""

    name: str
    value: str | None = None
    is_advice: bool = False  # the value is one to give; otherwise it is the one that the setting has


class Names:
    """What settings are called: here, as the library calls them."""

    def word(self, setting: Setting) -> str:
        """A setting, and its value if it has one, as a message shows it."""
        if setting.value is None:
            return f"`{setting.name}`"
        if setting.is_advice:
            return f"`{setting.name}={setting.value}`"
        return f"`{setting.name}`={setting.value}"


_LIBRARY: Final = Names()
_FORMATTER: Final = Formatter()


@dataclass(frozen=True)
class Wording:
    """A message: text, and the settings that it names."""

    parts: tuple[str | Setting, ...]

    def __str__(self) -> str:
        return self.say(_LIBRARY)

    @property
    def settings(self) -> tuple[Setting, ...]:
        """The settings that it names, in their order."""
        return tuple(part for part in self.parts if isinstance(part, Setting))

    def say(self, names: Names) -> str:
        """The message in these names."""
        return "".join(part if isinstance(part, str) else names.word(part) for part in self.parts)


def word(template: str, **values: Any) -> Wording:
    """The message of a template in the form of `str.format`.

    A name in braces that is not among `values` is a setting: `{top_k}`, `{top_k:is 5}` with the value that it has,
    `{top_k:=5}` with one to give. A value that is a `Setting` is named in the same way, and a `Wording` is put in.
    """
    known = _Known(values)
    parts: list[str | Setting] = []
    for text, field, spec, conversion in _FORMATTER.parse(template):
        parts.append(text)
        if field is None:
            continue
        value = _FORMATTER.convert_field(_FORMATTER.get_field(field, (), known)[0], conversion)
        spec = _FORMATTER.vformat(spec, (), known) if spec else ""
        if isinstance(value, Wording):
            parts += value.parts
        elif isinstance(value, Setting):
            parts.append(_read_spec(value, spec))
        else:
            parts.append(format(value, spec))
    return Wording(tuple(part for part in parts if part != ""))


def about(setting: str | Setting, text: str) -> Wording:
    """A message that begins with a setting, and names no other."""
    named = Setting(setting) if isinstance(setting, str) else setting
    return Wording((named, text if text.startswith((":", ",")) else f" {text}"))


def suggest(name: str, known: Iterable[str], write: Callable[[str], str] = repr, *, nearness: float = 0.65) -> str:
    """`; did you mean …?` for the known name that an unknown one was probably meant to be, or nothing.

    That is one with nearly the same letters, the only one that begins with the word (`stop`) or its letters (`temp`) or
    the shortest of several, or the nearest, with a likeness of at least `nearness`.
    """
    name, names = name[:64], list(dict.fromkeys(known))
    found = difflib.get_close_matches(name, names, n=1, cutoff=0.85)
    for start in (f"{name}_", name) if len(name) > 2 else ():
        begun = sorted((one for one in names if one.startswith(start)), key=len)
        is_certain = len(begun) == 1 or (len(begun) > 1 and len(begun[0]) < len(begun[1]))
        found = found or (begun[:1] if is_certain else [])
    found = found or difflib.get_close_matches(name, names, n=1, cutoff=nearness)
    return f"; did you mean {write(found[0])}?" if found else ""


def _read_spec(setting: Setting, spec: str) -> Setting:
    if not spec:
        return setting
    if spec.startswith("="):
        return Setting(setting.name, spec[1:], is_advice=True)
    return Setting(setting.name, spec.removeprefix("is "))


class _Known(dict[str, Any]):
    """The values that a template may name; what is none of them is a setting."""

    def __missing__(self, name: str) -> Setting:
        return Setting(name)

"""What a generation setting is: its name, its default, and what it may be."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from typing import Any, Literal

from unspool.config.named import NamedSettings
from unspool.errors import SettingError
from unspool.registry import resolve

Kind = Literal[
    "flag",  # true or false
    "integer",
    "number",
    "text",
    "texts",  # one string or a list of them
    "choice",  # one of `choices`
    "ids",  # one token id or a list of them
    "id list",
    "id lists",  # lists of token ids, nested once or twice
    "layers",  # "low", "high" or a list of layer indices
    "bias",  # token sequences and the number added to the logit of their last token
    "token bias",  # {token id: number}
    "decay",  # (start, factor)
    "forced ids",  # pairs of index and token id
    "schema",  # a JSON schema: a dict, its text, or a Python type
    "long text",  # of a regular expression or a grammar
    "choices",  # a list of texts
    "tags",  # a dict with triggers and structures
    "object",
]
Group = Literal[
    "length",
    "strategy",
    "sampling",
    "control",
    "output",
    "special tokens",
    "assistance",
    "cache",
    "performance",
]

_TYPED: dict[Kind, str] = {"flag": "true or false", "integer": "a whole number", "number": "a number"}
LARGEST_COUNT = 2**31 - 1


@dataclass(frozen=True)
class Parameter:
    """One generation setting: what it is called, what it is when it is not set, and what it may be."""

    name: str
    default: Any
    kind: Kind
    group: Group
    help: str
    at_least: float | None = None
    at_most: float | None = None
    choices: tuple[Any, ...] = ()
    may_be_per_row: bool = False
    off: tuple[Any, ...] = ()  # values, beside None, that turn it off
    needs: tuple[str, ...] = ()  # settings one of which must be on, or this one is not read
    yields_to: str = ""  # another setting: where that has a value, if only one that turns it off, this one is not read
    is_ours: bool = False  # the reference has no setting of this name
    named_by: str = ""  # a table whose names are choices too, as a reference

    @property
    def all_choices(self) -> tuple[Any, ...]:
        """What a "choice" may be; the table that names some is imported here."""
        return (*(resolve(self.named_by) if self.named_by else ()), *self.choices)

    def is_overridden(self, settings: NamedSettings) -> bool:
        """Whether the setting that it yields to has a value."""
        return bool(self.yields_to) and getattr(settings, self.yields_to) is not None

    def copy_default(self) -> Any:
        """The default, for a config of its own."""
        default = self.default
        return copy.copy(default) if isinstance(default, (list, dict)) else default

    def holds_rows(self, value: Any) -> bool:
        """Whether a value is a list with one for each row, and not one for all."""
        if not self.may_be_per_row or not isinstance(value, (list, tuple)):
            return False
        return self.kind != "choices" or not any(isinstance(one, str) for one in value)

    def parse(self, text: str) -> Any:
        """Read a value typed by a person (`--temperature 0.3`, `/set temperature 0.3`)."""
        word = text.strip()
        if word.lower() in ("none", "null"):
            return None
        if self.kind in ("text", "long text") or (self.kind == "texts" and not word.startswith("[")):
            return text
        if word.lower() in ("true", "on", "yes") and self.kind in ("flag", "choice"):
            return True
        if word.lower() in ("false", "off", "no") and self.kind in ("flag", "choice"):
            return False
        if self.kind in ("choice", "layers") and not word.startswith("["):
            return word
        if self.kind == "choices" and not word.startswith("["):
            return [text]
        try:
            return json.loads(word)
        except (ValueError, RecursionError) as error:  # not JSON, or a number of thousands of digits
            shown = text if len(text) <= 80 else text[:80] + "…"
            wanted = f"it must be {_TYPED.get(self.kind, 'JSON, such as [1, 2]')}. {self.help}"
            raise SettingError(f"`{self.name}` can't be read from {shown!r}: {wanted}") from error


def make_flag(name: str, default: bool | None, group: Group, text: str, **more: Any) -> Parameter:
    """A setting that is true or false."""
    return Parameter(name, default, "flag", group, text, **more)


def make_count(
    name: str, default: int | None, group: Group, text: str, at_least: int = 0, per_row: bool = False, **more: Any
) -> Parameter:
    """A whole number from `at_least` on, one for all or one per row."""
    return Parameter(
        name, default, "integer", group, text, at_least=at_least, at_most=LARGEST_COUNT, may_be_per_row=per_row, **more
    )


def make_number(
    name: str, default: float | None, group: Group, text: str, per_row: bool = False, **more: Any
) -> Parameter:
    """A finite number, one for all or one per row."""
    return Parameter(name, default, "number", group, text, may_be_per_row=per_row, **more)


def make_token(name: str, text: str, kind: Kind = "integer", group: Group = "special tokens", **more: Any) -> Parameter:
    """A token id, or several; negative ones are let through, because -1 is a common way to say "no such token"."""
    return Parameter(name, None, kind, group, text, at_least=-LARGEST_COUNT, at_most=LARGEST_COUNT, **more)


def make_other(name: str, kind: Kind, group: Group, text: str, default: Any = None, **more: Any) -> Parameter:
    """A setting of another kind."""
    return Parameter(name, default, kind, group, text, **more)

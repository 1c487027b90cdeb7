"""Which settings ask for a structured text."""

from __future__ import annotations

from typing import Final

from unspool.config.named import NamedSettings
from unspool.config.parameters import PARAMETERS

STRUCTURES: Final = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag")
"""The settings that keep a text to a grammar; a call has one of them."""


def list_structures(settings: NamedSettings) -> list[str]:
    """Those that are on."""
    values = {name: getattr(settings, name) for name in STRUCTURES}
    return [name for name, value in values.items() if value is not None and value not in PARAMETERS[name].off]


def find_structure(settings: NamedSettings) -> str | None:
    """The one that is on."""
    return next(iter(list_structures(settings)), None)

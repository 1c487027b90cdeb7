"""Which settings ask for a structured text."""

from __future__ import annotations

from typing import Final

from unspool.config.named import NamedSettings
from unspool.config.parameters import is_on

STRUCTURES: Final = ("json_schema", "json_object", "regex", "choice", "grammar", "structural_tag")
"""The settings that keep a text to a grammar; a call has one of them."""


def list_structures(settings: NamedSettings) -> list[str]:
    """Those that are on."""
    return [name for name in STRUCTURES if is_on(settings, name)]


def find_structure(settings: NamedSettings) -> str | None:
    """The one that is on."""
    return next(iter(list_structures(settings)), None)

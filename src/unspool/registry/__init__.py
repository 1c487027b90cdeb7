"""Tables of parts (processors, stops, …), and how others add to them; settings are read from here without torch."""

from __future__ import annotations

from unspool.registry.plugins import load_plugins, register, unregister
from unspool.registry.references import Reference, check_maker, find_home, find_name, is_from, resolve
from unspool.registry.tables import Table

__all__ = [
    "Reference",
    "Table",
    "check_maker",
    "find_home",
    "find_name",
    "is_from",
    "load_plugins",
    "register",
    "resolve",
    "unregister",
]

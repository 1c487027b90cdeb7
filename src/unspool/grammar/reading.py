"""A structured text read back: the value that it stands for."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from typing import Any

from unspool.config import PARAMETERS, GenerationConfig
from unspool.config.shapes import is_shape, read_value
from unspool.config.structures import find_structure

Read = Callable[[str], Any]


def find_readers(settings: GenerationConfig, num_rows: int) -> list[Read | None] | None:
    """How the text of each row is read back; None if no row's has a structure."""
    name = find_structure(settings)
    if name is None:
        return None
    value = getattr(settings, name)
    values = list(value) if PARAMETERS[name].holds_rows(value) else [value]
    return [_find_reader(name, values[row * len(values) // num_rows]) for row in range(num_rows)]


def _find_reader(name: str, value: Any) -> Read | None:
    if value is None or value is False:
        return None
    if name == "json_schema" and is_shape(value):
        return partial(read_value, value)
    return json.loads if name in ("json_schema", "json_object") else str

"""Models of `transformers` as models of unspool. transformers is imported only here, and only when it is needed."""

from unspool.models.adapters.columns import ColumnModel, prepare_call
from unspool.models.adapters.door import (
    Adapted,
    adapt,
    find_adapter,
    find_settings,
    is_transformers_model,
    list_inputs,
    open_call,
    runs_own_generate,
)
from unspool.models.adapters.outputs import dress_output
from unspool.models.adapters.settings import convert_values, is_theirs, read_settings

__all__ = [
    "Adapted",
    "ColumnModel",
    "adapt",
    "convert_values",
    "dress_output",
    "find_adapter",
    "find_settings",
    "is_theirs",
    "is_transformers_model",
    "list_inputs",
    "open_call",
    "prepare_call",
    "read_settings",
    "runs_own_generate",
]

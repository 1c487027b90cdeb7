"""transformers models that take more than tokens and keys: run in the columns and with the caches of transformers."""

from unspool.models.adapters.columns.codebooks import has_codebooks, prepare_codebooks
from unspool.models.adapters.columns.model import ColumnModel
from unspool.models.adapters.columns.preparation import prepare_call
from unspool.models.adapters.columns.texts import TextModel

__all__ = ["ColumnModel", "TextModel", "has_codebooks", "prepare_call", "prepare_codebooks"]

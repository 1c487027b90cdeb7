"""Finding the model in what a caller passes."""

from __future__ import annotations

from typing import Any

from unspool.errors import SettingError
from unspool.models.adapters import adapt, is_transformers_model
from unspool.protocols import Model


class Holder:
    """An object that callers pass in place of the model that it holds."""

    core: Any  # a native model, or a transformers object


def find_object(model: Any) -> Any:
    """The transformers object in what a caller passes; None if there is none."""
    core = _unwrap(model)
    return core if is_transformers_model(core) else None


def _unwrap(model: Any) -> Any:
    if isinstance(model, Holder):
        return model.core
    return getattr(model, "model", model) if hasattr(model, "tokenizer") else model


def as_model(model: Any) -> Model:
    """The model that decodes: a native one, as it is or out of a LanguageModel, or a transformers one's adapter."""
    core = _unwrap(model)
    if hasattr(core, "info") and hasattr(core, "new_cache"):
        known: Model = core
        return known
    if is_transformers_model(core):
        return adapt(core)
    kind = f"{type(core).__module__}.{type(core).__name__}"
    raise SettingError(f"{kind} is not a model that unspool knows; load one with unspool.load(name_or_path)")

"""The model under whatever a caller holds."""

from __future__ import annotations

from typing import Any

from unspool.errors import SettingError, UnsupportedError
from unspool.protocols import Model


def as_model(model: Any) -> Model:
    """A native model, out of a LanguageModel or as it is; anything else is refused with the way to load it."""
    core = getattr(model, "model", model) if hasattr(model, "tokenizer") else model
    if hasattr(core, "info") and hasattr(core, "new_cache"):
        return core  # type: ignore[no-any-return]  # satisfies the protocol
    kind = f"{type(core).__module__}.{type(core).__name__}"
    if kind.startswith("transformers."):
        raise UnsupportedError(
            f"{kind} is a transformers model; the adapter for those is yet to come. "
            "Save it with save_pretrained(folder) and load it natively: unspool.load(folder)"
        )
    raise SettingError(f"{kind} is not a model that unspool knows; load one with unspool.load(name_or_path)")

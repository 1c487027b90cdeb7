"""Finding the model in what a caller passes."""

from __future__ import annotations

import os
from os import PathLike
from typing import Any

from unspool.errors import SettingError, UnsupportedError, excerpt
from unspool.models.adapters import adapt, check_followed, find_preparing_hook, is_transformers_model
from unspool.protocols import Model
from unspool.registry import is_from


class Holder:
    """An object that callers pass in place of the model that it holds."""

    core: Any  # a native model, or a transformers object


def find_object(model: Any) -> Any:
    """The transformers object in what a caller passes; None if there is none."""
    core = _unwrap(model)
    return core if is_transformers_model(core) else None


def is_wrapped_by_peft(model: Any) -> bool:
    """Whether a model is PEFT's, around one of transformers."""
    return any(is_from(kind, "peft") and kind.__name__ == "PeftModel" for kind in type(model).__mro__)


def _unwrap(model: Any) -> Any:
    if is_wrapped_by_peft(model):
        # Adapters lie within the model's own layers; trained prompts are brought in by PEFT's generate() alone.
        return model if model.active_peft_config.is_prompt_learning else model.get_base_model()
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
        remedy = "call unspool.generate(model, …)"
        check_followed(core, remedy)
        if (hook := find_preparing_hook(core)) is not None:
            raise UnsupportedError(
                f"the {hook}() of this {type(core).__name__} is not transformers' own, and only a call with the whole "
                f"prompt follows it; {remedy}"
            )
        return adapt(core)
    if is_wrapped_by_peft(core):
        raise UnsupportedError(
            f"the prompts of this {type(core).__name__} are brought in by its own generate(); call "
            "unspool.generate(model, …), which runs that one"
        )
    if isinstance(core, str | PathLike):
        raise SettingError(
            f"{excerpt(os.fspath(core))} names a model, and this takes one that is loaded: "
            f"lm = unspool.load({excerpt(os.fspath(core))}), and give lm"
        )
    kind = f"{type(core).__module__}.{type(core).__name__}"
    raise SettingError(f"{kind} is not a model that unspool knows; load one with unspool.load(name_or_path)")

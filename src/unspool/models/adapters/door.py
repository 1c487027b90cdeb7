"""Recognising a transformers model, checking that it can be decoded, and finding its adapter."""

from __future__ import annotations

from typing import Any

from unspool.config import GenerationConfig
from unspool.errors import SettingError
from unspool.models.adapters.decoder import AdaptedDecoder
from unspool.models.adapters.description import describe, explain_training
from unspool.models.adapters.pair import AdaptedPair
from unspool.models.adapters.settings import convert_settings

Adapted = AdaptedDecoder | AdaptedPair
_PLACE = "_unspool_adapter"  # attribute of a model that holds its adapter, which lives as long as the model


def is_transformers_model(model: Any) -> bool:
    """Whether an object is a transformers model or a subclass of one; imports nothing."""
    return any(kind.__name__ == "PreTrainedModel" and _is_theirs(kind) for kind in type(model).__mro__)


def adapt(model: Any) -> Adapted:
    """The adapter of a transformers model: the same one every time, until its attention implementation changes."""
    reason = explain_training(model)
    if reason is not None:
        raise SettingError(
            f"this {type(model).__name__} is in training mode and {reason}, so its answers would be random or wrong; "
            "call model.eval() first"
        )
    attention = getattr(model.config, "_attn_implementation", None)
    known = model.__dict__.get(_PLACE)
    if known is None or known[0] != attention:
        description = describe(model)
        kind = AdaptedPair if description.info.is_encoder_decoder else AdaptedDecoder
        known = model.__dict__[_PLACE] = (attention, kind(model, description))
    adapter: Adapted = known[1]
    return adapter


def find_settings(config: Any) -> GenerationConfig | None:
    """A transformers GenerationConfig as ours; None for anything else."""
    if any(kind.__name__ == "GenerationConfig" and _is_theirs(kind) for kind in type(config).__mro__):
        return convert_settings(config)
    return None


def _is_theirs(kind: type) -> bool:
    return kind.__module__.split(".")[0] == "transformers"

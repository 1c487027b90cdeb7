"""A draft model at the door: is it one, does it speak the model's tokens, and what its own file says of drafting."""

from __future__ import annotations

from typing import Any

from unspool.api.core import as_model
from unspool.config import GenerationConfig
from unspool.errors import SettingError
from unspool.plan import Origin
from unspool.protocols import Model

_FOLLOWED = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")


def read_assistant(assistant: Any, model: Model, tokenizer: Any) -> Model:
    """The draft model; raises where its tokens are others than the model's."""
    core = as_model(assistant)
    if core is model:
        raise SettingError(
            "`assistant_model` is the model itself, which can't be ahead of itself; use assistant_early_exit to draft "
            "with its first layers"
        )
    if core.device != model.device:
        raise SettingError(
            f"`assistant_model` is on {core.device} and the model on {model.device}; load both on one device"
        )
    other = getattr(assistant, "tokenizer", None)
    if tokenizer is not None and other is not None and hasattr(tokenizer, "get_vocab") and hasattr(other, "get_vocab"):
        _compare(tokenizer.get_vocab(), other.get_vocab())
    return core


def _compare(own: dict[str, int], other: dict[str, int]) -> None:
    """Vocabularies are the same or they are not: equal sizes say nothing."""
    if own == other:
        return
    differing = next((token for token, place in own.items() if other.get(token) != place), None)
    what = (
        f"{differing!r} is {own[differing]} in one and {other.get(differing)} in the other"
        if differing
        else (f"one has {len(own)} tokens, the other {len(other)}")
    )
    raise SettingError(
        f"`assistant_model` has another tokenizer than the model ({what}), so its drafts would mean other texts; "
        "use a draft model of the same tokenizer, or prompt_lookup_num_tokens"
    )


def follow_assistant(settings: GenerationConfig, origins: dict[str, Origin], assistant: Any) -> None:
    """Take what the draft model's own settings say of drafting, where the call says nothing."""
    config = getattr(assistant, "generation_config", None)
    if not isinstance(config, GenerationConfig):
        return
    for name in _FOLLOWED:
        if name in config.explicit and origins[name] not in ("config", "call"):
            setattr(settings, name, getattr(config, name))
            origins[name] = "model"

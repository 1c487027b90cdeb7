"""The rows of what a model of transformers' is given and keeps: repeated, and picked when rows move or leave."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch

from unspool.errors import UnsupportedError
from unspool.models.adapters.columns.held import list_tensors


def repeat_inputs(model: Any, inputs: dict[str, Any], ids: torch.Tensor, copies: int) -> dict[str, Any]:
    """A model's inputs for prompts of ids (rows, columns) that are continued in several rows each, by its own rule.

    It writes in outputs, and looks for pictures' places among tokens, or among embeddings where there are no tokens.
    """
    is_pair = bool(getattr(model.config, "is_encoder_decoder", False))
    given = {name: copy.copy(value) if name == "encoder_outputs" else value for name, value in inputs.items()}
    if (media := given.get("mm_encoder_outputs")) is not None:
        given["mm_encoder_outputs"] = {name: copy.copy(made) for name, made in media.items()}
    ids = ids if bool(ids.any()) else ids[:, :0]
    _, repeated = model._expand_inputs_for_generation(
        expand_size=copies, is_encoder_decoder=is_pair and "encoder_outputs" in given, input_ids=ids, **given
    )
    return dict(repeated)


def pick(value: Any, index: torch.Tensor, rows: int) -> Any:
    """What belongs to the rows at `index` of an input that has one entry per row."""
    if is_memory(value):
        return _pick_memory(copy.deepcopy(value), index, rows)
    if isinstance(value, torch.Tensor):
        return value.index_select(0, index.to(value.device)) if value.dim() and value.shape[0] == rows else value
    if isinstance(value, dict):  # what an encoder returned is a mapping too
        made = copy.copy(value)
        for name, part in value.items():
            if isinstance(part, torch.Tensor):
                made[name] = pick(part, index, rows)
        return made
    return value


def is_memory(value: Any) -> bool:
    """Whether an input is an object of transformers' in which something is kept from pass to pass, as the caches of a
    sound's encoder are; outputs are mappings, and have no such thing."""
    is_theirs = type(value).__module__.startswith("transformers.") and hasattr(value, "__dict__")
    return is_theirs and not isinstance(value, Mapping | torch.nn.Module)


def _pick_memory(value: Any, index: torch.Tensor, rows: int) -> Any:
    """Such an object with the rows at `index`, in place; parts of it may be objects too."""
    if hasattr(value, "reorder_cache"):
        value.reorder_cache(index.to(_find_device(value) or index.device))
        return value
    for name, part in vars(value).items():
        parts = part.values() if isinstance(part, dict) else part if isinstance(part, list) else [part]
        if any(is_memory(one) for one in parts):
            for one in parts:
                _pick_memory(one, index, rows)
        else:
            setattr(value, name, pick_all(part, index, rows))
    return value


def pick_all(value: Any, index: torch.Tensor, rows: int, only: Collection[int] | None = None) -> Any:
    """The same for tensors in lists, tuples and dicts; `only` has the ids of those that are to be picked."""
    if type(value) is dict:
        return {name: pick_all(part, index, rows, only) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(pick_all(part, index, rows, only) for part in value)
    if only is None and is_memory(value):
        return pick(value, index, rows)
    is_picked = isinstance(value, torch.Tensor) and (only is None or id(value) in only)
    return pick(value, index, rows) if is_picked else value


def reorder_past(model: Any, past: Any, index: torch.Tensor, rows: int) -> Any:
    """transformers' cache for the rows at `index`."""
    if hasattr(past, "reorder_cache"):
        parts = [past, *getattr(past, "layers", ())]
        before = [tensor for part in parts for tensor in list_tensors(vars(part))]
        past.reorder_cache(index.to(_find_device(past) or index.device))
        left = {id(tensor) for tensor in before}  # what a model's own classes keep beside keys is still as it was
        for part in parts:
            for name, value in list(vars(part).items()):
                if name != "layers" and left & {id(tensor) for tensor in list_tensors(value)}:
                    setattr(part, name, pick_all(value, index, rows, left))
        return past
    if hasattr(model, "_reorder_cache"):
        device = _find_device(past) or index.device
        return model._reorder_cache(past, index.to(device))
    if isinstance(past, list | tuple):
        return pick_all(past, index, rows)
    raise UnsupportedError(
        f"the rows of transformers' {type(past).__name__} can't be reordered; decode without beams, one sequence a row"
    )


def _find_device(past: Any) -> torch.device | None:
    past = getattr(past, "self_attention_cache", past)
    for layer in getattr(past, "layers", past if isinstance(past, list | tuple) else ()):
        held = layer if isinstance(layer, torch.Tensor) else getattr(layer, "keys", None)
        if isinstance(held, torch.Tensor):
            return held.device
    return None

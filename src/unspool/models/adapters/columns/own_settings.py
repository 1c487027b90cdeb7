"""What a model's class makes of a call's settings and inputs before anything is prepared, by methods of its own.

Voxtral Realtime ends where its sound does, Kyutai's model reads windows of a size in its settings, the talker of
Qwen3-Omni has its code predictor sample if it does. Most classes have nothing of the kind, and nothing is run then.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch

from unspool.config import GenerationConfig
from unspool.errors import UnsupportedError
from unspool.models.adapters.adapted import find_device, name_failures

_READ = ("do_sample", "max_length", "max_new_tokens", "num_beams", "num_return_sequences", "cache_implementation")
_RETURNED = ("output_attentions", "output_hidden_states")  # unspool asks for these itself


def follow_settings(
    model: Any, kwargs: dict[str, Any], config: Any, settings: GenerationConfig
) -> tuple[dict[str, Any], Any]:
    """The call's inputs after the model's own rule, and the settings of transformers' that the rule leaves."""
    streams = sorted(name for name, value in kwargs.items() if inspect.isgenerator(value))
    if streams and overrides(model, "_has_unfinished_sequences"):
        raise UnsupportedError(
            f"`{streams[0]}` of {type(model).__name__} is a stream, whose end its own generate() looks for; use that "
            "one: model.generate(…), or give the whole sound"
        )
    theirs = copy.copy(config)
    for name in _READ:
        setattr(theirs, name, getattr(settings, name) if name in settings.explicit else None)
    if overrides(model, "_prepare_generation_config"):
        with name_failures(model):
            theirs, made = model._prepare_generation_config(theirs, **kwargs)
        kwargs = {name: value for name, value in made.items() if value is not None and name not in _RETURNED}
    return kwargs, theirs


def find_end(model: Any, theirs: Any, settings: GenerationConfig, main: Any, name: str, num_ids: int) -> int | None:
    """The columns, the prompt's among them, at which a model's own rule ends every text; None if it changes nothing."""
    if not overrides(model, "_prepare_generated_length"):
        return None
    arguments: Mapping[str, Any] = {
        "has_default_max_length": "max_length" not in settings.explicit,
        "has_default_min_length": True,
        "model_input_name": name,
        "input_ids_length": num_ids,
        "inputs_tensor": main,
    }
    usual = _find_base(model)._prepare_generated_length
    ends = []
    for rule in (type(model)._prepare_generated_length, usual):
        config = copy.copy(theirs)
        config.max_length = settings.max_length if config.max_length is None else config.max_length
        config.min_length = config.min_length or 0
        with name_failures(model):
            ends.append(rule(model, generation_config=config, **arguments).max_length)
    return None if ends[0] == ends[1] else int(ends[0])


def list_own_processors(model: Any, settings: GenerationConfig) -> list[str]:
    """The names of processors that a model's own rule makes of a call's settings, and transformers' common one not."""
    if not overrides(model, "_get_logits_processor"):
        return []
    config = copy.copy(model.generation_config)
    for name in settings.explicit:
        setattr(config, name, getattr(settings, name))
    prompt = torch.zeros(1, 1, dtype=torch.long, device=find_device(model))
    given: Mapping[str, Any] = {"encoder_input_ids": prompt, "device": find_device(model), "model_kwargs": {}}
    made = []
    for rule in (type(model)._get_logits_processor, _find_base(model)._get_logits_processor):
        with name_failures(model):
            made.append([type(one).__name__ for one in rule(model, config, input_ids_seq_length=1, **given)])
    return [name for name in made[0] if name not in made[1]]


def overrides(model: Any, name: str) -> bool:
    """Whether a model's class has a method of its own in the place of transformers' common one."""
    own = getattr(type(model), name, None)
    return own is not None and own is not getattr(_find_base(model), name, None)


def _find_base(model: Any) -> Any:
    """The class of transformers whose methods all models have that generate."""
    return next((kind for kind in type(model).__mro__ if kind.__name__ == "GenerationMixin"), None)

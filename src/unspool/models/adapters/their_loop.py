"""transformers' own generate(), for objects in whose loop somebody else's code decides."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch

from unspool.config import PARAMETERS, GenerationConfig
from unspool.config.theirs import is_theirs
from unspool.errors import SettingError, UnsupportedError
from unspool.models.adapters.adapted import set_evaluating
from unspool.models.adapters.door import find_mixin, list_inputs, runs_own_generate
from unspool.models.adapters.preparing import find_common
from unspool.plan.origins import refuse_unknown

_OWN: Final = ("assistant_tokenizer", "tokenizer", "use_mtp", "past_key_values", "cache_params", "return_dict")
_ELSEWHERE: Final = {  # ways to decode for which that generate() would fetch code
    "contrastive_search": "contrastive search",
    "dola_generation": "DoLa",
    "group_beam_search": "diverse beams",
    "constrained_beam_search": "constrained beams",
}
_WAY: Final = (
    "num_beams",
    "do_sample",
    "penalty_alpha",
    "top_k",
    "dola_layers",
    "num_beam_groups",
    "constraints",
    "force_words_ids",
    "prompt_lookup_num_tokens",
    "assistant_early_exit",
    "use_mtp",
)


@torch.no_grad()
def run_their_loop(model: Any, hook: str, inputs: Any, arguments: Mapping[str, Any], given: dict[str, Any]) -> Any:
    """Decode by transformers' own generate(), because a model's `hook` is somebody's own, which it calls.

    `arguments` are those of generate() that have a name of their own, `given` its settings and the model's inputs.
    """
    why = f"the {hook}() of this {type(model).__name__} is not transformers' own, so that transformers' loop runs"
    settings = {name: value for name, value in given.items() if name != "native"}
    refuse_unknown(settings, (*list_inputs(model), *_OWN), "generate()")
    config = arguments.get("generation_config")
    for name, value in {**_list_set(config), **settings}.items():
        parameter = PARAMETERS.get(name)
        if parameter is not None and parameter.is_ours and value != parameter.default:
            raise SettingError(
                f"`{name}` is a setting of unspool's, and {why}, which has no such setting; leave it out"
            )
    way = _name_way(model, config, settings, arguments.get("assistant_model"))
    if way in _ELSEWHERE:
        raise UnsupportedError(f"{_ELSEWHERE[way]} is not decoded by transformers, and {why}; leave its settings out")
    own = type(model).generate
    if own is find_mixin().generate or runs_own_generate(model):
        own = find_common()
    kept = {name: value for name, value in arguments.items() if value is not None}
    first = () if inputs is None else (inputs,)
    with set_evaluating(model):
        return own(model, *first, **kept, **settings)


def _list_set(config: Any) -> dict[str, Any]:
    if not isinstance(config, GenerationConfig):
        return {}
    return {name: getattr(config, name) for name in config.explicit}


def _name_way(model: Any, config: Any, settings: Mapping[str, Any], assistant: Any) -> str:
    """The way to decode that a call asks for, by the name that transformers gives it."""
    layers: list[Mapping[str, Any]] = []
    for one in (getattr(model, "generation_config", None), config):
        layers.append(vars(one) if is_theirs(one, "GenerationConfig") else _list_set(one))
    merged = GenerationConfig()
    for layer in (*layers, settings):
        for name in _WAY:
            if layer.get(name) is not None:
                setattr(merged, name, layer[name])
    return merged.get_generation_mode(assistant).value

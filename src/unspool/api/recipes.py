"""A call with `custom_generate`: a recipe's function runs in place of the usual loop."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from unspool.api.core import Holder, as_model, find_object
from unspool.config import PARAMETERS, GenerationConfig, keep_unknown
from unspool.decoding.prompts import mark_columns
from unspool.decoding.run import Run
from unspool.errors import SettingError
from unspool.models.adapters import find_settings, read_settings
from unspool.recipes.running import load_recipe

_LISTS = {"logits_processor", "stopping_criteria"}
_PREPARED = {*_LISTS, "prefix_allowed_tokens_fn", "input_ids", "attention_mask", "inputs_embeds", "tokenizer"}


class RecipeModel(Holder):
    """A native model as recipes see it: everything that it has, `generate` too."""

    def __init__(self, core: Any, generate: Any) -> None:
        self.core = core
        self._generate = generate

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """`unspool.generate` with this model."""
        return self._generate(self, *args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """One pass in the reference's form."""
        return self.core(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.core, name)


def run_recipe(
    recipe: Any,
    generate: Any,
    start: Callable[..., Run],
    model: Any,
    inputs: Any,
    config: Any,
    given: Mapping[str, Any],
    kwargs: dict[str, Any],
) -> Any:
    """Load a recipe and call it with what the call was given.

    It gets `model`, `input_ids`, a `generation_config` in which the model's, the caller's and the call's settings are
    merged, and everything else by its name. Arguments that are None are passed only if the function names them. With a
    transformers object, a function that the call was given (not a folder) gets the processors and criteria that the
    settings make, if it names them, and the mask that pad tokens in a prompt without one stand for: `start` prepares a
    run of the usual loop.
    """
    trusts = kwargs.pop("trust_remote_code", None)
    if trusts not in (None, True, False):
        raise SettingError(f"trust_remote_code={trusts!r:.40} is neither True nor False")
    function = load_recipe(recipe, trusts=bool(trusts), revision=kwargs.pop("revision", None))
    settings = {name: kwargs.pop(name) for name in list(kwargs) if name in PARAMETERS}
    if inputs is not None:
        if kwargs.get("input_ids") is not None:
            raise SettingError("`inputs` and `input_ids` are two names of the same argument; pass one")
        kwargs["input_ids"] = inputs
    arguments = {name: value for name, value in {**given, **kwargs}.items() if value is not None}
    if callable(recipe) and find_object(model) is not None and (named := _LISTS & _list_names(function)):
        known = {name: value for name, value in arguments.items() if name in _PREPARED}
        parts = start(model, None, config, **known, **settings).parts
        made = {"logits_processor": parts.processors, "stopping_criteria": parts.criteria}
        arguments |= {name: made[name] for name in named}
        is_masked = "attention_mask" in arguments or parts.model.info.is_encoder_decoder
        if not is_masked and _takes_mask(function) and not (mask := mark_columns(parts.prompts)).all():
            arguments["attention_mask"] = mask.long()
    arguments["generation_config"] = _merge(model, config, settings)
    shown = (
        model if isinstance(model, Holder) or find_object(model) is not None else RecipeModel(as_model(model), generate)
    )
    return function(model=shown, **arguments, **_fill(function, {*arguments, "model"}, given))


def _merge(model: Any, config: Any, settings: dict[str, Any]) -> GenerationConfig:
    """The settings of a call in one config. Without a length it says 20 new tokens, as generate() writes them."""
    theirs = find_object(model)
    own = read_settings(theirs) if theirs is not None else getattr(as_model(model), "generation_config", None)
    given = config if config is None or isinstance(config, GenerationConfig) else find_settings(config)
    if config is not None and given is None:
        raise SettingError(f"generation_config must be a GenerationConfig, not a {type(config).__name__}")
    values: dict[str, Any] = {}
    for layer in ({name: getattr(one, name) for name in one.explicit} for one in (own, given) if one is not None):
        values = _lay(values, layer)
    values = _lay(values, settings)
    if values.get("max_new_tokens") is None and values.get("max_length") is None:
        values["max_new_tokens"] = 20
    values.setdefault("max_length", None)
    return GenerationConfig(**keep_unknown(values))  # a recipe may read names that nothing else does


def _lay(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Settings over others; the later length counts alone."""
    if {"max_length", "max_new_tokens"} & set(above):
        below = {name: value for name, value in below.items() if name not in ("max_length", "max_new_tokens")}
    return {**below, **above}


def _list_names(function: Any) -> set[str]:
    return {one.name for one in _list_parameters(function) if one.kind is not one.VAR_KEYWORD}


def _takes_mask(function: Any) -> bool:
    return any(one.name == "attention_mask" or one.kind is one.VAR_KEYWORD for one in _list_parameters(function))


def _list_parameters(function: Any) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # a callable that has no signature
        return []


def _fill(function: Any, have: set[str], given: Mapping[str, Any]) -> dict[str, None]:
    """None for the usual arguments that a function names without a default, and that the call does not give."""
    parameters = _list_parameters(function)
    bare = (one for one in parameters if one.default is one.empty and one.kind is not one.VAR_KEYWORD)
    return {one.name: None for one in bare if one.name in given and one.name not in have}

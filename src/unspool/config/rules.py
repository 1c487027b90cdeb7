"""Raises for invalid values, and lists settings that have no effect beside the others."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from unspool.config.compiling import CompileConfig
from unspool.config.conflicts import OF_CONFIG
from unspool.config.named import NamedSettings
from unspool.config.pairs import ConfigFacts, check_methods
from unspool.config.parameter import Parameter
from unspool.config.parameters import CALL_ARGUMENTS, PARAMETERS
from unspool.config.values import check_value
from unspool.config.watermarking import BaseWatermarkingConfig
from unspool.errors import SettingError
from unspool.wording import Setting, Wording, word

EXTRA_OUTPUTS = ("output_attentions", "output_hidden_states", "output_scores", "output_logits")


def check_settings(config: NamedSettings) -> None:
    """Raise a SettingError for the first invalid value, or pair of values."""
    for name in CALL_ARGUMENTS:
        if name in config.__dict__:
            raise SettingError(
                f"Argument `{name}` is not a setting of GenerationConfig. Pass it to `generate()` itself."
            )
    for name, parameter in PARAMETERS.items():
        value = getattr(config, name)
        if value is not parameter.default:
            check_value(parameter, value)
    _check_objects(config)
    check_methods(ConfigFacts(config), *OF_CONFIG)


def _check_objects(config: NamedSettings) -> None:
    cache = config.cache_config
    if cache is not None and not isinstance(cache, dict) and not hasattr(cache, "to_dict"):
        raise SettingError(f"`cache_config` must be a dict or a cache config, but is a {type(cache).__name__}.")
    compiling = config.compile_config
    if compiling is not None and not isinstance(compiling, CompileConfig):
        raise SettingError(f"`compile_config` must be a CompileConfig, but is a {type(compiling).__name__}.")
    if compiling is not None:
        compiling.validate()
    marks = config.watermarking_config
    for mark in marks if isinstance(marks, list) else [marks]:
        if mark is None:
            continue
        if not isinstance(mark, BaseWatermarkingConfig):
            raise SettingError(
                "`watermarking_config` must be a WatermarkingConfig, a SynthIDTextWatermarkingConfig, a "
                "GumbelWatermarkingConfig, the dict of one, or a list with one for each prompt, but is a "
                f"{type(mark).__name__}."
            )
        mark.validate()
    if config.constraints is not None and not isinstance(config.constraints, (list, tuple)):
        raise SettingError("`constraints` must be a list of Constraint objects.")
    if config.generation_kwargs is not None and not isinstance(config.generation_kwargs, dict):
        raise SettingError("`generation_kwargs` must be a dict of further arguments for generate().")


def find_unused(config: NamedSettings) -> dict[str, Wording]:
    """The settings that are set and have no effect as things stand, each with the reason."""
    return dict(_unused(config))


def _differs(value: Any, neutral: Any) -> bool:
    if value is None:
        return False
    if isinstance(value, (list, tuple)) and not isinstance(neutral, (list, tuple)):
        return any(one != neutral for one in value)
    return bool(value != neutral)


def _unused(config: NamedSettings) -> Iterator[tuple[str, Wording]]:
    if config.pad_token_id is not None and config.pad_token_id < 0:
        yield (
            "pad_token_id",
            word(
                "{pad_token_id} should be positive but got {given}: there is no such token to pad with. Set it to the "
                "tokenizer's padding or end token.",
                given=config.pad_token_id,
            ),
        )
    for name, parameter in PARAMETERS.items():
        value = getattr(config, name)
        if value is parameter.default:
            continue
        if parameter.needs and _is_set(parameter, value) and not any(_is_on(config, one) for one in parameter.needs):
            switch = parameter.needs[0]
            reason = _REASONS.get(switch, _COMPANION)
            named = {"name": Setting(name), "switch": Setting(switch)}
            yield name, word(reason, **named, value=value, is_so=getattr(config, switch))


# Why a setting has no effect if the setting that it needs is off.
_REASONS = {
    "do_sample": "{switch} is set to `{is_so}`. However, {name} is set to `{value}`, which is only read when sampling. "
    "Set {switch:=True} or unset {name}.",
    "num_beams": "{switch} is set to 1. However, {name} is set to `{value}`, which is only read by beam search. "
    "Set {switch} above 1 or unset {name}.",
    "use_cache": "{switch} is `False`, so {name}, set to {value}, has no effect.",
    "return_dict_in_generate": "{name} is set, but only an output object can carry it. Set {switch:=True} or unset "
    "{name}.",
}
_COMPANION = "{name} is set to `{value}`, which is only read together with {switch}. Set {switch} too, or unset {name}."


def _is_set(parameter: Parameter, value: Any) -> bool:
    """Whether a value would change something if it were read."""
    return bool(value) != bool(parameter.default) if parameter.kind == "flag" else _differs(value, parameter.default)


def _is_on(config: NamedSettings, switch: str) -> bool:
    parameter = PARAMETERS[switch]
    value = getattr(config, switch)
    if parameter.kind == "flag":  # None is the default
        return bool(parameter.default if value is None else value)
    return _differs(value, parameter.default) and value not in parameter.off

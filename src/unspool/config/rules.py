"""Do the settings go together? What can't be is raised; what is set and has no effect is named."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from unspool.config.compiling import CompileConfig
from unspool.config.parameters import PARAMETERS
from unspool.config.values import check_value
from unspool.config.watermarking import BaseWatermarkingConfig
from unspool.errors import SettingError

if TYPE_CHECKING:
    from unspool.config.generation import GenerationConfig

EXTRA_OUTPUTS = ("output_attentions", "output_hidden_states", "output_scores", "output_logits")
CALL_ARGUMENTS = (
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "synced_gpus",
    "assistant_model",
    "streamer",
    "negative_prompt_ids",
    "negative_prompt_attention_mask",
    "use_model_defaults",
)
# What each setting must be for it to change nothing, outside the strategy that reads it.
SAMPLING_ONLY = {
    "temperature": 1.0,
    "top_p": 1.0,
    "min_p": None,
    "typical_p": 1.0,
    "top_k": 50,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "top_h": None,
    "top_n_sigma": None,
    "top_a": 0.0,
    "xtc_probability": 0.0,
    "mirostat_tau": None,
    "dynatemp_range": 0.0,
}
# Settings that another one must switch on.
COMPANIONS = {
    "repetition_penalty_ignores_prompt": "repetition_penalty",
    "dry_base": "dry_multiplier",
    "dry_allowed_length": "dry_multiplier",
    "dry_sequence_breakers": "dry_multiplier",
    "xtc_threshold": "xtc_probability",
    "mirostat_eta": "mirostat_tau",
    "dynatemp_exponent": "dynatemp_range",
}
BEAMS_ONLY = {
    "early_stopping": False,
    "num_beam_groups": 1,
    "diversity_penalty": 0.0,
    "length_penalty": 1.0,
    "constraints": None,
}
CACHE_ONLY = ("cache_implementation", "cache_config", "return_legacy_cache")
CONFIGURABLE_CACHES = (
    "quantized",
    "quantized_static",
    "static",
    "paged",
    "sink",
    "offloaded",
    "offloaded_static",
    "offloaded_hybrid",
    "quantized_hybrid",
    "offloaded_quantized_hybrid",
)


def check_settings(config: GenerationConfig) -> None:
    """Raise a SettingError for the first value, or pair of values, that can't be."""
    for name in CALL_ARGUMENTS:
        if name in config.__dict__:
            raise SettingError(
                f"Argument `{name}` is not a setting of GenerationConfig. Pass it to `generate()` itself."
            )
    for name, parameter in PARAMETERS.items():
        check_value(parameter, getattr(config, name))
    _check_objects(config)
    _check_returned(config)
    if (config.num_beams or 1) > 1:
        _check_beams(config)


def _check_objects(config: GenerationConfig) -> None:
    cache = config.cache_config
    if cache is not None:
        if config.cache_implementation not in CONFIGURABLE_CACHES:
            raise SettingError(
                f"`cache_config` is set, but cache_implementation={config.cache_implementation!r} has "
                f"nothing to configure. Set `cache_implementation` to one of {CONFIGURABLE_CACHES}, "
                "or unset `cache_config`."
            )
        if not isinstance(cache, dict) and not hasattr(cache, "to_dict"):
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


def _check_returned(config: GenerationConfig) -> None:
    num_returned = 1 if config.num_return_sequences is None else config.num_return_sequences
    num_beams = config.num_beams or 1
    if num_returned == 1:
        return
    if num_beams == 1 and not config.do_sample:
        raise SettingError(
            "Greedy methods without beam search do not support `num_return_sequences` different than 1 "
            f"(got {num_returned}): all would be the same. Set `do_sample=True` or `num_beams`."
        )
    if num_beams > 1 and num_returned > num_beams:
        raise SettingError(
            f"`num_return_sequences` ({num_returned}) has to be smaller than or equal to `num_beams` ({num_beams})."
        )


def _check_beams(config: GenerationConfig) -> None:
    num_groups = config.num_beam_groups or 1
    penalty = config.diversity_penalty or 0.0
    if config.constraints is not None or config.force_words_ids is not None:
        asked, undo = "`constraints` or `force_words_ids` asks for constrained beam search", "unset them"
        is_grouped = num_groups != 1
    elif num_groups != 1 or penalty != 0.0:
        asked, undo = "`num_beam_groups` or `diversity_penalty` asks for group beam search", "unset both"
        is_grouped = False
        if penalty == 0.0:
            raise SettingError(
                "`diversity_penalty` should be greater than 0.0, otherwise the beam groups are identical."
            )
    else:
        return
    if config.do_sample:
        raise SettingError(f"{asked}, which does not sample: set `do_sample=False`, or {undo}.")
    if is_grouped:
        raise SettingError(f"{asked}, which has no groups: set `num_beam_groups=1`, or {undo}.")


def find_unused(config: GenerationConfig) -> dict[str, str]:
    """The settings that are set and have no effect as things stand, each with the reason."""
    return dict(_unused(config))


def _differs(value: Any, neutral: Any) -> bool:
    if value is None:
        return False
    if isinstance(value, (list, tuple)) and not isinstance(neutral, (list, tuple)):
        return any(one != neutral for one in value)
    return bool(value != neutral)


def _unused(config: GenerationConfig) -> Iterator[tuple[str, str]]:
    if config.pad_token_id is not None and config.pad_token_id < 0:
        yield (
            "pad_token_id",
            f"`pad_token_id` should be positive but got {config.pad_token_id}: there is no such token to pad "
            "with. Set it to the tokenizer's padding or end token.",
        )
    if not config.do_sample:
        for name, neutral in SAMPLING_ONLY.items():
            # Contrastive search reads top_k without sampling.
            if name == "top_k" and config.penalty_alpha:
                continue
            value = getattr(config, name)
            if _differs(value, neutral):
                yield (
                    name,
                    f"`do_sample` is set to `{config.do_sample}`. However, `{name}` is set to `{value}`, "
                    f"which is only read when sampling. Set `do_sample=True` or unset `{name}`.",
                )
    if (config.num_beams or 1) == 1:
        for name, neutral in BEAMS_ONLY.items():
            value = getattr(config, name)
            if _differs(value, neutral):
                yield (
                    name,
                    f"`num_beams` is set to 1. However, `{name}` is set to `{value}`, which is only read by "
                    f"beam search. Set `num_beams>1` or unset `{name}`.",
                )
    for name, switch in COMPANIONS.items():
        value = getattr(config, name)
        if _differs(value, PARAMETERS[name].default) and not _differs(
            getattr(config, switch), PARAMETERS[switch].default
        ):
            yield (
                name,
                f"`{name}` is set to `{value}`, which is only read together with `{switch}`. Set `{switch}` too, "
                f"or unset `{name}`.",
            )
    if config.use_cache is False:
        for name in CACHE_ONLY:
            value = getattr(config, name)
            if value is not None:
                yield name, f"`use_cache` is `False`, so `{name}`, set to {value}, has no effect."
    if not config.return_dict_in_generate:
        for name in EXTRA_OUTPUTS:
            if getattr(config, name):
                yield (
                    name,
                    f"`{name}` is set, but only an output object can carry it. Set "
                    f"`return_dict_in_generate=True` or unset `{name}`.",
                )

"""Settings that a call, a model or this version can't follow, each with the error that says what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unspool.config import PARAMETERS, GenerationConfig, find_unused
from unspool.config.contrastive import find_num_candidates
from unspool.config.values import MOST_ROWS
from unspool.errors import SettingError, UnsupportedError
from unspool.plan.call import PromptShape
from unspool.plan.origins import SPOKEN, Origin, find_asked
from unspool.protocols import ModelInfo

MOST_COPIES_OF_MODELS = 256  # beams, sequences or candidates a prompt that a model's own file may ask for

# What is not built yet: each with the value that switches it off.
OFF: dict[str, tuple[Any, str]] = {
    "forced_decoder_ids": (None, "Whisper's way to force a language and a task"),
    "watermarking_config": (None, "watermarking"),
    "generation_kwargs": ({}, "further arguments"),
}


def refuse_unbuilt(settings: GenerationConfig, origins: Mapping[str, Origin]) -> None:
    for name, (off, feature) in OFF.items():
        value = getattr(settings, name)
        if value is None or value == off:
            continue
        raise UnsupportedError(
            f"`{name}`={value!r}, set {SPOKEN[origins[name]]}, needs {feature}, which this version of unspool "
            f"does not have yet; pass {name}={off!r} to decode without it"
        )


def refuse_unused(settings: GenerationConfig, origins: Mapping[str, Origin]) -> None:
    for name, reason in find_unused(settings).items():
        if origins[name] in (
            "config",
            "call",
        ):  # what a model's file suggests for another strategy is no request
            raise SettingError(f"{reason} (`{name}` was set {SPOKEN[origins[name]]}.)")
    for name in ("force_words_ids", "return_beam_trace"):
        if (settings.num_beams or 1) == 1 and getattr(settings, name) and origins[name] in ("config", "call"):
            raise SettingError(
                f"`{name}`, set {SPOKEN[origins[name]]}, is read by beam search alone; set `num_beams` above 1, or "
                f"leave it out"
            )


def check_low_memory(settings: GenerationConfig, origins: Mapping[str, Origin]) -> None:
    """Refuse `low_memory` where there is nothing to evaluate in parts; a model's file may say it for its beams."""
    has_parts = (settings.num_beams or 1) > 1 or find_num_candidates(settings)
    if settings.low_memory and not has_parts and origins["low_memory"] in ("config", "call"):
        raise SettingError(
            f"`low_memory`, set {SPOKEN[origins['low_memory']]}, reads the beams of a search in parts, or candidates "
            "of contrastive search one by one, and this is neither; set `num_beams` above 1, or `penalty_alpha` and "
            "`top_k`, or leave it out"
        )


def refuse_by_model(
    settings: GenerationConfig, origins: Mapping[str, Origin], info: ModelInfo, shape: PromptShape
) -> None:
    asks_start = settings.decoder_start_token_id is not None and "decoder_start_token_id" in find_asked(origins)
    if asks_start and not info.is_encoder_decoder:
        raise SettingError(f"`decoder_start_token_id` begins the text of an encoder-decoder; {info.family} is none")
    for name, capability in (("output_hidden_states", "hidden_states"), ("output_attentions", "attentions")):
        if getattr(settings, name) and capability not in info.can:
            hint = " (a transformers model can with attn_implementation='eager')" if capability == "attentions" else ""
            raise UnsupportedError(
                f"`{name}` was asked for, and this {info.family} model can't return them{hint}; leave it out"
            )
    if find_num_candidates(settings) and "last_states" not in info.can:
        raise UnsupportedError(
            f"`penalty_alpha`, set {SPOKEN[origins['penalty_alpha']]}, asks for contrastive search, which compares "
            f"hidden states, and a {info.family} model returns none; leave it out"
        )
    states = [name for name in ("output_hidden_states", "output_attentions") if getattr(settings, name)]
    for name in ("prefill_chunk_size", "prompt_logprobs"):
        if states and getattr(settings, name) is not None:
            raise SettingError(
                f"`{name}` reads the prompt in pieces and `{states[0]}` returns the prompt's states whole; "
                "ask for one of them"
            )
    if settings.prompt_logprobs is None:
        return
    for is_so, what in (
        (info.is_encoder_decoder, "an encoder-decoder model's prompt is not predicted token by token"),
        (shape.has_embeds, "inputs_embeds have no tokens"),
        (shape.has_cache, "past_key_values hide the prompt's first part from the model"),
    ):
        if is_so:
            raise SettingError(f"`prompt_logprobs` can't be told: {what}")


def check_rows(settings: GenerationConfig, origins: Mapping[str, Origin], shape: PromptShape) -> None:
    name = max(("num_return_sequences", "num_beams"), key=lambda name: getattr(settings, name) or 1)
    copies = int(getattr(settings, name) or 1)
    if shape.num_rows * copies > MOST_ROWS:
        raise SettingError(
            f"`{name}`={copies} for {shape.num_rows} prompts makes {shape.num_rows * copies} rows; "
            f"at most {MOST_ROWS} are decoded in one call"
        )
    if (num_candidates := find_num_candidates(settings)) > copies:
        name, copies = "top_k", num_candidates  # of contrastive search
    if copies > MOST_COPIES_OF_MODELS and origins[name] == "model":
        raise SettingError(
            f"`{name}`={copies}, set {SPOKEN['model']}, is more than the {MOST_COPIES_OF_MODELS} that a file may ask "
            f"for: memory and time grow with it. Give `{name}` in the call, {copies} if it is meant"
        )
    for name, parameter in PARAMETERS.items():
        value = getattr(settings, name)
        if parameter.may_be_per_row and isinstance(value, (list, tuple)) and len(value) != shape.num_rows:
            raise SettingError(
                f"`{name}` has {len(value)} values for {shape.num_rows} prompts; "
                "give one number, or a list with one for each prompt"
            )

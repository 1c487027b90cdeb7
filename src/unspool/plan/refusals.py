"""Settings that a call, a model or this version can't follow, each with the error that says what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unspool.config import PARAMETERS, GenerationConfig, find_unused
from unspool.config.modes import find_num_candidates
from unspool.config.values import MOST_ROWS
from unspool.errors import SettingError, UnsupportedError
from unspool.plan.origins import SPOKEN, Origin
from unspool.plan.prompt_shape import PromptShape
from unspool.wording import Setting, about, word

MOST_COPIES_OF_MODELS = 256  # beams, sequences or candidates per prompt that a model's own file may ask for

# What this call can't follow: the value that switches it off, and why it can't.
OFF: dict[str, tuple[Any, str]] = {
    "forced_decoder_ids": (
        None,
        "is for models of speech, whose texts begin with the forced tokens (of other models they belong into the "
        "prompt, or into decoder_input_ids)",
    ),
    "generation_kwargs": ({}, "holds further arguments of generate(), which are given to the call itself"),
}


def refuse_unfollowed(settings: GenerationConfig, origins: Mapping[str, Origin]) -> None:
    for name, (off, reason) in OFF.items():
        value = getattr(settings, name)
        if value is None or value == off:
            continue
        raise UnsupportedError(
            word(
                "{name:is {value!r}}, set {origin}, {reason}; pass {name:={off!r}} to decode without it",
                name=Setting(name),
                value=value,
                origin=SPOKEN[origins[name]],
                reason=reason,
                off=off,
            )
        )


def refuse_unused(settings: GenerationConfig, origins: Mapping[str, Origin]) -> None:
    for name, reason in find_unused(settings).items():
        # What a model's file suggests for another strategy is no request, and a negative pad token says "none".
        if origins[name] in ("config", "call") and name != "pad_token_id":
            origin = SPOKEN[origins[name]]
            raise SettingError(
                word("{reason} ({name} was set {origin}.)", reason=reason, name=Setting(name), origin=origin)
            )


def check_rows(settings: GenerationConfig, origins: Mapping[str, Origin], shape: PromptShape) -> None:
    name = max(("num_return_sequences", "num_beams"), key=lambda name: getattr(settings, name) or 1)
    copies = int(getattr(settings, name) or 1)
    if shape.num_rows * copies > MOST_ROWS:
        raise SettingError(
            about(
                Setting(name, str(copies)),
                f"for {shape.num_rows} prompts makes {shape.num_rows * copies} rows; at most {MOST_ROWS} are "
                "decoded in one call",
            )
        )
    if (num_candidates := find_num_candidates(settings)) > copies:
        name, copies = "top_k", num_candidates  # of contrastive search
    if copies > MOST_COPIES_OF_MODELS and origins[name] == "model":
        raise SettingError(
            word(
                "{name:is {copies}}, set {origin}, is more than the {most} that a file may ask for: memory and time "
                "grow with it. Give {name} in the call, {copies} if it is meant",
                name=Setting(name),
                copies=copies,
                origin=SPOKEN["model"],
                most=MOST_COPIES_OF_MODELS,
            )
        )
    for name, parameter in PARAMETERS.items():
        value = getattr(settings, name)
        if value is not parameter.default and parameter.holds_rows(value) and len(value) != shape.num_rows:
            raise SettingError(
                about(
                    name,
                    f"has {len(value)} values for {shape.num_rows} prompts; give one number, or a list with one for "
                    "each prompt",
                )
            )

"""How long a call's texts may get."""

from __future__ import annotations

from collections.abc import Mapping

from unspool.config import GenerationConfig
from unspool.errors import ContextError, SettingError
from unspool.plan.origins import SPOKEN, Origin
from unspool.plan.prompt_shape import PromptShape
from unspool.protocols import ModelInfo
from unspool.wording import Setting, word


def decide_length(
    settings: GenerationConfig, origins: Mapping[str, Origin], info: ModelInfo, shape: PromptShape, is_endless: bool
) -> int:
    order = ("default", "model", "config", "call")
    rank = {name: order.index(origins[name]) for name in ("max_length", "max_new_tokens")}
    counts_new = settings.max_new_tokens is not None and (
        rank["max_new_tokens"] >= rank["max_length"] or settings.max_length is None
    )
    limits = []
    if counts_new:
        limits.append(shape.width + int(settings.max_new_tokens))
    if settings.max_length is not None and (
        not counts_new or (rank["max_length"] == rank["max_new_tokens"] and rank["max_length"] > 0)
    ):
        # What was not set counts new tokens, however long the prompt is.
        limits.append(int(settings.max_length) + (shape.width if not rank["max_length"] else -shape.hidden))
    if shape.end is not None:
        is_asked = any(origins[name] in ("config", "call") for name in rank)
        limits = [*(limits if is_asked else []), shape.end]
        if shape.end <= shape.width:
            raise SettingError(
                f"the prompt has {shape.width} tokens, and the model's own rule ends a text of these inputs at "
                f"{shape.end}; shorten the prompt, or give a longer sound"
            )
    if not limits:
        raise SettingError(word("neither {max_length} nor {max_new_tokens} is set; a generation needs an end"))
    longest = min(limits)
    if longest <= shape.width:
        prompt = shape.width or shape.longest
        raise SettingError(
            word(
                "the prompt has {prompt} tokens and {max_length} is {given} ({origin}), prompt included; set "
                "{max_new_tokens} to say how many tokens to add",
                prompt=prompt,
                given=settings.max_length,
                origin=SPOKEN[origins["max_length"]],
            )
        )
    return longest if is_endless else _fit_context(longest, settings, origins, info, shape)


def _fit_context(
    longest: int, settings: GenerationConfig, origins: Mapping[str, Origin], info: ModelInfo, shape: PromptShape
) -> int:
    """Cut a default at the model's context; refuse what was asked for and can't be: positions past a table's end."""
    if info.max_context is None or (not info.ends_at_context and shape.longest_read >= info.max_context):
        return longest
    which = "prompt" if shape.longest_read == shape.longest else "negative prompt"
    if shape.longest_read >= info.max_context:
        raise ContextError(
            f"the {which} has {shape.longest_read} tokens and the model's context ends at {info.max_context}; "
            "shorten the prompt, or use a model with a longer context"
        )
    room = info.max_context - shape.longest_read
    if longest - shape.width <= room:
        return longest
    asked = [
        name
        for name in ("max_new_tokens", "max_length")
        if origins[name] in ("config", "call") and getattr(settings, name) is not None
    ]
    if asked and not info.ends_at_context:
        return longest
    if asked:
        raise ContextError(
            word(
                "{asked} asks for {num_new} new tokens after a {which} of {num_read}, and the model's context ends at "
                "{end}; at most {max_new_tokens:={room}} fit",
                asked=Setting(asked[0]),
                num_new=longest - shape.width,
                which=which,
                num_read=shape.longest_read,
                end=info.max_context,
                room=room,
            )
        )
    return shape.width + room


def check_reachable(settings: GenerationConfig, origins: Mapping[str, Origin]) -> None:
    """Refuse what nothing in the call can do. What is asked for a place that no row gets to is no fault, as in the
    reference: a text ends at its longest, whatever its fewest tokens are, and nothing is forced that lies behind it."""
    decays = settings.exponential_decay_length_penalty is not None
    if decays and settings.eos_token_id is None and origins["exponential_decay_length_penalty"] in ("config", "call"):
        raise SettingError(
            word(
                "{exponential_decay_length_penalty} makes the end token likelier, and there is none; set {eos_token_id}"
            )
        )

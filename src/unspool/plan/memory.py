"""Which cache a call makes, and whether it suffices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unspool.cache.kinds import KINDS, find_kind, read_options
from unspool.config import GenerationConfig
from unspool.errors import SettingError, UnsupportedError
from unspool.plan.origins import SPOKEN, Origin
from unspool.plan.prompt_shape import PromptShape
from unspool.protocols import ModelInfo
from unspool.wording import Setting, about


def name_cache(settings: GenerationConfig, origins: Mapping[str, Origin], info: ModelInfo, shape: PromptShape) -> str:
    """Which kind of cache a call is to make, once the model is known to be served by it."""
    keeps_states = "state" in info.layer_kinds
    usual = "mamba" if keeps_states else "dynamic"
    name, origin = str(settings.cache_implementation or usual), origins["cache_implementation"]
    if origin == "model" and name in ("hybrid", "sliding_window"):
        return "dynamic"  # a model's file says how to save memory, not what to answer: the windows are kept
    kind = KINDS.get(name)
    if kind is None:
        raise UnsupportedError(
            f"`cache_implementation`={name!r}, set {SPOKEN[origin]}, is a kind of cache that this version of unspool "
            f"does not have; use one of {', '.join(map(repr, KINDS))}"
        )
    if keeps_states and name == "dynamic":
        return usual  # what a model takes where nothing is chosen
    if keeps_states and name != usual:
        raise UnsupportedError(
            about(
                Setting("cache_implementation", repr(name)),
                f", set {SPOKEN[origin]}: it holds keys, and a {info.family} model keeps states; leave it out, or use "
                f"{usual!r}",
            )
        )
    reason = kind.refuse(info) if kind.refuse is not None and not shape.has_cache else None
    if reason is not None:
        raise UnsupportedError(about(Setting("cache_implementation", repr(name)), f", set {SPOKEN[origin]}: {reason}"))
    return name


def check_cache(name: str, settings: GenerationConfig, shape: PromptShape, num_new: int) -> dict[str, Any]:
    """The options that the cache gets, once they are known to suffice for the call."""
    kind, options = find_kind(name), read_options(name, settings.cache_config)
    needed = shape.longest_read + num_new
    most = kind.count_room(options) if kind.count_room is not None else None
    if most is not None and most < needed and not shape.has_cache:
        raise SettingError(
            f"`cache_config` gives all rows of a {name} cache {most} positions together, and one alone may need "
            f"{needed}: {needed - most} are missing. Give it more, ask for fewer new tokens, or let it grow"
        )
    for setting, room in (
        ("max_cache_len", settings.max_cache_len),
        ("cache_config['max_cache_len']", options.get("max_cache_len")),
    ):
        if room is not None and not (kind.is_sized or kind.may_be_sized):
            raise SettingError(
                f"`{setting}` is the room of a static cache and the cache is {name}; add cache_implementation='static'"
            )
        if room is not None and room < needed:
            raise SettingError(
                f"`{setting}`={room} is too little for a prompt of {shape.longest_read} tokens and {num_new} new ones; "
                f"at least {needed} are needed, {needed - room} more, or fewer new tokens"
            )
    if settings.output_attentions and not kind.holds_every_key and not shape.has_cache:
        raise SettingError(
            f"`output_attentions` returns weights by position, and a {name!r} cache lets positions go; "
            "use cache_implementation='dynamic'"
        )
    return options

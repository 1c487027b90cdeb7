"""One config out of all layers of settings, and who set each value."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy, deepcopy
from typing import Any, Final, Literal

from unspool.config import PARAMETERS, BaseWatermarkingConfig, GenerationConfig
from unspool.config.hosted import FOREIGN
from unspool.config.parameters import ARGUMENTS, TEXT_ARGUMENTS
from unspool.config.rules import check_settings
from unspool.config.speech import ONE_WINDOW, WINDOWS
from unspool.errors import SettingError
from unspool.plan.memo import Memo, describe_values
from unspool.wording import suggest

Origin = Literal["default", "model", "config", "call"]

_CHANGEABLE: Final = (list, dict, BaseWatermarkingConfig)
_merged: Memo[tuple[GenerationConfig, dict[str, Origin]]] = Memo()

SPOKEN: dict[str, str] = {
    "default": "by default",
    "model": "by the model's generation_config.json",
    "config": "in the generation_config given",
    "call": "in the call",
}


_INSTEAD: dict[str, str] = {
    "streamer": ": a stream gives its pieces itself, so iterate over it, or pass the streamer to generate()",
    "prefix": ": lm.generate() and lm.stream() do",
    "tools": ": lm.generate() and lm.stream() do",
    "chat": ": lm.generate() and lm.stream() do",
}

_PICTURES = frozenset({"pixel_values", "images", "image", "pixel_values_videos", "videos", "image_grid_thw"})
_SPEECH = (*ONE_WINDOW, *WINDOWS)


def find_asked(origins: Mapping[str, Origin]) -> frozenset[str]:
    return frozenset(name for name, origin in origins.items() if origin in ("config", "call"))


def merge(
    model_config: GenerationConfig | None,
    config: GenerationConfig | None,
    call: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> tuple[GenerationConfig, dict[str, Origin]]:
    """One config out of all layers, and who set each value.

    `defaults` replace the table's, and a length among them replaces the model file's `max_length`. What was merged and
    checked of late is not merged again: a server's requests differ in little.
    """
    layers = (_explicit(model_config), _explicit(config), call, defaults or {})
    key = describe_values(*layers)
    found = _merged.find(key)
    if found is None:
        found = _merge(*layers)
        if key is None:
            return found
        found = _copy(found[0]), found[1]  # what callers gave may be changed by them
        _merged.keep(key, found)
    return _copy(found[0]), dict(found[1])


def _copy(config: GenerationConfig) -> GenerationConfig:
    """A config whose values are nobody else's."""
    made = copy(config)
    values = vars(made)
    values.update({name: deepcopy(value) for name, value in values.items() if isinstance(value, _CHANGEABLE)})
    return made


def _merge(
    of_model: dict[str, Any], of_config: Mapping[str, Any], call: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[GenerationConfig, dict[str, Origin]]:
    refuse_unknown(call := leave_out_foreign(call))
    merged = GenerationConfig()
    origins: dict[str, Origin] = dict.fromkeys(PARAMETERS, "default")
    if "max_new_tokens" in defaults:
        of_model = {name: value for name, value in of_model.items() if name != "max_length"}
    layers: list[tuple[Origin, Mapping[str, Any]]] = [
        ("default", defaults),
        ("model", of_model),
        ("config", of_config),
        ("call", call),
    ]
    for origin, values in layers:
        for name, value in values.items():
            setattr(merged, name, value)
            origins[name] = origin
    check_settings(merged)
    return merged, origins


def _explicit(config: GenerationConfig | None) -> dict[str, Any]:
    return {} if config is None else {name: getattr(config, name) for name in config.explicit}


def leave_out_foreign(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """A call's settings without those of transformers' that unspool has not, where they ask for nothing."""
    if not any(name in FOREIGN for name in given):
        return given
    return {name: value for name, value in given.items() if name not in FOREIGN or value not in (None, False)}


def refuse_unread(names: Iterable[str], owner: str) -> None:
    """Raise for a name in a config that is no setting, as `refuse_unknown` does for a call's."""
    for name in names:
        if name in FOREIGN:
            raise SettingError(
                f"`{name}` in {owner} is a setting of transformers' that unspool does not apply: {FOREIGN[name]}"
            )
        if name in ARGUMENTS or name in TEXT_ARGUMENTS:
            raise SettingError(f"{owner} has no setting {name!r}: it is an argument of generate(); pass it there")
        refuse_unknown([name], caller=owner)


def refuse_unknown(names: Iterable[str], others: Iterable[str] = (), caller: str = "generate()") -> None:
    """Raise for a name that is no setting, and say what it was probably meant to be; `others` are known beside them."""
    others = tuple(others)
    for name in names:
        if name in PARAMETERS or name in others:
            continue
        if name in (*ARGUMENTS, *TEXT_ARGUMENTS):
            hint = _INSTEAD.get(name, ": it is an argument that this call does not take; leave it out")
            raise SettingError(f"{caller} has no setting {name!r:.80}{hint}")
        if name in FOREIGN:
            raise SettingError(f"{caller} does not apply `{name}`, a setting of transformers': {FOREIGN[name]}")
        hint = suggest(name, (*PARAMETERS, *ARGUMENTS, *TEXT_ARGUMENTS, *_SPEECH, *others))
        if name in _PICTURES:
            hint = ": this model takes no pictures. Give a transformers object that does, or describe them in words"
        elif name in _SPEECH:
            hint = ": it is for models of speech"
        raise SettingError(f"{caller} has no setting {name!r:.80}{hint}")

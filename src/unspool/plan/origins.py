"""One config out of all layers of settings, and who set each value."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from copy import copy
from typing import Any, Final, Literal

from unspool.config import PARAMETERS, GenerationConfig
from unspool.config.rules import check_settings
from unspool.errors import SettingError
from unspool.registry.tables import count_changes

Origin = Literal["default", "model", "config", "call"]

_PLAIN: Final = frozenset({str, int, float, bool, type(None)})
_MOST_MERGED: Final = 64
_merged: dict[tuple[Any, ...], tuple[GenerationConfig, dict[str, Origin]]] = {}

SPOKEN: dict[str, str] = {
    "default": "by default",
    "model": "by the model's generation_config.json",
    "config": "in the generation_config given",
    "call": "in the call",
}


_PICTURES = frozenset({"pixel_values", "images", "image", "pixel_values_videos", "videos", "image_grid_thw"})


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
    key = _describe(layers)
    if key is None:
        return _merge(*layers)
    found = _merged.get(key)
    if found is None:
        found = _merge(*layers)
        if len(_merged) >= _MOST_MERGED:
            _merged.clear()
        _merged[key] = found
    merged = copy(found[0])
    values = vars(merged)
    values.update({name: copy(value) for name, value in values.items() if type(value) in (list, dict)})
    return merged, dict(found[1])


def _describe(layers: Iterable[Mapping[str, Any]]) -> tuple[Any, ...] | None:
    """What is merged, if all of it is plain values: those of equal descriptions are merged alike."""
    described: list[Any] = [count_changes()]
    for values in layers:
        for name, value in values.items():
            if type(value) not in _PLAIN:
                return None
            described.append((name, type(value), value))  # True is equal to 1, and may not be
        described.append(None)
    return tuple(described)


def _merge(
    of_model: dict[str, Any], of_config: Mapping[str, Any], call: Mapping[str, Any], defaults: Mapping[str, Any]
) -> tuple[GenerationConfig, dict[str, Origin]]:
    _refuse_unknown(call)
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


def _refuse_unknown(names: Iterable[str]) -> None:
    for name in names:
        if name not in PARAMETERS:
            near = difflib.get_close_matches(name, PARAMETERS, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            if name in _PICTURES:
                hint = ": this model takes no pictures. Give a transformers object that does, or describe them in words"
            raise SettingError(f"generate() has no setting {name!r}{hint}")

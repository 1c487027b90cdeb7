"""One config out of all layers of settings, and who set each value."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from unspool.config import PARAMETERS, GenerationConfig
from unspool.config.rules import check_settings
from unspool.errors import SettingError

Origin = Literal["default", "model", "config", "call"]

SPOKEN: dict[str, str] = {
    "default": "by default",
    "model": "by the model's generation_config.json",
    "config": "in the generation_config given",
    "call": "in the call",
}


def find_asked(origins: Mapping[str, Origin]) -> frozenset[str]:
    return frozenset(name for name, origin in origins.items() if origin in ("config", "call"))


def merge(
    model_config: GenerationConfig | None,
    config: GenerationConfig | None,
    call: Mapping[str, Any],
    defaults: Mapping[str, Any] | None = None,
) -> tuple[GenerationConfig, dict[str, Origin]]:
    """One config out of all layers, and who set each value.

    `defaults` replace the table's, and a length among them replaces the model file's `max_length`.
    """
    _refuse_unknown(call)
    merged = GenerationConfig()
    origins: dict[str, Origin] = dict.fromkeys(PARAMETERS, "default")
    of_model = _explicit(model_config)
    if defaults and "max_new_tokens" in defaults:
        of_model.pop("max_length", None)
    layers: list[tuple[Origin, Mapping[str, Any]]] = [
        ("default", defaults or {}),
        ("model", of_model),
        ("config", _explicit(config)),
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
            raise SettingError(f"generate() has no setting {name!r}{hint}")

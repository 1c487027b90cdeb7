"""Which settings ask for sampling by being given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from unspool.config.parameters import PARAMETERS

_DECIDED: Final = ("penalty_alpha", "num_beam_groups", "force_words_ids", "constraints")
"""Ways to decode that draw nothing: a setting of sampling beside one is refused."""


def asks_for_draws(settings: Mapping[str, Any]) -> bool:
    """Whether a setting is given that sampling alone reads, where nothing says whether to sample.

    A temperature does so with any value: at 1 tokens are drawn too.
    """
    if settings.get("do_sample") is not None or any(settings.get(name) not in (None, 0, 1) for name in _DECIDED):
        return False
    return any(_is_for_draws(name, value, settings) for name, value in settings.items())


def list_draw_settings() -> list[str]:
    """The settings that sampling alone reads."""
    return [name for name, parameter in PARAMETERS.items() if parameter.needs and parameter.needs[0] == "do_sample"]


def _is_for_draws(name: str, value: Any, settings: Mapping[str, Any]) -> bool:
    parameter = PARAMETERS.get(name)
    if value is None or parameter is None or "do_sample" not in parameter.needs:
        return False
    if any(settings.get(other) for other in parameter.needs):
        return False
    if name == "temperature":
        return True
    values = value if isinstance(value, list | tuple) and parameter.may_be_per_row else [value]
    return any(one is not None and one != parameter.default for one in values)

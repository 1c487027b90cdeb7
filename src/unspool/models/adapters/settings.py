"""The generation settings of a transformers model, as ours."""

from __future__ import annotations

from typing import Any

from unspool.config import PARAMETERS, GenerationConfig


def read_settings(model: Any) -> GenerationConfig | None:
    """What a model's `generation_config` sets; None where it has none."""
    config = getattr(model, "generation_config", None)
    return None if config is None else convert_settings(config)


def convert_settings(config: Any) -> GenerationConfig:
    """A GenerationConfig of transformers' as ours: what it sets to other than its defaults."""
    told = config.to_diff_dict()
    return GenerationConfig(**{name: value for name, value in told.items() if name in PARAMETERS and value is not None})

"""The generation settings of a transformers model, as ours."""

from __future__ import annotations

from typing import Any

from unspool.config import PARAMETERS, GenerationConfig
from unspool.config.speech import SPEECH_FIELDS


def read_settings(model: Any) -> GenerationConfig | None:
    """The settings of a model's `generation_config`; None if it has none."""
    config = getattr(model, "generation_config", None)
    return None if config is None else convert_settings(config)


def convert_settings(config: Any) -> GenerationConfig:
    """A transformers GenerationConfig as ours: the values that differ from its defaults."""
    values = config.to_diff_dict()
    known = {name: value for name, value in values.items() if name in PARAMETERS or name in SPEECH_FIELDS}
    return GenerationConfig(**{name: value for name, value in known.items() if value is not None})

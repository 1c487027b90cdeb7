"""The generation settings of transformers, as ours."""

from __future__ import annotations

from typing import Any

from unspool.config import PARAMETERS, GenerationConfig
from unspool.config.speech import SPEECH_FIELDS


def read_settings(model: Any) -> GenerationConfig | None:
    """The settings of a model's `generation_config`; None if it has none."""
    config = getattr(model, "generation_config", None)
    if config is None or isinstance(config, GenerationConfig):
        return config
    return convert_settings(config)


class ObjectSettings:
    """A transformers object and its settings."""

    def __init__(self, model: Any) -> None:
        self.inner = model
        self._settings: GenerationConfig | None = None

    @property
    def generation_config(self) -> GenerationConfig | None:
        """The model's own settings: the current ones of the transformers object, unless others were set here."""
        return self._settings if self._settings is not None else read_settings(self.inner)

    @generation_config.setter
    def generation_config(self, config: GenerationConfig | None) -> None:
        self._settings = config

    def keep_setting(self, name: str, value: Any) -> None:
        """Change one of the model's own settings: the transformers object's, unless others were set here."""
        setattr(self._settings if self._settings is not None else self.inner.generation_config, name, value)


def convert_settings(config: Any) -> GenerationConfig:
    """A transformers GenerationConfig as ours: the values that differ from its defaults."""
    # A config may spell out what is the case anyway.
    usual: dict[str, Any] = getattr(config, "_get_default_generation_params", dict)()
    changed = {name: getattr(config, name, value) for name, value in config.to_diff_dict().items()}
    # A length that is set counts the prompt's tokens, whatever it is; one that nobody set counts new ones.
    values = {
        name: value
        for name, value in changed.items()
        if name not in usual or value != usual[name] or (name == "max_length" and value is not None)
    }
    if values.get("max_new_tokens") is not None:  # it counts alone
        values.pop("max_length", None)
    known = {name: value for name, value in values.items() if name in PARAMETERS or name in SPEECH_FIELDS}
    return GenerationConfig(**{name: value for name, value in known.items() if value is not None})


def fold_settings(model_config: GenerationConfig | None, config: GenerationConfig) -> GenerationConfig:
    """A model's settings with those of a config of transformers', in which a value without effect is no mistake."""
    values = {} if model_config is None else {name: getattr(model_config, name) for name in model_config.explicit}
    explicit = {name: getattr(config, name) for name in config.explicit}
    if {"max_length", "max_new_tokens"} & set(explicit):  # the later length counts alone
        values.pop("max_length", None)
        values.pop("max_new_tokens", None)
    return GenerationConfig(**{**values, **explicit})


def name_static_kind(settings: GenerationConfig, *, is_pair: bool) -> None:
    """Put our name in the place of an older one of transformers' for a static cache.

    There all of them mean one thing: memory that is taken once, for a window or for the whole text as a layer needs it.
    """
    kind = "static" if is_pair else "hybrid"
    if settings.cache_implementation in ("sliding_window", "hybrid", "hybrid_chunked"):
        settings.cache_implementation = kind
    elif settings.cache_implementation in ("offloaded_hybrid", "offloaded_hybrid_chunked"):
        settings.cache_implementation = f"offloaded_{kind}"


def drop_unknown_tokens(settings: GenerationConfig, vocab_size: int) -> None:
    """Take tokens that the model does not have out of lists: transformers passes over them, and none is ever chosen."""
    ends = settings.eos_token_id
    if isinstance(ends, int | list | tuple):
        listed = [ends] if isinstance(ends, int) else list(ends)
        known = [token for token in listed if token < vocab_size]
        if len(known) < len(listed):
            settings.eos_token_id = known or None
    for name in ("suppress_tokens", "begin_suppress_tokens"):
        listed = getattr(settings, name)
        if isinstance(listed, list | tuple) and all(isinstance(token, int) for token in listed):
            setattr(settings, name, [token for token in listed if token < vocab_size] or None)

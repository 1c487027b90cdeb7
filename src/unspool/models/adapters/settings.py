"""The generation settings of transformers, as ours."""

from __future__ import annotations

from typing import Any, Final

from unspool.config import PARAMETERS, GenerationConfig
from unspool.config.generation import MISSPELT
from unspool.config.hosted import FOREIGN
from unspool.config.speech import SPEECH_FIELDS
from unspool.wording import suggest

_LENGTHS: Final = ("max_length", "max_new_tokens")


def read_settings(model: Any) -> GenerationConfig | None:
    """The settings of a model's `generation_config`; None if it has none."""
    config = getattr(model, "generation_config", None)
    if config is None or isinstance(config, GenerationConfig):
        return config
    return convert_settings(config)


def list_unread(config: Any, *, is_own: bool = False) -> list[str]:
    """The names in a transformers GenerationConfig that nothing reads: that are no settings, here or in its class.

    One that was read from a file may hold anything of the model's. What looks like a setting misspelt is listed, unless
    the config is a model's own, whose file may have it.
    """
    try:
        declared = vars(type(config)())
    except Exception:  # a class of somebody's own, whose constructor wants more
        declared = vars(config)
    names = [
        name
        for name, value in vars(config).items()
        if name not in PARAMETERS
        and name not in SPEECH_FIELDS
        and not name.startswith("_")
        and not (name in declared and (name not in FOREIGN or value in (None, False)))
    ]
    is_of_file = "_original_object_hash" in vars(config) and not getattr(config, "_from_model_config", False)
    if is_of_file and is_own:
        return []
    # A model's class may keep names of its own in its settings.
    is_strict = not is_of_file and not is_own
    return sorted(name for name in names if is_strict or suggest(name, PARAMETERS, nearness=MISSPELT))


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
    """A transformers GenerationConfig as ours: the values that it says were set.

    From 5.0 on a value that was not set is None there, so any other was stated, a default's too. 4.x fills the defaults
    in, and a default that was stated looks like one that was not: it counts as not set, as in the generate() of these
    releases (from 4.50 on) a model's own value takes its place.
    """
    held = {name: getattr(config, name, value) for name, value in config.to_diff_dict().items()}
    values = {name: value for name, value in held.items() if value is not None}
    if "max_new_tokens" in values:  # it counts alone
        values.pop("max_length", None)
    return GenerationConfig(
        **{name: value for name, value in values.items() if name in PARAMETERS or name in SPEECH_FIELDS}
    )


def fold_settings(
    model_config: GenerationConfig | None, config: GenerationConfig, *, keeps_length: bool = False
) -> tuple[GenerationConfig, GenerationConfig | None]:
    """A model's settings with those of a config of transformers', in which a value without effect is no mistake; with
    `keeps_length`, its lengths stay in a config of the caller's, for which defaults of the call make way."""
    values = {} if model_config is None else {name: getattr(model_config, name) for name in model_config.explicit}
    explicit = {name: getattr(config, name) for name in config.explicit}
    lengths = {name: explicit[name] for name in _LENGTHS if name in explicit}
    if lengths:  # the later length counts alone
        values = {name: value for name, value in values.items() if name not in _LENGTHS}
    if not lengths or not keeps_length:
        return GenerationConfig(**{**values, **explicit}), None
    rest = {name: value for name, value in explicit.items() if name not in _LENGTHS}
    return GenerationConfig(**{**values, **rest}), GenerationConfig(**lengths)


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

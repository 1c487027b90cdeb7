"""Settings objects of transformers', as ours. Nothing of transformers is imported: classes are known by their names."""

from __future__ import annotations

from typing import Any, Final

from unspool.config.compiling import CompileConfig
from unspool.config.watermarking import SynthIDTextWatermarkingConfig, WatermarkingConfig
from unspool.registry import is_from

_OURS: Final[dict[str, Any]] = {
    "CompileConfig": CompileConfig,
    "WatermarkingConfig": WatermarkingConfig,
    "SynthIDTextWatermarkingConfig": SynthIDTextWatermarkingConfig,
}


def is_theirs(value: Any, name: str | None = None) -> bool:
    """Whether a value is an object of transformers', or derived from its class `name`."""
    return any(
        is_from(kind, "transformers") and (name is None or kind.__name__ == name) for kind in type(value).__mro__
    )


def convert_value(value: Any) -> Any:
    """A settings object of transformers as ours, or a list with one for each row; anything else as it is."""
    if type(value) in (list, tuple) and any(_find_ours(one) is not None for one in value):
        return [convert_value(one) for one in value]
    kind = _find_ours(value)
    if kind is None:
        return value
    held = value.to_dict()
    return kind(**{key: held[key] for key in kind.__dataclass_fields__ if key in held})


def _find_ours(value: Any) -> Any:
    """Our class for an object of transformers'; None if there is none."""
    return next((kind for name, kind in _OURS.items() if is_theirs(value, name)), None)

"""Copying models and sending them to other processes: weights are never pickled, they are loaded again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from unspool.errors import UnsupportedError


class Origin(Protocol):
    """Where a model was loaded from, and how it is loaded from there again."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the weights were loaded in."""

    def reload(self, device: str, dtype: torch.dtype | None) -> Any:
        """Load the model again; `dtype` is None if it has not changed since."""


Reduced = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def reduce_model(model: Any, state: dict[str, Any]) -> Reduced:
    """A model's pickled form: its origin, its current device and dtype, and settings that were changed since loading.

    Weights themselves are not pickled, because torch's pickler moves them into shared memory without the C library and
    captured steps noticing.
    """
    origin: Origin | None = model.origin
    if origin is None:
        raise UnsupportedError(
            f"this {model.info.family} model was not loaded from a path, so it can't be pickled or handed to another "
            "process: a pickle of ours says where to load the weights from. Load it with unspool.load(path), or build "
            "it in the other process"
        )
    dtype = model.dtype if model.dtype != origin.dtype else None
    return origin.reload, (str(model.device), dtype), state

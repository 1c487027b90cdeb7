"""How models are copied and handed to other processes: weights are never pickled, they are loaded again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from unspool.errors import UnsupportedError


class Origin(Protocol):
    """Where a model was loaded from, and how it is loaded from there again."""

    @property
    def dtype(self) -> torch.dtype:
        """What the weights were read into."""

    def reload(self, device: str, dtype: torch.dtype | None) -> Any:
        """The model once more; `dtype` is None if it is still the one that it was loaded in."""


Reduced = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


def reduce_model(model: Any, state: dict[str, Any]) -> Reduced:
    """What a model is pickled as: its origin, its device and dtype now, and settings that were changed since.

    Pickling the weights themselves would not do: torch's pickler moves them into shared memory, which the C library
    and captured steps know nothing of.
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

"""Copying models and sending them to other processes: weights are never pickled, they are loaded again."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from typing import Any, Final, Protocol

import torch

from unspool.errors import UnsupportedError
from unspool.protocols import name_sizes


class Origin(Protocol):
    """Where a model was loaded from, and how it is loaded from there again."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the weights were loaded in."""

    def reload(self, device: str, dtype: torch.dtype | None) -> Any:
        """Load the model again; `dtype` is None if it has not changed since."""

    def digest(self) -> str:
        """A digest of samples of the files' content; empty if they are gone."""


_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


def identify(model: Any, sample: torch.Tensor, weights: Iterable[torch.Tensor] = ()) -> str:
    """What a model is known by in every process: its sizes, its dtype, some weights, and its files or all `weights`."""
    values = [f"{value:.4e}" for value in sample.flatten().float().cpu().tolist()]
    files = "" if model.origin is None else model.origin.digest()
    sums = [_sum_bits(one.detach()) for one in weights if type(one.data) is torch.Tensor and not one.is_meta]
    identity = (name_sizes(model.info), str(model.dtype), values, *filter(None, (files, sums)))
    return f"{model.info.family}-{hashlib.sha256(repr(identity).encode()).hexdigest()[:16]}"


def _sum_bits(tensor: torch.Tensor) -> int:
    """A checksum, the same on every device."""
    if tensor.is_complex() or tensor.layout != torch.strided:
        return 0
    return int(tensor.contiguous().view(_BITS[tensor.element_size()]).sum(dtype=torch.int64))


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

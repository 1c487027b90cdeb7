"""Weights of a model object that is in memory already: read where they lie, and rebound to what is made of them."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from unspool.models.weights import MemorySource, WeightSource


class SharedSource(MemorySource):
    """Parameters that a native model shares with the object that owns them.

    A matrix that is used as it is stays where it is. Matrices that are stacked are copied into one buffer, and the
    owner's parameters become views of it, so that nothing is held twice: queries and keys of rotary models stay in
    the owner's order for it. What a native model keeps in another order is copied, and the owner keeps its own.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        super().__init__(parameters)
        self._parameters = parameters

    def share(self, name: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor | None:
        """The parameter itself, if it is on the device and of the dtype; None if it must be copied."""
        held = self._parameters[name].detach()
        return held if held.device == device and held.dtype == dtype and held.is_contiguous() else None

    @torch.no_grad()
    def rebind(self, name: str, view: torch.Tensor) -> None:
        """Let the owner's parameter be a view of a buffer that holds its numbers."""
        held = self._parameters[name]
        if held.shape == view.shape and held.dtype == view.dtype and held.device == view.device:
            held.data = view


def without_numbers(source: WeightSource, dtype: torch.dtype) -> MemorySource:
    """A source of the same names and shapes, whose tensors have no memory."""
    made = {name: torch.empty(source.info(name).shape, dtype=dtype, device="meta") for name in source.names()}
    if isinstance(source, SharedSource):
        return SharedSource({name: nn.Parameter(tensor) for name, tensor in made.items()})
    return MemorySource(made)

"""Weights of a model object that is in memory already: read where they lie, or copied where they are stacked."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from unspool.errors import LoadError
from unspool.models.weights import MemorySource, WeightSource


class SharedSource(MemorySource):
    """Parameters that a native model shares with the object that owns them.

    A matrix that is used as it is is read where it lies. Matrices that are stacked, and what a native model keeps in
    another order, are copied; the owner's parameters stay what they are.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], room: int | None = None) -> None:
        """`room` is how many bytes copies may take; None for as many as there are."""
        super().__init__(parameters)
        self._parameters = parameters
        self._room = room
        self._copied: dict[str, int] = {}  # bytes

    def list_copied(self) -> list[torch.Tensor]:
        """The parameters that copies were made of."""
        return [self._parameters[name] for name in self._copied]

    @property
    def copied_bytes(self) -> int:
        """What the copies take."""
        return sum(self._copied.values())

    def read(self, name: str, *, dtype: torch.dtype, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """A tensor, or a range of its rows."""
        self._note(name, self._parameters[name].numel() * dtype.itemsize)
        return super().read(name, dtype=dtype, rows=rows)

    def copy_into(self, name: str, out: torch.Tensor, *, transpose: bool = False) -> None:
        """Write a tensor into `out`, converting it; raises if copies take more than there is room for."""
        self._note(name, out.nbytes)
        super().copy_into(name, out, transpose=transpose)

    def _note(self, name: str, size: int) -> None:
        self._copied[name] = max(size, self._copied.get(name, 0))
        if self._room is not None and self.copied_bytes > self._room:
            raise LoadError(
                f"copies of its stacked matrices take more than the {self._room / 1e9:.1f} GB that there are for them"
            )

    def share(self, name: str, device: torch.device, dtype: torch.dtype) -> torch.Tensor | None:
        """The parameter itself, if it is on the device and of the dtype; None if it must be copied."""
        held = self._parameters[name].detach()
        return held if held.device == device and held.dtype == dtype and held.is_contiguous() else None


def without_numbers(source: WeightSource, dtype: torch.dtype) -> MemorySource:
    """A source of the same names and shapes, whose tensors have no memory."""
    made = {name: torch.empty(source.info(name).shape, dtype=dtype, device="meta") for name in source.names()}
    if isinstance(source, SharedSource):
        return SharedSource({name: nn.Parameter(tensor) for name, tensor in made.items()})
    return MemorySource(made)

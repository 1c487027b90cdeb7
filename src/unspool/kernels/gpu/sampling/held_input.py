"""Inputs of kernels that are launched again and again: they stay where a graph reads them."""

from __future__ import annotations

import weakref

import torch


class HeldInput:
    """An input where a graph reads it; copied if it is not the one that was copied last, which nobody changes."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values = values
        self._given: weakref.ref[torch.Tensor] | None = None

    @classmethod
    def of_rows(cls, rows: int, dtype: torch.dtype, device: torch.device) -> HeldInput:
        """A setting of every row: (rows, 1)."""
        with torch.inference_mode(False):
            return cls(torch.ones(rows, 1, dtype=dtype, device=device))

    def is_given(self, values: torch.Tensor | None) -> bool:
        """Whether these are held."""
        return self._given is not None and self._given() is values

    def give(self, values: torch.Tensor) -> None:
        """Hold values: of all places, of the first ones, or one for all."""
        if not self.is_given(values):
            held = self.values if len(values) == 1 else self.values[: len(values)]
            held.copy_(values)
            self._given = weakref.ref(values)

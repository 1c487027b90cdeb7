"""The keys and values of sources for all layers of a decoder, by one product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from unspool.models.weights import AnyLinear, Linear


@dataclass(frozen=True, slots=True)
class StackedKeys:
    """Matrices (layers, outputs, inputs) that read the same states, and their biases (layers, 1, outputs)."""

    weight: torch.Tensor
    bias: torch.Tensor | None

    @classmethod
    def find(cls, linears: Sequence[AnyLinear]) -> StackedKeys | None:
        """The matrices as one tensor; None unless they lie one behind the other in memory."""
        matrices = [linear.weight for linear in linears if isinstance(linear, Linear)]
        if not matrices or len(matrices) < len(linears):
            return None
        first = matrices[0]
        storage, size = first.untyped_storage().data_ptr(), first.nbytes
        for place, one in enumerate(matrices):
            is_next = one.data_ptr() == first.data_ptr() + place * size and one.untyped_storage().data_ptr() == storage
            if not is_next or one.shape != first.shape or not one.is_contiguous():
                return None
        weight = first.as_strided((len(matrices), *first.shape), (first.numel(), *first.stride()))
        biases = [linear.bias for linear in linears if linear.bias is not None]
        return cls(weight, torch.stack(biases)[:, None] if len(biases) == len(linears) else None)

    def multiply(self, states: torch.Tensor, num_heads: int) -> torch.Tensor:
        """Keys and values (layers, rows, positions, 2, heads, width) of states (rows, positions, hidden)."""
        rows, length, hidden = states.shape
        num_layers, outputs, _ = self.weight.shape
        given = states.reshape(1, rows * length, hidden).expand(num_layers, -1, -1)
        if self.bias is None:
            made = torch.bmm(given, self.weight.transpose(1, 2))
        else:
            made = torch.baddbmm(self.bias, given, self.weight.transpose(1, 2))
        return made.view(num_layers, rows, length, 2, num_heads, outputs // (2 * num_heads))

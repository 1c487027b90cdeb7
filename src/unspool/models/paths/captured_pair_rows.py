"""An encoder-decoder's captured step of several tokens: rows of a batch, beams, or drafts.

Products are of the tensor cores' kernels. Those that are added to the state leave their columns in parts, and one
kernel adds these up with the bias and the residual, and writes the norm that the next product reads.
"""

from __future__ import annotations

from typing import Any

import torch

from unspool.kernels.gpu.products.parts import add_parts
from unspool.kernels.gpu.products.product import multiply, multiply_parts
from unspool.kernels.gpu.sampling.sketch import HeadInput
from unspool.models.paths.captured_body import StepInputs
from unspool.models.paths.captured_norms import norm_arguments, normalise_by
from unspool.models.paths.captured_pair_blocks import FusedPairBody
from unspool.models.paths.captured_pair_parts import PairParts
from unspool.models.paths.captured_shape import PassShape
from unspool.models.weights import AnyLinear, Norm


class RowsPairBody(FusedPairBody):
    """Twelve kernels per layer."""

    def __init__(self, parts: PairParts, device: torch.device, dtype: torch.dtype, form: PassShape) -> None:
        super().__init__(parts, device, dtype, form)
        self._sum: tuple[torch.Tensor, torch.Tensor | None] | None = None  # parts to be added to the state, and a bias

    def run_to_head(self, inputs: StepInputs) -> HeadInput:
        given = super().run_to_head(inputs)
        self._settle()
        return given

    def _run_blocks(self, inputs: StepInputs) -> None:
        self._sum = None
        super()._run_blocks(inputs)

    def _read_out(self, logits: torch.Tensor) -> None:
        head, scale = self._weights.head, self._pair.head_scale
        final = self._find_final()
        if final is not None:
            self._norm_state(final, self.states)
        else:
            self._settle()
            self.states.copy_(self._x)
        given = self.states if scale == 1.0 else self.states * scale
        multiply(head.operand, given, logits, bias=head.bias)

    def _multiply_state(self, linear: AnyLinear, norm: Norm, out: torch.Tensor, **after: Any) -> None:
        multiply(linear.operand, self._read_state(norm), out, bias=linear.bias, **after)

    def _read_state(self, norm: Norm) -> torch.Tensor:
        """What a product of the state reads: the state after a norm, which comes before or after the sum."""
        if self._pair.is_norm_first:
            self._norm_state(norm, self._spare)
            return self._spare
        late, self._late = self._late, None
        if late is not None:
            self._norm_state(late, self._spare)
            self._x, self._spare = self._spare, self._x
        return self._x

    def _add(self, linear: AnyLinear, norm: Norm, y: torch.Tensor) -> None:
        parts = multiply_parts(linear.operand, y)
        if parts is not None:
            self._sum = parts, linear.bias
        else:
            multiply(linear.operand, y, self._x, bias=linear.bias, adds=True)
        if not self._pair.is_norm_first:
            self._late = norm

    def _norm_state(self, norm: Norm, out: torch.Tensor) -> None:
        """Write the norm of the state, with what is still to be added to it."""
        if self._sum is None:
            normalise_by(norm, self._x, out)
            return
        (parts, bias), self._sum = self._sum, None
        add_parts(parts, self._x, bias=bias, adds=True, normed=out, **norm_arguments(norm))

    def _settle(self) -> None:
        """Add what is still to be added to the state."""
        if self._sum is not None:
            (parts, bias), self._sum = self._sum, None
            add_parts(parts, self._x, bias=bias, adds=True)

"""A product of rounded numbers whose sums are not rounded: what ranks experts must not make ties of near scores."""

from __future__ import annotations

from typing import Final

import torch
import torch.nn.functional as F

_HAS_WIDE: Final = any(schema.overload_name == "dtype" for schema in torch._C._jit_get_schemas_for_operator("aten::mm"))


def multiply_wide(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x (rows, inputs) times the transposed weight (outputs, inputs), plus a bias: in float32 or wider."""
    if x.dtype in (torch.float32, torch.float64):
        return F.linear(x, weight, bias)
    if x.is_cuda and _HAS_WIDE:
        made = torch.mm(x, weight.t(), out_dtype=torch.float32)
    else:
        made = F.linear(x.float(), weight.float())
    return made if bias is None else made.add_(bias)

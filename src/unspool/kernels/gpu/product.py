"""A product of a step in the way that is fastest for its shape: a kernel of ours, or cuBLAS with kernels around it."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from unspool.kernels.gpu.activations import NONE
from unspool.kernels.gpu.gating import gate
from unspool.kernels.gpu.norms import normalise
from unspool.kernels.gpu.row_product import multiply_row
from unspool.kernels.gpu.tilings import choose_tiling


def multiply(
    weight: torch.Tensor,  # (outputs, inputs); gate above value where gated
    x: torch.Tensor,  # (rows, inputs)
    out: torch.Tensor,  # (rows, outputs), half as many where gated
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    bias: torch.Tensor | None = None,
    activation: int = NONE,
    is_gated: bool = False,
    adds: bool = False,
) -> None:
    """out = activation(weight @ norm(x) + bias), times the gated half, plus what was there where it `adds`."""
    tiling = choose_tiling(weight.shape[0], weight.shape[1], x.shape[0], weight.dtype, is_gated=is_gated)
    if tiling is not None:
        multiply_row(
            weight, x, out, tiling, norm=norm, eps=eps, bias=bias, activation=activation, is_gated=is_gated, adds=adds
        )
        return
    if norm is not None:
        normed = torch.empty_like(x)
        normalise(x, norm, eps, normed)
        x = normed
    if activation != NONE:
        gate(F.linear(x, weight, bias), activation, out)
    elif bias is None and out.dtype == x.dtype:
        torch.addmm(out, x, weight.t(), beta=1.0 if adds else 0.0, out=out)
    elif not adds:
        out.copy_(F.linear(x, weight, bias))
    else:
        out.add_(F.linear(x, weight, bias))

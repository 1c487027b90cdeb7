"""The operations around a product of a few rows: norm, bias, activation, gate and residual, and its launch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypedDict

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import can_overlap, launch, launch_options
from unspool.kernels.gpu.products.activations import NONE, activate


@dataclass(frozen=True, slots=True)
class Addend:
    """A normalised term of a product's input: x + rms_norm(made), which the product also writes to `into`."""

    made: torch.Tensor  # (rows, inputs)
    norm: torch.Tensor  # (inputs,)
    eps: float
    into: torch.Tensor  # (rows, inputs): other memory than x, because programs read x at different times


class Around(TypedDict, total=False):
    """The operations around a product: out = activation(weight @ norm(x) + bias), times the gated half; added to `out`
    if `adds`."""

    norm: torch.Tensor | None  # x is normalised by its root mean square and scaled by this first
    centres: bool  # a layer norm: the mean is subtracted, and the weight may be absent
    shift: torch.Tensor | None  # a layer norm's bias
    eps: float
    addend: Addend | None  # x is what it was plus this, before any norm
    kept: torch.Tensor | None  # x after its layer norm is written here: other memory than x, for the same reason
    bias: torch.Tensor | None
    activation: int
    is_gated: bool  # gate above value in the matrix, so half as many outputs
    adds: bool  # into what the output holds already


@triton.jit
def load_held(Y, row, rn, is_output, N, ADDS: tl.constexpr):
    """The current values of a row's outputs `rn`, if a product is added to them: loaded long before they are needed."""
    held = 0.0
    if ADDS:
        held = tl.load(Y + row * N.to(tl.int64) + rn, mask=is_output, other=0.0).to(tl.float32)
    return held


@triton.jit
def load_biases(BIAS, rn, is_output, N, IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The biases of outputs `rn`, and those of the gated half: no kernel writes them, so they are loaded early."""
    bias, beside = 0.0, 0.0
    if HAS_BIAS:
        bias = tl.load(BIAS + rn, mask=is_output, other=0.0).to(tl.float32)
        if IS_GATED:
            beside = tl.load(BIAS + N + rn, mask=is_output, other=0.0).to(tl.float32)
    return bias, beside


@triton.jit
def write_result(
    total, other, squares, held, biases, row, rn, is_output, Y, eps, N,
    K: tl.constexpr, ACT: tl.constexpr, IS_GATED: tl.constexpr, ADDS: tl.constexpr, HAS_ROOT: tl.constexpr,
):  # fmt: skip
    """Write one row's outputs `rn` from its products (outputs, columns), those of the gated half, the input's squares,
    and the results of `load_held` and `load_biases`."""
    y = tl.sum(total, 1)  # before the squares: fewer numbers are held at the same time
    root = 1.0
    if HAS_ROOT:
        root = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        y *= root
    y = activate(y + biases[0], ACT)
    if IS_GATED:
        y *= tl.sum(other, 1) * root + biases[1]
    if ADDS:
        y += held
    tl.store(Y + row * N.to(tl.int64) + rn, y.to(Y.dtype.element_ty), mask=is_output)


def count_outputs(shape: tuple[int, ...], around: Around) -> int:
    """The number of outputs of a matrix (outputs, inputs): half of its rows if it is gated."""
    return shape[0] // 2 if around.get("is_gated") else shape[0]


def launch_product(
    kernel: Any,
    matrix: tuple[torch.Tensor, ...],  # the tensors that store it
    shape: tuple[int, ...],  # (outputs, inputs)
    x: torch.Tensor,  # (rows, inputs)
    out: torch.Tensor,  # (rows, outputs), half as many if gated; any dtype
    outputs_each: int,  # outputs per program
    around: Around,
    *more: Any,
    cluster: int = 1,
    **options: Any,
) -> None:
    """Launch a product kernel: all take the same arguments in one order, and `more` and `options` of their own."""
    outputs, norm, bias = count_outputs(shape, around), around.get("norm"), around.get("bias")
    num_programs = triton.cdiv(outputs, outputs_each)
    cluster = cluster if can_overlap() and num_programs % cluster == 0 else 1
    launch(
        kernel,
        (num_programs // cluster,),
        *matrix,
        x,
        norm if norm is not None else x,
        bias if bias is not None else x,
        out,
        around.get("eps", 0.0),
        outputs,
        *more,
        K=shape[1],
        ACT=around.get("activation", NONE),
        IS_GATED=around.get("is_gated", False),
        ADDS=around.get("adds", False),
        HAS_NORM=norm is not None,
        HAS_BIAS=bias is not None,
        cluster=cluster,
        **options,
        **launch_options(),
    )

"""The sum of a product's parts, with what follows it in a block: bias, residual, and the norm of the next product."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.products.arranging import GROUP
from unspool.kernels.gpu.products.norms import load_norm, norm_row
from unspool.kernels.gpu.products.word_parts import arrange_row


@triton.jit(do_not_specialize=["R"])
def _add_parts(
    PARTS, BIAS, Y, WEIGHT, SHIFT, NORMED, eps, R, N,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, ADDS: tl.constexpr,
    HAS_NORM: tl.constexpr, IS_LAYER: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_SHIFT: tl.constexpr,
    ORDER: tl.constexpr, IS_WHOLE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * N
    at = tl.arange(0, BLOCK)
    is_there = at < N
    total = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        total += tl.load(BIAS + at, mask=is_there, other=0.0).to(tl.float32)
    let_next_start(PDL)
    wait_for_input(PDL)
    if ADDS:
        total += tl.load(Y + row + at, mask=is_there, other=0.0).to(tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(PARTS + split * R.to(tl.int64) * N + row + at, mask=is_there, other=0.0)
    y = total.to(Y.dtype.element_ty)
    tl.store(Y + row + at, y, mask=is_there)
    if HAS_NORM:
        pivot = 0.0
        if IS_LAYER:  # any number of the row
            pivot = tl.sum(tl.where(at == 0, y.to(tl.float32), 0.0), 0)
        weight, shift = load_norm(WEIGHT, SHIFT, at, is_there, HAS_WEIGHT, HAS_SHIFT)
        x = norm_row(y.to(tl.float32), pivot, weight, shift, is_there, eps, N, IS_LAYER, HAS_WEIGHT, HAS_SHIFT)
        x, place = arrange_row(x.to(NORMED.dtype.element_ty), at, N, BLOCK, ORDER, IS_WHOLE)
        tl.store(NORMED + row + place, x, mask=is_there)


def add_parts(
    parts: torch.Tensor,  # (splits, rows, outputs) float32
    out: torch.Tensor,  # (rows, outputs)
    *,
    bias: torch.Tensor | None = None,
    adds: bool = False,
    normed: torch.Tensor | None = None,  # (rows, outputs): the norm of `out` is written here
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    centres: bool = False,
    shift: torch.Tensor | None = None,
    order: int = 0,
) -> None:
    """out = the sum of the parts + bias, added to `out` if `adds`; and its norm, as `norms.normalise` writes it."""
    splits, rows, width = parts.shape
    block = triton.next_power_of_2(width)
    launch(
        _add_parts,
        (rows,),
        parts,
        bias if bias is not None else parts,
        out,
        norm if norm is not None else out,
        shift if shift is not None else out,
        normed if normed is not None else out,
        eps,
        rows,
        width,
        SPLITS=splits,
        BLOCK=block,
        HAS_BIAS=bias is not None,
        ADDS=adds,
        HAS_NORM=normed is not None,
        IS_LAYER=centres,
        HAS_WEIGHT=norm is not None,
        HAS_SHIFT=shift is not None,
        ORDER=order,
        IS_WHOLE=order > 0 and width % GROUP == 0,
        num_warps=8 if block >= 2048 else 4,
        **launch_options(),
    )

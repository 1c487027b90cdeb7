"""A matrix times two rows that stay in registers while a program goes through several parts of the matrix.

In `row_product` a program reads the rows, their norm and one part of the matrix. With two rows that nearly doubles what
is read; here they are read once for several parts, and the next part is prefetched while one is multiplied.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import let_next_start, wait_for_input
from unspool.kernels.gpu.products.activations import activate
from unspool.kernels.gpu.products.norms import load_norm, norm_row
from unspool.kernels.gpu.products.result import Around, launch_product


@dataclass(frozen=True, slots=True)
class HeldTiling:
    """How the matrix is cut: rows per part, parts per program, its warps."""

    rows: int
    tiles: int
    warps: int


@triton.jit
def _multiply_held(
    W, X, NORM, BIAS, Y, eps, N, SHIFT,
    R: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr,
    ACT: tl.constexpr, IS_GATED: tl.constexpr, ADDS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, IS_LAYER: tl.constexpr, HAS_SHIFT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(0) * (BN * TILES)
    place, rk = tl.arange(0, BN), tl.arange(0, KP)
    at = W + first.to(tl.int64) * K + place[:, None] * K + rk[None, :]
    beside = at + N.to(tl.int64) * K
    is_number = (rk < K)[None, :] & (place >= 0)[:, None]
    w = tl.load(at, mask=is_number, other=0.0, eviction_policy="evict_first")
    v = w
    if IS_GATED:
        v = tl.load(beside, mask=is_number, other=0.0, eviction_policy="evict_first")
    let_next_start(PDL)
    wait_for_input(PDL)
    rows = ()
    for row in tl.static_range(R):
        x = tl.load(X + row * K + rk, mask=rk < K, other=0.0).to(tl.float32)
        if HAS_NORM or IS_LAYER:
            pivot = tl.load(X + row * K).to(tl.float32)
            weight, shift = load_norm(NORM, SHIFT, rk, rk < K, HAS_NORM, HAS_SHIFT)
            x = norm_row(x, pivot, weight, shift, rk < K, eps, K, IS_LAYER, HAS_NORM, HAS_SHIFT)
        rows = rows + (x,)
    for tile in tl.static_range(TILES):
        w_now, v_now = w, v
        if tile + 1 < TILES:
            w = tl.load(at + (tile + 1) * BN * K, mask=is_number, other=0.0, eviction_policy="evict_first")
            if IS_GATED:
                v = tl.load(beside + (tile + 1) * BN * K, mask=is_number, other=0.0, eviction_policy="evict_first")
        rn = first + tile * BN + place
        for row in tl.static_range(R):
            x = rows[row][None, :]
            y = tl.sum(w_now.to(tl.float32) * x, 1)
            if HAS_BIAS:
                y += tl.load(BIAS + rn).to(tl.float32)
            y = activate(y, ACT)
            if IS_GATED:
                z = tl.sum(v_now.to(tl.float32) * x, 1)
                if HAS_BIAS:
                    z += tl.load(BIAS + N + rn).to(tl.float32)
                y *= z
            into = Y + row * N.to(tl.int64) + rn
            if ADDS:
                y += tl.load(into).to(tl.float32)
            tl.store(into, y.to(Y.dtype.element_ty))


def multiply_held(
    weight: torch.Tensor,  # (outputs, inputs): whole programs
    x: torch.Tensor,  # (rows, inputs)
    out: torch.Tensor,  # (rows, outputs)
    tiling: HeldTiling,
    **around: Unpack[Around],
) -> None:
    """As `multiply_row`, without addends."""
    shift = around.get("shift")
    launch_product(
        _multiply_held,
        (weight,),
        weight.shape,
        x,
        out,
        tiling.rows * tiling.tiles,
        around,
        shift if shift is not None else x,
        R=x.shape[0],
        KP=triton.next_power_of_2(weight.shape[1]),
        BN=tiling.rows,
        TILES=tiling.tiles,
        IS_LAYER=around.get("centres", False),
        HAS_SHIFT=shift is not None,
        num_warps=tiling.warps,
    )

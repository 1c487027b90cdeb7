"""A matrix of plain numbers times several rows, whose first tiles are on their way before the rows are there: Hopper.

The reference is `F.linear`. `rows_product` is written in Triton's language, whose loads of a loop all begin behind what
the kernel waits for; Gluon, Triton's lower language, lets them begin before it. Each program copies tiles of the matrix
into shared memory as long as there is room, waits for the kernel that writes its rows, and goes on with both.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from unspool.kernels.gpu.gluon_launching import let_next_start, wait_for_input
from unspool.kernels.gpu.launching import launch, launch_options


@gluon.jit
def _sigmoid(x):
    return 1.0 / (1.0 + gl.exp(-x))


@gluon.jit
def activate(x, CODE: gl.constexpr):
    """As `activations.activate`, which Gluon can't call."""
    if CODE == 1:
        x = x * _sigmoid(x)
    elif CODE == 2:
        x = gl.maximum(x, 0.0)
    elif CODE == 3:
        x = 0.5 * x * (1.0 + gl.erf(x * 0.7071067811865476))
    elif CODE == 4:
        x = x * _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif CODE == 5:
        x = x * _sigmoid(1.702 * x)
    elif CODE == 6:
        x = gl.maximum(x, 0.0)
        x = x * x
    return x


@gluon.jit
def write_products(
    into, total, other, BIAS, output, is_there, split, R, N,
    ACT: gl.constexpr, IS_GATED: gl.constexpr, ADDS: gl.constexpr, HAS_BIAS: gl.constexpr, IS_PART: gl.constexpr,
):  # fmt: skip
    """Write a program's products (outputs, rows), a part's share of them or with the operations around a product."""
    y = total
    if IS_PART:
        into += split.to(gl.int64) * R * N
    else:
        if HAS_BIAS:
            y += gl.load(BIAS + output, mask=output < N, other=0.0).to(gl.float32)[:, None]
        y = activate(y, ACT)
        if IS_GATED:
            if HAS_BIAS:
                other += gl.load(BIAS + N + output, mask=output < N, other=0.0).to(gl.float32)[:, None]
            y *= other
        if ADDS:
            y += gl.load(into, mask=is_there, other=0.0).to(gl.float32)
    gl.store(into, y.to(into.dtype.element_ty), mask=is_there)


@gluon.jit(do_not_specialize=["R", "per_split"])
def _multiply_early(
    W, X, BIAS, OUT, R, N, K, per_split,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr,
    ACT: gl.constexpr, IS_GATED: gl.constexpr, ADDS: gl.constexpr, HAS_BIAS: gl.constexpr, IS_PART: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Outputs (rows, N), or a part's share of them: (parts, rows, N)."""
    dtype: gl.constexpr = W.dtype.element_ty
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BK, BK // 8], [WARPS, 1], [1, 0])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BM, 16])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    w_tiles = gl.allocate_shared_memory(dtype, [STAGES, BN, BK], SHARED)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, BM, BK], SHARED)
    v_tiles = w_tiles
    if IS_GATED:
        v_tiles = gl.allocate_shared_memory(dtype, [STAGES, BN, BK], SHARED)
    split = gl.program_id(1)
    # Outputs and rows beyond the last are computed as the last is, and not written: no copy needs a mask for them.
    rn = gl.minimum(gl.program_id(0) * BN + gl.arange(0, BN, gl.SliceLayout(1, TILE)), N - 1)
    rm = gl.minimum(gl.program_id(2) * BM + gl.arange(0, BM, gl.SliceLayout(1, TILE)), R - 1)
    rk = split * per_split * BK + gl.arange(0, BK, gl.SliceLayout(0, TILE))
    steps = gl.minimum(per_split, K // BK - split * per_split)
    w_at = W + rn.to(gl.int64)[:, None] * K + rk[None, :]
    v_at = w_at + N.to(gl.int64) * K
    x_at = X + rm.to(gl.int64)[:, None] * K + rk[None, :]
    for step in gl.static_range(STAGES - 1):
        if step < steps:
            async_copy.async_copy_global_to_shared(w_tiles.index(step), w_at + step * BK)
            if IS_GATED:
                async_copy.async_copy_global_to_shared(v_tiles.index(step), v_at + step * BK)
    let_next_start(PDL)
    wait_for_input(PDL)
    for step in gl.static_range(STAGES - 1):
        if step < steps:
            async_copy.async_copy_global_to_shared(x_tiles.index(step), x_at + step * BK)
        async_copy.commit_group()
    total = gl.zeros([BN, BM], gl.float32, SUMS)
    other = gl.zeros([BN, BM], gl.float32, SUMS)
    for step in range(steps):
        async_copy.wait_group(STAGES - 2)
        fence_async_shared()  # what was copied is seen by the tensor cores
        gl.thread_barrier()  # and all warps have done with the tile that is overwritten next
        ahead = step + STAGES - 1
        if ahead < steps:
            async_copy.async_copy_global_to_shared(w_tiles.index(ahead % STAGES), w_at + ahead * BK)
            if IS_GATED:
                async_copy.async_copy_global_to_shared(v_tiles.index(ahead % STAGES), v_at + ahead * BK)
            async_copy.async_copy_global_to_shared(x_tiles.index(ahead % STAGES), x_at + ahead * BK)
        async_copy.commit_group()
        x = x_tiles.index(step % STAGES).permute((1, 0))
        if IS_GATED:
            gate = warpgroup_mma(w_tiles.index(step % STAGES), x, total, is_async=True)
            value = warpgroup_mma(v_tiles.index(step % STAGES), x, other, is_async=True)
            total, other = warpgroup_mma_wait(0, deps=(gate, value))
        else:
            total = warpgroup_mma(w_tiles.index(step % STAGES), x, total)
    output = gl.program_id(0) * BN + gl.arange(0, BN, gl.SliceLayout(1, SUMS))
    row = gl.program_id(2) * BM + gl.arange(0, BM, gl.SliceLayout(0, SUMS))
    is_there = (output < N)[:, None] & (row < R)[None, :]
    into = OUT + row.to(gl.int64)[None, :] * N + output[:, None]
    write_products(into, total, other, BIAS, output, is_there, split, R, N, ACT, IS_GATED, ADDS, HAS_BIAS, IS_PART)


def multiply_early(
    weight: torch.Tensor,  # (outputs, inputs); gate above value if gated; inputs a multiple of the tile's columns
    x: torch.Tensor,  # (rows, inputs), of the same 16-bit dtype
    out: torch.Tensor,  # (rows, outputs), half as many if gated; (splits, rows, outputs) float32 for parts
    tile: tuple[int, int, int, int, int],  # rows, outputs and columns of a program, its warps and stages
    splits: int,
    *,
    bias: torch.Tensor | None,
    activation: int,
    is_gated: bool,
    adds: bool,
) -> None:
    """As `rows_product.multiply_rows`."""
    rows, outputs, columns, warps, stages = tile
    num_outputs, inputs = out.shape[-1], x.shape[1]
    launch(
        _multiply_early,
        (triton.cdiv(num_outputs, outputs), splits, triton.cdiv(x.shape[0], rows)),
        weight,
        x,
        bias if bias is not None else x,
        out,
        x.shape[0],
        num_outputs,
        inputs,
        triton.cdiv(inputs // columns, splits),
        BM=rows,
        BN=outputs,
        BK=columns,
        STAGES=stages,
        WARPS=warps,
        ACT=activation,
        IS_GATED=is_gated,
        ADDS=adds,
        HAS_BIAS=bias is not None,
        IS_PART=out.dim() == 3,
        num_warps=warps,
        **launch_options(),
    )

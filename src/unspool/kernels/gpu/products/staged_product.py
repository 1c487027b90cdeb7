"""A matrix times one row, added to what the output holds: 16-bit numbers, on Hopper.

The reference is `F.linear`. Until its input is there, a program of `row_product` loads its rows of the matrix into
registers, which programs of other kernels need as well. Here the first columns go to shared memory, which nobody uses
then: more of the matrix has come before the input, and no fewer programs are there at a time. In Gluon, Triton's lower
language, because Triton's own fills shared memory only behind what the kernel waits for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from unspool.kernels.gpu.gluon_launching import let_next_start, wait_for_input
from unspool.kernels.gpu.launching import launch, launch_options

COLUMNS: Final = 256  # that a warp loads at a time, 16 bytes per thread


@dataclass(frozen=True, slots=True)
class StagedTiling:
    """How the matrix is cut: rows per program, its warps, and registers per thread at most.

    Tiles of these rows have `COLUMNS` columns per warp. Before the input is there, `staged` of them are loaded into
    shared memory, and `held` into registers.
    """

    rows: int
    warps: int
    staged: int
    held: int
    registers: int


# (outputs, inputs): where it was faster than `row_product` in whole steps of a Mamba of 2.8B on an H200, 2026-11-17
MEASURED: Final[dict[tuple[int, int], StagedTiling]] = {(2560, 5120): StagedTiling(2, 2, 2, 6, 96)}


@gluon.jit
def _multiply_staged(
    W, X, BIAS, Y,
    K: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, STAGED: gl.constexpr, HELD: gl.constexpr,
    WARPS: gl.constexpr, HAS_BIAS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [1, WARPS], [1, 0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(8, 1, 1, [1, 0])
    first = gl.program_id(0) * BN
    place = gl.arange(0, BN, gl.SliceLayout(1, TILE))
    rk = gl.arange(0, BK, gl.SliceLayout(0, TILE))
    at = W + first.to(gl.int64) * K + place[:, None] * K + rk[None, :]
    ws = ()
    for tile in gl.static_range(STAGED, STAGED + HELD):
        ws = ws + (gl.load(at + tile * BK),)
    staged = gl.allocate_shared_memory(W.dtype.element_ty, [STAGED, BN, BK], SHARED)
    for tile in gl.static_range(STAGED):
        async_copy.async_copy_global_to_shared(staged.index(tile), at + tile * BK)
    async_copy.commit_group()
    bias = gl.zeros([BN], gl.float32, gl.SliceLayout(1, TILE))
    if HAS_BIAS:
        bias += gl.load(BIAS + first + place).to(gl.float32)
    let_next_start(PDL)
    wait_for_input(PDL)
    into = Y + first + place
    so_far = gl.load(into).to(gl.float32)
    total = gl.zeros([BN, BK], gl.float32, TILE)
    for tile in gl.static_range(STAGED, K // BK):
        if tile < STAGED + HELD:
            w = ws[tile - STAGED]
        else:
            w = gl.load(at + tile * BK)
        x = gl.load(X + tile * BK + rk).to(gl.float32)
        total += w.to(gl.float32) * x[None, :]
    async_copy.wait_group(0)
    gl.thread_barrier()
    for tile in gl.static_range(STAGED):
        x = gl.load(X + tile * BK + rk).to(gl.float32)
        total += staged.index(tile).load(TILE).to(gl.float32) * x[None, :]
    gl.store(into, (gl.sum(total, 1) + bias + so_far).to(Y.dtype.element_ty))


def multiply_staged(
    weight: torch.Tensor,  # (outputs, inputs): a multiple of the tiling's rows, of its tiles' columns
    x: torch.Tensor,  # (1, inputs), of the same 16-bit dtype
    out: torch.Tensor,  # (1, outputs): added to
    tiling: StagedTiling,
    *,
    bias: torch.Tensor | None = None,
) -> None:
    """out += weight @ x + bias."""
    outputs, inputs = weight.shape
    columns = COLUMNS * tiling.warps
    assert outputs % tiling.rows == 0 and inputs % columns == 0
    assert (tiling.staged + tiling.held) * columns <= inputs
    launch(
        _multiply_staged,
        (outputs // tiling.rows,),
        weight,
        x,
        bias if bias is not None else x,
        out,
        K=inputs,
        BN=tiling.rows,
        BK=columns,
        STAGED=tiling.staged,
        HELD=tiling.held,
        WARPS=tiling.warps,
        HAS_BIAS=bias is not None,
        num_warps=tiling.warps,
        maxnreg=tiling.registers,
        **launch_options(),
    )

"""A matrix times one to eight rows, with what stands around it: norm, bias, activation, gate and residual. On Hopper.

The reference is `F.linear` after `kernels.norms`. Small matrices are not bound by memory: a program has its part in
registers before its input is there, and what counts is what it does from then on. So a warp has sixteen rows of the
matrix and a slice of their columns, in the order in which the tensor cores take them, and no number of the matrix is
widened or moved again. A norm is applied behind the product, so that nothing waits for its sums:

    W norm(x) = root * (W (w * x) - mean * W w) + W shift

where w are the norm's weights; W w and W shift are made before the input is there. Around a large mean w * x would lose
what is left of it in 16 bits: where a mean is so large, what was lost is multiplied as well. Sums of slices go through
shared memory once. Written in Gluon, Triton's lower language, which lets a kernel say how its numbers lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from unspool.kernels.gpu.attention.held_attention import divide_keys
from unspool.kernels.gpu.attention.output_parts import Parts
from unspool.kernels.gpu.gluon_launching import let_next_start, wait_for_input
from unspool.kernels.gpu.launching import launch, launch_options
from unspool.kernels.gpu.products.activations import NONE
from unspool.kernels.gpu.products.early_product import activate
from unspool.kernels.gpu.products.joined_parts import count_splits, join_parts, join_rows, lay_groups, load_parts

MOST_ROWS: Final = 8  # of the input: columns of one product of the tensor cores
OUTPUTS: Final = 16  # of a program
_NARROWEST: Final = 32  # columns of a warp at a time: 16 bytes per thread
_WIDEST: Final = 128
_SHORT: Final = 2048  # inputs: up to here eight warps hold sixteen rows of the matrix
_FEW_COLUMNS: Final = 128  # of a warp: so many leave the registers for three programs at a time
_FEW_REGISTERS: Final = 80
_LONGEST: Final = 8192  # inputs
_MOST_NUMBERS: Final = 1 << 23  # of a matrix; with more a product is bound by memory, and was not measured
_NO_NORM, _ROOT, _LAYER = range(3)
FAR = gl.constexpr(4.0)  # from a row's mean to 0, in its spread: squares of both


@dataclass(frozen=True, slots=True)
class FewTiling:
    """How sixteen rows of the matrix are cut: warps, how many columns each has at a time, and registers per thread."""

    warps: int
    columns: int
    registers: int | None = None  # at most; None: as the compiler chooses


def choose_few_tiling(weight: torch.Tensor, num_rows: int, *, has_norm: bool, is_gated: bool) -> FewTiling | None:
    """The tiling for a matrix and so many rows; None if its shape or dtype is not what this kernel is written for.

    In float16 the products of an input that is not normalised yet could overflow.
    """
    outputs, inputs = weight.shape[0] // (2 if is_gated else 1), weight.shape[1]
    if weight.dtype != torch.bfloat16 and (has_norm or weight.dtype != torch.float16):
        return None
    if num_rows > MOST_ROWS or outputs % OUTPUTS or inputs > _LONGEST or weight.numel() > _MOST_NUMBERS:
        return None
    for warps in (8, 4, 2) if inputs <= _SHORT else (16, 8, 4):
        columns = _WIDEST
        while columns >= _NARROWEST:
            if inputs % (warps * columns) == 0:
                is_small = num_rows == 1 and inputs // warps <= _FEW_COLUMNS and not is_gated
                return FewTiling(warps, columns, _FEW_REGISTERS if is_small else None)
            columns //= 2
    return None


@gluon.jit
def _load_matrix(W, first, K: gl.constexpr, TK: gl.constexpr, WARPS: gl.constexpr, A: gl.constexpr):
    """Sixteen rows of the matrix in tiles (warps, 16, TK): each warp has the columns of its slice of a tile."""
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, A)))
    place = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, A)))
    column = gl.arange(0, TK, gl.SliceLayout(0, gl.SliceLayout(1, A)))
    at = W + first.to(gl.int64) * K + (warp[:, None, None] * TK + place[None, :, None] * K + column[None, None, :])
    ws = ()
    for tile in gl.static_range(K // (WARPS * TK)):
        ws = ws + (gl.load(at + tile * WARPS * TK),)
    return ws


@gluon.jit
def _multiply(ws, xs, WARPS: gl.constexpr, SUMS: gl.constexpr):
    """The sums of each warp's slices (warps, 16, 8)."""
    total = gl.zeros([WARPS, 16, 8], gl.float32, SUMS)
    for tile in gl.static_range(len(ws)):
        total = mma_v2(ws[tile], xs[tile], total)
    return total


@gluon.jit
def _add_slices(room, total, R: gl.constexpr, RESULT: gl.constexpr):
    """What all warps' slices add up to (16, 1 or 8): one row stands in all columns, and one of them is read."""
    room.store(total)
    gl.thread_barrier()
    return _read_sums(room, R, RESULT)


@gluon.jit
def _read_sums(room, R: gl.constexpr, RESULT: gl.constexpr):
    if R == 1:
        y = gl.sum(room.slice(0, 1, dim=2).load(RESULT), 0)
    else:
        y = gl.sum(room.load(RESULT), 0)
    return y


@gluon.jit
def _weigh_norm(
    ws, room, NORM, SHIFT, place, row, dtype: gl.constexpr,
    WARPS: gl.constexpr, TK: gl.constexpr, HAS_NORM: gl.constexpr, HAS_SHIFT: gl.constexpr,
    SUMS: gl.constexpr, RESULT: gl.constexpr,
):  # fmt: skip
    """W w and W shift (16,): the products of the matrix with a layer norm's weights and with its bias."""
    xs = ()
    for tile in gl.static_range(len(ws)):
        at = place + row * 0 + tile * WARPS * TK
        weight = gl.full(at.shape, 1.0, dtype, at.type.layout)
        if HAS_NORM:
            weight = gl.load(NORM + at)
        shift = gl.full(at.shape, 0.0, dtype, at.type.layout)
        if HAS_SHIFT:
            shift = gl.load(SHIFT + at)
        xs = xs + (gl.where(row == 0, weight, shift),)
    room.store(_multiply(ws, xs, WARPS, SUMS))
    gl.thread_barrier()
    weights = gl.sum(gl.sum(room.slice(0, 1, dim=2).load(RESULT), 0), 1)
    shifts = gl.sum(gl.sum(room.slice(1, 1, dim=2).load(RESULT), 0), 1)
    gl.thread_barrier()
    return weights, shifts


@gluon.jit
def _multiply_rest(
    room, W, X, NORM, first, dtype: gl.constexpr,
    R: gl.constexpr, K: gl.constexpr, WARPS: gl.constexpr,
    SUMS: gl.constexpr, A: gl.constexpr, B: gl.constexpr, RESULT: gl.constexpr,
):  # fmt: skip
    """The products of what w * x has lost in 16 bits (16, 1 or 8).

    It is rarely needed: all is loaded again, a few columns at a time, so that it takes no registers of the rest.
    """
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, A)))
    output = gl.arange(0, 16, gl.SliceLayout(0, gl.SliceLayout(2, A)))
    column = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(1, A)))
    at = W + first.to(gl.int64) * K + (warp[:, None, None] * 32 + output[None, :, None] * K + column[None, None, :])
    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, B)))
    column = gl.arange(0, 32, gl.SliceLayout(0, gl.SliceLayout(2, B)))
    row = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, B)))
    row = gl.minimum(row, R - 1)[None, None, :]  # one row stands in all columns
    place = warp[:, None, None] * 32 + column[None, :, None]
    total = gl.zeros([WARPS, 16, 8], gl.float32, SUMS)
    for begin in range(0, K, WARPS * 32):
        wide = gl.load(X + row * K + place + begin).to(gl.float32) * gl.load(NORM + place + row * 0 + begin)
        total = mma_v2(gl.load(at + begin), (wide - wide.to(dtype).to(gl.float32)).to(dtype), total)
    gl.thread_barrier()  # all have read the room
    return _add_slices(room, total, R, RESULT)


@gluon.jit
def _slice_row(given, TILES: gl.constexpr, TK: gl.constexpr, WARPS: gl.constexpr, B: gl.constexpr):
    """A row of shared memory in the warps' slices, in all columns."""
    xs = ()
    for tile in gl.static_range(TILES):
        x = given.slice(tile * WARPS, WARPS, dim=0).load(gl.SliceLayout(2, B))
        xs = xs + (gl.expand_dims(x, 2).broadcast_to([WARPS, TK, 8]),)
    return xs


@gluon.jit
def _load_rows(X, place, row, R: gl.constexpr, K: gl.constexpr, TK: gl.constexpr, WARPS: gl.constexpr):
    """Several rows in the warps' slices, in tiles (warps, TK, 8)."""
    xs = ()
    for tile in gl.static_range(K // (WARPS * TK)):
        xs = xs + (gl.load(X + row * K + place + tile * WARPS * TK, mask=(row < R) & (place >= 0), other=0.0),)
    return xs


@gluon.jit
def _weigh_rows(xs, norms, pivots, sums, dtype: gl.constexpr, HAS_NORM: gl.constexpr):
    """Several rows times their norm's weights, and the warps' sums (warps, 8) of what is beyond pivots, and squares."""
    given = ()
    squares = sums
    for tile in gl.static_range(len(xs)):
        wide = xs[tile].to(gl.float32)
        less = wide - pivots
        sums += gl.sum(less, 1)
        squares += gl.sum(less * less, 1)
        x = xs[tile]
        if HAS_NORM:
            x = (wide * norms[tile].to(gl.float32)).to(dtype)
        given = given + (x,)
    return given, sums, squares


@gluon.jit
def _multiply_few(
    W, X, STATS, LENGTHS, NORM, SHIFT, BIAS, Y, KEPT, eps, N,
    R: gl.constexpr, K: gl.constexpr, PADDED: gl.constexpr, TK: gl.constexpr, WARPS: gl.constexpr,
    KIND: gl.constexpr, HAS_NORM: gl.constexpr, HAS_SHIFT: gl.constexpr, HAS_BIAS: gl.constexpr,
    ACT: gl.constexpr, IS_GATED: gl.constexpr, ADDS: gl.constexpr, KEEPS: gl.constexpr,
    HEADS: gl.constexpr, D: gl.constexpr, SPLITS: gl.constexpr, BLOCK: gl.constexpr, ROWS_EACH: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)
    B: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    RESULT: gl.constexpr = gl.BlockedLayout([WARPS, 1, 1], [1, 4, 8], [1, WARPS, 1], [2, 1, 0])
    OUT: gl.constexpr = gl.SliceLayout(0, RESULT)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ROWS: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    SLICES: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0])
    TILES: gl.constexpr = K // (WARPS * TK)
    COLUMNS: gl.constexpr = 1 if R == 1 else 8  # of the results
    dtype: gl.constexpr = W.dtype.element_ty
    first = gl.program_id(0) * 16
    ws = _load_matrix(W, first, K, TK, WARPS, A)
    vs = ws
    if IS_GATED:
        vs = _load_matrix(W + N.to(gl.int64) * K, first, K, TK, WARPS, A)
    let_next_start(PDL)
    output = first + gl.arange(0, 16, gl.SliceLayout(1, OUT))
    result_row = gl.arange(0, COLUMNS, gl.SliceLayout(0, OUT))
    bias = gl.zeros([16], gl.float32, gl.SliceLayout(1, OUT))
    beside = bias
    if HAS_BIAS:
        bias = gl.load(BIAS + output).to(gl.float32)
        if IS_GATED:
            beside = gl.load(BIAS + N + output).to(gl.float32)
    room = gl.allocate_shared_memory(gl.float32, [WARPS, 16, 8], SLICES)
    other_room = room
    if IS_GATED:
        other_room = gl.allocate_shared_memory(gl.float32, [WARPS, 16, 8], SLICES)

    warp = gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, B)))
    column = gl.arange(0, TK, gl.SliceLayout(0, gl.SliceLayout(2, B)))
    row = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, B)))[None, None, :]
    place = warp[:, None, None] * TK + column[None, :, None]
    EACH: gl.constexpr = PADDED // WARPS // 32 if PADDED // WARPS < 256 else 8  # of a row, per thread
    WHOLE: gl.constexpr = gl.BlockedLayout([1, EACH], [1, 32], [WARPS, 1], [1, 0])
    number = gl.arange(0, WARPS, gl.SliceLayout(1, WHOLE))[:, None] * (PADDED // WARPS)
    number += gl.arange(0, PADDED // WARPS, gl.SliceLayout(0, WHOLE))[None, :]
    weights, other_weights = bias, bias
    norms = ()
    norm = gl.full(number.shape, 1.0, dtype, WHOLE)
    keeps_norm, keeps_shift = bias, bias
    if KIND > 0:
        if HAS_NORM:
            if R == 1:
                norm = gl.load(NORM + number, mask=number < K, other=0.0)
            else:
                norms = _load_rows(NORM, place, row * 0, 1, K, TK, WARPS)
    if KIND == 2:
        weights, shifts = _weigh_norm(
            ws, room, NORM, SHIFT, place, row, dtype, WARPS, TK, HAS_NORM, HAS_SHIFT, SUMS, RESULT
        )
        bias += shifts
        if IS_GATED:
            other_weights, shifts = _weigh_norm(
                vs, room, NORM, SHIFT, place, row, dtype, WARPS, TK, HAS_NORM, HAS_SHIFT, SUMS, RESULT
            )
            beside += shifts
        if KEEPS:
            if HAS_NORM:
                keeps_norm = gl.load(NORM + output, mask=output < K, other=0.0).to(gl.float32)
            if HAS_SHIFT:
                keeps_shift = gl.load(SHIFT + output, mask=output < K, other=0.0).to(gl.float32)
    used, used_here = 0, 0
    GROUP: gl.constexpr = TK if TK < D else D  # of columns: of one head
    if SPLITS > 0:
        if R == 1:
            _, used = divide_keys(gl.load(LENGTHS).to(gl.int32), SPLITS, BLOCK)
        else:
            GROUPS: gl.constexpr = lay_groups(WARPS, TK, GROUP)
            used = count_splits(LENGTHS, row, R, ROWS_EACH, SPLITS, BLOCK)
            its_row = gl.arange(0, 8, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, GROUPS))))[None, None, :]
            used_here = count_splits(LENGTHS, its_row, R, ROWS_EACH, SPLITS, BLOCK)
    # Shared memory is reserved before it is needed, so that none of it is in two uses with a barrier between them.
    given, sum_room, square_room, rows_room = room, room, room, room
    if R == 1:
        given = gl.allocate_shared_memory(dtype, [PADDED // TK, TK], ROWS)
    if KIND > 0:
        if R == 1:
            sum_room = gl.allocate_shared_memory(gl.float32, [WARPS], FLAT)
            square_room = gl.allocate_shared_memory(gl.float32, [WARPS], FLAT)
        else:
            rows_room = gl.allocate_shared_memory(gl.float32, [2, WARPS, 8], ROWS)
    wait_for_input(PDL)

    into = Y + result_row[None, :] * N + output[:, None]
    is_out = (result_row < R)[None, :] & (output >= 0)[:, None]
    held = gl.zeros([16, COLUMNS], gl.float32, OUT)
    if ADDS:
        held = gl.load(into, mask=is_out, other=0.0).to(gl.float32)
    own = held
    is_own = is_out & (output < K)[:, None]
    if KEEPS:  # what this program writes of the norm
        own = gl.load(X + result_row[None, :] * K + output[:, None], mask=is_own, other=0.0).to(gl.float32)
    xs = ()
    pivot = 0.0
    if R == 1:  # the whole row, which every warp then takes its slices of
        if SPLITS > 0:
            values, tops, totals = load_parts(X, STATS, used, HEADS, D, SPLITS, WARPS, PADDED)
            given.reshape([PADDED // D, D]).store(join_parts(values, tops, totals, dtype, SPLITS))
        else:
            x = gl.load(X + number, mask=number < K, other=0.0)
            if KIND == 2:
                pivot = gl.load(X).to(gl.float32)  # any number of the row: see `norms.find_moments`
            wide = x.to(gl.float32)
            if HAS_NORM:
                x = (wide * norm.to(gl.float32)).to(dtype)
            if KIND == 2:
                wide = gl.where(number < K, wide - pivot, 0.0)
            given.reshape([WARPS, PADDED // WARPS]).store(x)
        gl.thread_barrier()
        xs = _slice_row(given, TILES, TK, WARPS, B)
    elif SPLITS > 0:
        xs = join_rows(X, STATS, used, used_here, place, row, dtype, K, TK, WARPS, HEADS, D, SPLITS, GROUP, GROUPS, B)
    else:
        xs = _load_rows(X, place, row, R, K, TK, WARPS)
    sums = gl.zeros([WARPS, 8], gl.float32, gl.SliceLayout(1, B))
    squares = sums
    if KIND > 0 and R > 1:
        pivots = gl.zeros([1, 1, 8], gl.float32, B)
        if KIND == 2:
            pivots = gl.load(X + row * K, mask=row < R, other=0.0).to(gl.float32)
        xs, sums, squares = _weigh_rows(xs, norms, pivots, sums, dtype, HAS_NORM)
    total = _multiply(ws, xs, WARPS, SUMS)
    if IS_GATED:
        other_room.store(_multiply(vs, xs, WARPS, SUMS))
    STATS_ROWS: gl.constexpr = gl.SliceLayout(1, RESULT)
    if KIND > 0:
        if R == 1:
            sum_room.store(gl.sum(wide, 1))
            square_room.store(gl.sum(wide * wide, 1))
        else:
            rows_room.index(0).store(sums)
            rows_room.index(1).store(squares)
    y = _add_slices(room, total, R, RESULT)
    other = y
    if IS_GATED:
        other = _read_sums(other_room, R, RESULT)
    if KIND > 0:
        if R == 1:
            ALL: gl.constexpr = gl.BlockedLayout([WARPS], [32], [WARPS], [0])
            apart = gl.sum(sum_room.load(ALL), 0) / K
            square = gl.sum(square_room.load(ALL), 0) / K
            mean = pivot + apart
        else:
            apart = gl.sum(rows_room.index(0).load(STATS_ROWS), 0) / K
            square = gl.sum(rows_room.index(1).load(STATS_ROWS), 0) / K
            apart = gl.convert_layout(apart, gl.SliceLayout(0, OUT))[None, :]
            square = gl.convert_layout(square, gl.SliceLayout(0, OUT))[None, :]
            mean = apart
            if KIND == 2:
                mean += gl.load(X + result_row * K, mask=result_row < R, other=0.0).to(gl.float32)[None, :]
        if KIND == 2:
            spread = gl.maximum(square - apart * apart, 0.0)
            root = gl.rsqrt(spread + eps)
            if HAS_NORM:
                is_lost = mean * mean > FAR * spread
                if R > 1:
                    is_lost = gl.max(gl.max(is_lost.to(gl.int32), 1), 0) > 0
                if is_lost:
                    y += _multiply_rest(room, W, X, NORM, first, dtype, R, K, WARPS, SUMS, A, B, RESULT)
                    if IS_GATED:
                        GATED = W + N.to(gl.int64) * K
                        other += _multiply_rest(room, GATED, X, NORM, first, dtype, R, K, WARPS, SUMS, A, B, RESULT)
            y = root * (y - mean * weights[:, None])
            other = root * (other - mean * other_weights[:, None])
            if KEEPS:
                kept = (own - mean) * root
                if HAS_NORM:
                    kept *= keeps_norm[:, None]
                if HAS_SHIFT:
                    kept += keeps_shift[:, None]
                gl.store(KEPT + result_row[None, :] * K + output[:, None], kept.to(dtype), mask=is_own)
        else:
            root = gl.rsqrt(square + eps)
            y *= root
            other *= root
    y = activate(y + bias[:, None], ACT)
    if IS_GATED:
        y *= other + beside[:, None]
    gl.store(into, (y + held).to(Y.dtype.element_ty), mask=is_out)


def multiply_few(
    weight: torch.Tensor,  # (outputs, inputs), of 16 bits; gate above value if gated
    x: torch.Tensor | Parts,  # (rows, inputs), or an attention's parts
    out: torch.Tensor,  # (rows, outputs), half as many if gated
    tiling: FewTiling,
    *,
    norm: torch.Tensor | None = None,
    eps: float = 0.0,
    centres: bool = False,
    shift: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    activation: int = NONE,
    is_gated: bool = False,
    adds: bool = False,
    kept: torch.Tensor | None = None,
) -> None:
    """out = activation(weight @ norm(x) + bias), times the gated half; added to `out` if `adds`; `kept` gets what a
    layer norm makes of x."""
    outputs, inputs = weight.shape[0] // (2 if is_gated else 1), weight.shape[1]
    assert kept is None or outputs >= inputs, "each program keeps as many numbers of the norm as it has outputs"
    parts = x if isinstance(x, Parts) else None
    given = x.values if isinstance(x, Parts) else x
    _, splits, heads, width = parts.values.shape if parts is not None else (0, 0, 0, 0)
    launch(
        _multiply_few,
        (outputs // OUTPUTS,),
        weight,
        given,
        parts.stats if parts is not None else given,
        parts.lengths if parts is not None else given,
        norm if norm is not None else given,
        shift if shift is not None else given,
        bias if bias is not None else given,
        out,
        kept if kept is not None else given,
        eps,
        outputs,
        R=out.shape[0],
        K=inputs,
        PADDED=triton.next_power_of_2(inputs),
        TK=tiling.columns,
        WARPS=tiling.warps,
        KIND=_LAYER if centres else _ROOT if norm is not None else _NO_NORM,
        HAS_NORM=norm is not None,
        HAS_SHIFT=shift is not None,
        HAS_BIAS=bias is not None,
        ACT=activation,
        IS_GATED=is_gated,
        ADDS=adds,
        KEEPS=kept is not None,
        HEADS=heads,
        D=width,
        SPLITS=splits,
        BLOCK=parts.block if parts is not None else 0,
        ROWS_EACH=parts.rows_each if parts is not None else 1,
        num_warps=tiling.warps,
        maxnreg=tiling.registers,
        **launch_options(),
    )

"""A matrix times one row, streamed through shared memory from before the row is there: Hopper.

The reference is `row_product.multiply_row`, whose programs hold in registers what they load before they wait for their
input: of large matrices a part only. Here about one program a multiprocessor has many rows of the matrix. It copies as
many of them into shared memory as there is room for, waits for its input, normalises it once, and copies the rest while
it multiplies. A thread reads what it has copied itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from unspool.kernels.gpu.products.early_parts import activate, let_next_start, wait_for_input
from unspool.kernels.gpu.products.result import Around, count_outputs, launch_product

COLUMNS = gl.constexpr(256)  # that a warp reads at a time, 16 bytes per thread


@dataclass(frozen=True, slots=True)
class StreamTiling:
    """How the matrix is cut: rows at a time, how many times of a program, how many times are held at once, and warps
    for different rows and for different columns."""

    rows: int
    times: int
    held: int
    row_warps: int
    column_warps: int = 1


@gluon.jit
def _reserve(W, COUNT: gl.constexpr, HELD: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr):
    """Memory for each part of a row: the compiler puts barriers between copies into the same one."""
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    tiles = ()
    for _ in gl.static_range(COUNT):
        tiles = tiles + (gl.allocate_shared_memory(W.dtype.element_ty, [HELD, BN, BK], SHARED),)
    return tiles


@gluon.jit
def _copy_rows(
    tiles, slot, at, is_row, rk, beside,
    K: gl.constexpr, BK: gl.constexpr, IS_GATED: gl.constexpr, IS_EVEN: gl.constexpr,
):  # fmt: skip
    """Start copying some rows of the matrix, and those beside them if it is gated."""
    CHUNKS: gl.constexpr = (K + BK - 1) // BK
    for chunk in gl.static_range(CHUNKS):
        for half in gl.static_range(2 if IS_GATED else 1):
            into = tiles[chunk * (2 if IS_GATED else 1) + half].index(slot)
            source = at + (chunk * BK + half * beside)
            if IS_EVEN and chunk * BK + BK <= K:
                async_copy.async_copy_global_to_shared(into, source)
            else:
                is_there = is_row[:, None] & (rk + chunk * BK < K)[None, :]
                async_copy.async_copy_global_to_shared(into, source, mask=is_there)
    async_copy.commit_group()


@gluon.jit
def _load_row(X, rk, K: gl.constexpr, BK: gl.constexpr, IS_THERE: gl.constexpr):
    """A row in parts of BK numbers."""
    parts = ()
    for k in gl.static_range(0, K, BK):
        part = rk
        if IS_THERE:
            if k + BK <= K:
                part = gl.load(X + k + rk)
            else:
                part = gl.load(X + k + rk, mask=rk + k < K, other=0.0)
        parts = parts + (part,)
    return parts


@gluon.jit
def _load_few(FROM, rn, is_row, IS_THERE: gl.constexpr):
    few = gl.zeros_like(rn).to(gl.float32)
    if IS_THERE:
        few = gl.load(FROM + rn, mask=is_row, other=0.0).to(gl.float32)
    return few


@gluon.jit
def _write_row(INTO, row, rk, K: gl.constexpr, BK: gl.constexpr):
    for k in gl.static_range(0, K, BK):
        gl.store(INTO + k + rk, row[k // BK], mask=rk + k < K)


@gluon.jit
def _add_term(xs, made, post, INTO, eps, rk, K: gl.constexpr, BK: gl.constexpr):
    """x + rms_norm(made), rounded; the first program writes it."""
    squares = gl.zeros_like(rk).to(gl.float32)
    for k in gl.static_range(0, K, BK):
        term = made[k // BK].to(gl.float32)
        squares += term * term
    root = gl.rsqrt(gl.sum(squares, 0) / K + eps)
    whole = ()
    for k in gl.static_range(0, K, BK):
        x = xs[k // BK]
        term = made[k // BK].to(gl.float32) * root * post[k // BK].to(gl.float32)
        whole = whole + ((x.to(gl.float32) + term).to(x.dtype),)
    if gl.program_id(0) == 0:
        _write_row(INTO, whole, rk, K, BK)
    return whole


@gluon.jit
def _norm_layer(
    xs, pivot, norm, shift, eps, rk, K: gl.constexpr, BK: gl.constexpr, HAS_NORM: gl.constexpr, HAS_SHIFT: gl.constexpr
):
    """A row after its layer norm, rounded: see `norms.find_moments`."""
    sums, squares = gl.zeros_like(rk).to(gl.float32), gl.zeros_like(rk).to(gl.float32)
    for k in gl.static_range(0, K, BK):
        less = gl.where(rk + k < K, xs[k // BK].to(gl.float32) - pivot, 0.0)
        sums += less
        squares += less * less
    apart = gl.sum(sums, 0) / K
    root = gl.rsqrt(gl.maximum(gl.sum(squares, 0) / K - apart * apart, 0.0) + eps)
    normed = ()
    for k in gl.static_range(0, K, BK):
        x = (xs[k // BK].to(gl.float32) - (pivot + apart)) * root
        if HAS_NORM:
            x *= norm[k // BK].to(gl.float32)
        if HAS_SHIFT:
            x += shift[k // BK].to(gl.float32)
        normed = normed + (gl.where(rk + k < K, x, 0.0).to(xs[k // BK].dtype),)
    return normed


@gluon.jit
def _scale(xs, norm, eps, rk, K: gl.constexpr, BK: gl.constexpr, HAS_ROOT: gl.constexpr):
    """A row in float32, times a norm's weights, and the inverse of its root mean square; or as it is, and 1."""
    given = ()
    squares = gl.zeros_like(rk).to(gl.float32)
    for k in gl.static_range(0, K, BK):
        x = xs[k // BK].to(gl.float32)
        if HAS_ROOT:
            squares += x * x
            x *= norm[k // BK].to(gl.float32)
        given = given + (x,)
    root = 1.0
    if HAS_ROOT:
        root = gl.rsqrt(gl.sum(squares, 0) / K + eps)
    return given, root


@gluon.jit(do_not_specialize=["times"])
def _multiply_streamed(
    W, X, NORM, BIAS, Y, eps, N, SHIFT, MADE, POST, INTO, post_eps, times,
    K: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, HELD: gl.constexpr,
    ROW_WARPS: gl.constexpr, COLUMN_WARPS: gl.constexpr, ACT: gl.constexpr, IS_GATED: gl.constexpr,
    ADDS: gl.constexpr, HAS_NORM: gl.constexpr, HAS_BIAS: gl.constexpr, IS_LAYER: gl.constexpr,
    HAS_SHIFT: gl.constexpr, HAS_ADDEND: gl.constexpr, IS_EVEN: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    TILE: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [ROW_WARPS, COLUMN_WARPS], [1, 0])
    CHUNKS: gl.constexpr = (K + BK - 1) // BK
    HALVES: gl.constexpr = 2 if IS_GATED else 1
    HAS_ROOT: gl.constexpr = HAS_NORM and not IS_LAYER
    tiles = _reserve(W, CHUNKS * HALVES, HELD, BN, BK)
    first = gl.program_id(0) * times * BN
    place, rk = gl.arange(0, BN, gl.SliceLayout(1, TILE)), gl.arange(0, BK, gl.SliceLayout(0, TILE))
    rn = first + place
    at = W + first.to(gl.int64) * K + place[:, None] * K + rk[None, :]
    beside = N.to(gl.int64) * K  # the gated half
    for time in gl.static_range(HELD):
        if time < times:
            _copy_rows(tiles, time, at + time * BN * K, rn + time * BN < N, rk, beside, K, BK, IS_GATED, IS_EVEN)
        else:
            async_copy.commit_group()
    norm, shift = _load_row(NORM, rk, K, BK, HAS_NORM), _load_row(SHIFT, rk, K, BK, HAS_SHIFT)
    post = _load_row(POST, rk, K, BK, HAS_ADDEND)
    bias, bias_beside = _load_few(BIAS, rn, rn < N, HAS_BIAS), _load_few(BIAS + N, rn, rn < N, HAS_BIAS and IS_GATED)
    let_next_start(PDL)
    wait_for_input(PDL)
    xs, made = _load_row(X, rk, K, BK, True), _load_row(MADE, rk, K, BK, HAS_ADDEND)
    held = _load_few(Y, rn, rn < N, ADDS)
    if HAS_ADDEND:
        gl.thread_barrier()  # or the compiler would load x after the first use of what is added to it
        xs = _add_term(xs, made, post, INTO, post_eps, rk, K, BK)
    if IS_LAYER:
        xs = _norm_layer(xs, gl.load(X).to(gl.float32), norm, shift, eps, rk, K, BK, HAS_NORM, HAS_SHIFT)
    given, root = _scale(xs, norm, eps, rk, K, BK, HAS_ROOT)
    for time in range(times):
        # What the next round adds is asked for now.
        rows_next = rn + BN
        is_next = (rows_next < N) & (time + 1 < times)
        bias_next = _load_few(BIAS, rows_next, is_next, HAS_BIAS)
        beside_next = _load_few(BIAS + N, rows_next, is_next, HAS_BIAS and IS_GATED)
        held_next = _load_few(Y, rows_next, is_next, ADDS)
        async_copy.wait_group(HELD - 1)
        slot = time % HELD
        total, other = gl.zeros([BN, BK], gl.float32, TILE), gl.zeros([BN, BK], gl.float32, TILE)
        for chunk in gl.static_range(CHUNKS):
            by = given[chunk][None, :]
            total += tiles[chunk * HALVES].index(slot).load(TILE).to(gl.float32) * by
            if IS_GATED:
                other += tiles[chunk * HALVES + 1].index(slot).load(TILE).to(gl.float32) * by
        at += BN * K
        if time + HELD < times:
            ahead = (HELD - 1) * BN
            _copy_rows(tiles, slot, at + ahead * K, rows_next + ahead < N, rk, beside, K, BK, IS_GATED, IS_EVEN)
        else:
            async_copy.commit_group()
        y = activate(gl.sum(total, 1) * root + bias, ACT)
        if IS_GATED:
            y *= gl.sum(other, 1) * root + bias_beside
        gl.store(Y + rn, (y + held).to(Y.dtype.element_ty), mask=rn < N)
        rn, bias, bias_beside, held = rows_next, bias_next, beside_next, held_next


def multiply_streamed(
    weight: torch.Tensor,  # (outputs, inputs), of 16-bit numbers; inputs a multiple of 8
    x: torch.Tensor,  # (1, inputs)
    out: torch.Tensor,  # (1, outputs), half as many if gated
    tiling: StreamTiling,
    **around: Unpack[Around],
) -> None:
    """As `multiply_row` of one row; nothing is kept."""
    shift, addend = around.get("shift"), around.get("addend")
    outputs_each = tiling.rows * tiling.times
    launch_product(
        _multiply_streamed,
        (weight,),
        weight.shape,
        x,
        out,
        outputs_each,
        around,
        shift if shift is not None else x,
        addend.made if addend is not None else x,
        addend.norm if addend is not None else x,
        addend.into if addend is not None else x,
        addend.eps if addend is not None else 0.0,
        tiling.times,
        BN=tiling.rows,
        BK=COLUMNS.value * tiling.column_warps,
        HELD=min(tiling.held, tiling.times),
        ROW_WARPS=tiling.row_warps,
        COLUMN_WARPS=tiling.column_warps,
        IS_LAYER=around.get("centres", False),
        HAS_SHIFT=shift is not None,
        HAS_ADDEND=addend is not None,
        IS_EVEN=count_outputs(weight.shape, around) % outputs_each == 0,
        num_warps=tiling.row_warps * tiling.column_warps,
    )

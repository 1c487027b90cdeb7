"""A matrix of bytes times several rows, whose first words are on their way before the rows are there: Hopper.

Bytes are whole numbers (int8) or floats (fp8); `rows_product` is faster with nibbles. The reference is
`Words.dequantise` and `F.linear`. As `early_product`, in Gluon; words are unpacked in registers on the way to the
tensor cores, as in `rows_product`: a thread has a block's words of its rows, and gives what it unpacks to the tensor
cores without exchanging anything, for the rows of the input have been arranged. They read a thread's registers while
they multiply: nothing is unpacked before they have done.
"""

from __future__ import annotations

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from unspool.kernels.gpu.gluon_launching import let_next_start, wait_for_input
from unspool.kernels.gpu.launching import launch, launch_options
from unspool.kernels.gpu.products.arranging import GROUP
from unspool.kernels.gpu.products.early_product import write_products
from unspool.kernels.gpu.products.unpacking import (
    BYTES,
    FLOATS_HIGH,
    FLOATS_LOW,
    HALF_BYTES,
    HALF_FLOATS_HIGH,
    HALF_FLOATS_LOW,
)
from unspool.kernels.gpu.products.words import Words


@gluon.jit
def _twice(x, IS_HALF: gl.constexpr):
    """A number as both halves of a word, in float16 or bfloat16."""
    CODE: gl.constexpr = "cvt.rn.f16x2.f32 $0, $1, $1;" if IS_HALF else "cvt.rn.bf16x2.f32 $0, $1, $1;"
    return gl.inline_asm_elementwise(CODE, "=r,f", [x], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def _read_scales(found, IS_HALF: gl.constexpr):
    """Blocks' scales and their rests, as `unpacking.read_factors`."""
    scale = found.to(gl.float16, bitcast=True).to(gl.float32)
    rest = scale - scale.to(gl.bfloat16).to(gl.float32)
    return _twice(scale, IS_HALF), _twice(rest, IS_HALF)


@gluon.jit
def _unpack_place(words, scale, rest, PLACE: gl.constexpr, IS_FLOAT: gl.constexpr, IS_HALF: gl.constexpr):
    """Two numbers of every word, half a word apart, as halves of a word."""
    if IS_FLOAT:
        LOW: gl.constexpr = HALF_FLOATS_LOW if IS_HALF else FLOATS_LOW
        HIGH: gl.constexpr = HALF_FLOATS_HIGH if IS_HALF else FLOATS_HIGH
        found = gl.inline_asm_elementwise(
            LOW if PLACE == 0 else HIGH, "=r,r", [words], dtype=gl.int32, is_pure=True, pack=1
        )
    else:
        CODE: gl.constexpr = HALF_BYTES if IS_HALF else BYTES
        moved = words >> (8 * PLACE)
        found = gl.inline_asm_elementwise(CODE, "=r,r,r,r", [moved, scale, rest], dtype=gl.int32, is_pure=True, pack=1)
    return found


@gluon.jit
def _unpack(words, scales, IS_FLOAT: gl.constexpr, IS_HALF: gl.constexpr, INPUT: gl.constexpr):
    """The numbers of words (outputs, 4, words of a block) in the order of `arranging`: (outputs, 128)."""
    scale, rest = words, words
    if not IS_FLOAT:
        scale, rest = _read_scales(scales, IS_HALF)
        scale, rest = scale.expand_dims(2), rest.expand_dims(2)
    first = _unpack_place(words, scale, rest, 0, IS_FLOAT, IS_HALF)
    second = _unpack_place(words, scale, rest, 1, IS_FLOAT, IS_HALF)
    both = gl.permute(gl.join(first, second), (0, 2, 3, 1))  # (outputs, words, places, 4)
    low, high = both.to(gl.int16), (both >> 16).to(gl.int16)
    if IS_HALF:
        low, high = low.to(gl.float16, bitcast=True), high.to(gl.float16, bitcast=True)
    else:
        low, high = low.to(gl.bfloat16, bitcast=True), high.to(gl.bfloat16, bitcast=True)
    return gl.convert_layout(gl.reshape(gl.join(low, high), (words.shape[0], 128)), INPUT)


@gluon.jit
def _load_numbers(
    w_tiles, f_tiles, at, IS_FLOAT: gl.constexpr, IS_HALF: gl.constexpr, FLAT: gl.constexpr, WORDS: gl.constexpr,
    INPUT: gl.constexpr,
):  # fmt: skip
    """The numbers of a tile of words, for the tensor cores."""
    words = w_tiles.index(at).load(FLAT)
    words = gl.convert_layout(gl.reshape(words, (words.shape[0], 4, 8)), WORDS)
    scales = words
    if not IS_FLOAT:
        PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        whole = f_tiles._reinterpret(gl.int16, [f_tiles.shape[0], f_tiles.shape[1], 4], PLAIN)
        scales = whole.index(at).load(gl.SliceLayout(2, WORDS))
    return _unpack(words, scales, IS_FLOAT, IS_HALF, INPUT)


@gluon.jit
def _copy_tiles(
    w_tiles, f_tiles, w_at, v_at, f_at, g_at, into, step, STAGES: gl.constexpr, IS_GATED: gl.constexpr,
    IS_FLOAT: gl.constexpr,
):  # fmt: skip
    """Begin to copy a step's words and scales."""
    async_copy.async_copy_global_to_shared(w_tiles.index(into), w_at + step * w_tiles.shape[2])
    if IS_GATED:
        async_copy.async_copy_global_to_shared(w_tiles.index(STAGES + into), v_at + step * w_tiles.shape[2])
    if not IS_FLOAT:
        async_copy.async_copy_global_to_shared(f_tiles.index(into), f_at + step * f_tiles.shape[2])
        if IS_GATED:
            async_copy.async_copy_global_to_shared(f_tiles.index(STAGES + into), g_at + step * f_tiles.shape[2])


@gluon.jit(do_not_specialize=["R", "per_split"])
def _multiply_early_words(
    W, FACTORS, X, BIAS, OUT, R, N, K, per_split,
    IS_FLOAT: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, WARPS: gl.constexpr, ACT: gl.constexpr,
    IS_GATED: gl.constexpr, ADDS: gl.constexpr, HAS_BIAS: gl.constexpr, IS_PART: gl.constexpr, ORDER: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """Outputs (rows, N), or a part's share of them: (parts, rows, N)."""
    dtype: gl.constexpr = X.dtype.element_ty
    IS_HALF: gl.constexpr = dtype == gl.float16
    BN: gl.constexpr = 16 * WARPS
    BW: gl.constexpr = 32  # words of 128 columns
    BF: gl.constexpr = 2  # words of their scales
    AHEAD: gl.constexpr = STAGES - 1
    TILE: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    ROWS: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [WARPS, 1], [1, 0])
    SCALES: gl.constexpr = gl.BlockedLayout([1, BF], [32, 1], [WARPS, 1], [1, 0])
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, BM, 16])
    INPUT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    WORDS: gl.constexpr = gl.DistributedLinearLayout(  # a thread has a block's words of two outputs
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [8, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]] if WARPS == 4 else [[16, 0, 0], [32, 0, 0], [64, 0, 0]], [], [BN, 4, 8],
    )  # fmt: skip
    FLAT: gl.constexpr = gl.DistributedLinearLayout(  # the same
        [[0, 1], [0, 2], [0, 4], [8, 0]],
        [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        [[16, 0], [32, 0]] if WARPS == 4 else [[16, 0], [32, 0], [64, 0]], [], [BN, BW],
    )  # fmt: skip
    SHARED_WORDS: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    COUNT: gl.constexpr = 2 if IS_GATED else 1
    w_tiles = gl.allocate_shared_memory(gl.int32, [COUNT * STAGES, BN, BW], SHARED_WORDS)
    f_tiles = gl.allocate_shared_memory(gl.int32, [COUNT * STAGES, BN, BF], PLAIN)
    x_tiles = gl.allocate_shared_memory(dtype, [STAGES, BM, 128], SHARED)
    split = gl.program_id(1)
    # Outputs and rows beyond the last are computed as the last is, and not written: no copy needs a mask for them.
    KW, KF = K // 4, K // 128 * BF
    first = split * per_split
    steps = gl.minimum(per_split, K // 128 - first)
    rn = gl.minimum(gl.program_id(0) * BN + gl.arange(0, BN, gl.SliceLayout(1, TILE)), N - 1)
    w_at = W + rn.to(gl.int64)[:, None] * KW + (first * BW + gl.arange(0, BW, gl.SliceLayout(0, TILE)))[None, :]
    fn = gl.minimum(gl.program_id(0) * BN + gl.arange(0, BN, gl.SliceLayout(1, SCALES)), N - 1)
    rf = first * BF + gl.arange(0, BF, gl.SliceLayout(0, SCALES))
    f_at = FACTORS + fn.to(gl.int64)[:, None] * KF + rf[None, :]
    rm = gl.minimum(gl.program_id(2) * BM + gl.arange(0, BM, gl.SliceLayout(1, ROWS)), R - 1)
    x_at = X + rm.to(gl.int64)[:, None] * K + (first * 128 + gl.arange(0, 128, gl.SliceLayout(0, ROWS)))[None, :]
    v_at, g_at = w_at + N.to(gl.int64) * KW, f_at + N.to(gl.int64) * KF
    for step in gl.static_range(AHEAD):
        if step < steps:
            _copy_tiles(w_tiles, f_tiles, w_at, v_at, f_at, g_at, step, step, STAGES, IS_GATED, IS_FLOAT)
    let_next_start(PDL)
    wait_for_input(PDL)
    for step in gl.static_range(AHEAD):
        if step < steps:
            async_copy.async_copy_global_to_shared(x_tiles.index(step), x_at + step * 128)
        async_copy.commit_group()
    total = gl.zeros([BN, BM], gl.float32, SUMS)
    other = gl.zeros([BN, BM], gl.float32, SUMS)
    gl.assume(steps > 0)
    for step in range(steps):
        async_copy.wait_group(AHEAD - 1)
        fence_async_shared()  # what was copied is seen by the tensor cores
        gl.thread_barrier()  # and all warps have done with the last tile, which is overwritten next
        at, ahead = step % STAGES, step + AHEAD
        if ahead < steps:
            into = ahead % STAGES
            _copy_tiles(w_tiles, f_tiles, w_at, v_at, f_at, g_at, into, ahead, STAGES, IS_GATED, IS_FLOAT)
            async_copy.async_copy_global_to_shared(x_tiles.index(into), x_at + ahead * 128)
        async_copy.commit_group()
        x = x_tiles.index(at).permute((1, 0))
        numbers = _load_numbers(w_tiles, f_tiles, at, IS_FLOAT, IS_HALF, FLAT, WORDS, INPUT)
        if IS_GATED:
            values = _load_numbers(w_tiles, f_tiles, STAGES + at, IS_FLOAT, IS_HALF, FLAT, WORDS, INPUT)
            total = warpgroup_mma(numbers, x, total, is_async=True)
            other = warpgroup_mma(values, x, other, is_async=True)
            total, other = warpgroup_mma_wait(0, deps=(total, other))
        else:
            total = warpgroup_mma(numbers, x, total, is_async=True)
            total = warpgroup_mma_wait(0, deps=(total,))
    output = gl.program_id(0) * BN + gl.arange(0, BN, gl.SliceLayout(1, SUMS))
    row = gl.program_id(2) * BM + gl.arange(0, BM, gl.SliceLayout(0, SUMS))
    is_output = output < N
    is_there = is_output[:, None] & (row < R)[None, :]
    place = output
    if ORDER > 0:  # as `word_parts.find_place`, for whole groups of 128
        inside = output % 32
        word, pair = output // 32 * ORDER + inside % ORDER, inside % 16 // ORDER
        run = word // (4 * ORDER) * ORDER + word % ORDER
        place = (run * (16 // ORDER) + pair) * 8 + word // ORDER % 4 * 2 + inside // 16
    into_at = OUT + row.to(gl.int64)[None, :] * N + place[:, None]
    if IS_FLOAT:
        scale = gl.load(FACTORS.to(gl.pointer_type(gl.float16)) + output, mask=is_output, other=0.0)
        total *= scale.to(gl.float32)[:, None]
        if IS_GATED:
            scale = gl.load(FACTORS.to(gl.pointer_type(gl.float16)) + N + output, mask=is_output, other=0.0)
            other *= scale.to(gl.float32)[:, None]
    write_products(into_at, total, other, BIAS, output, is_there, split, R, N, ACT, IS_GATED, ADDS, HAS_BIAS, IS_PART)


def multiply_early_words(
    weight: Words,  # (outputs, inputs), of bytes; gate above value if gated; inputs a multiple of 128
    x: torch.Tensor,  # (rows, inputs), 16-bit floats, arranged
    out: torch.Tensor,  # (rows, outputs), half as many if gated; (splits, rows, outputs) float32 for parts
    tile: tuple[int, int, int],  # rows of a program, its warps (one for 16 outputs) and stages
    splits: int,
    *,
    bias: torch.Tensor | None,
    activation: int,
    is_gated: bool,
    adds: bool,
    order: int,
) -> None:
    """As `rows_product.multiply_rows`."""
    rows, warps, stages = tile
    num_outputs, inputs = out.shape[-1], x.shape[1]
    assert weight.bits == 8 and inputs % GROUP == 0 and (order == 0 or num_outputs % GROUP == 0)
    factors = weight.factors.view(torch.int32) if weight.kind == "int8" else weight.factors
    launch(
        _multiply_early_words,
        (triton.cdiv(num_outputs, 16 * warps), splits, triton.cdiv(x.shape[0], rows)),
        weight.words,
        factors,
        x,
        bias if bias is not None else x,
        out,
        x.shape[0],
        num_outputs,
        inputs,
        triton.cdiv(inputs // GROUP, splits),
        IS_FLOAT=weight.kind == "fp8",
        BM=rows,
        STAGES=stages,
        WARPS=warps,
        ACT=activation,
        IS_GATED=is_gated,
        ADDS=adds,
        HAS_BIAS=bias is not None,
        IS_PART=out.dim() == 3,
        ORDER=order,
        num_warps=warps,
        **launch_options(),
    )

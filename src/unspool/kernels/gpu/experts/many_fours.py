"""Experts in MXFP4 for many tokens: an expert's tokens are multiplied together, its numbers unpacked on the way.

As `many_rows`; the reference is `kernels.mx.MxWords.dequantise` and `F.linear`. Each of the eight numbers of a word
makes a product of its own, with the columns of the input that belong to it, so that nothing is put into another order.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.experts.gates import join_gate
from unspool.kernels.gpu.experts.many_rows import GroupTiling, Lists, count_rows
from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.mx import MxWords

USUAL: Final = GroupTiling(64, 32, 4, 3)  # columns are words


@triton.jit
def _read_fours(words, scale, PLACE: tl.constexpr):
    """One number of every word, times its scale: float32."""
    HALF: tl.constexpr = PLACE // 4
    IN_HALF: tl.constexpr = PLACE % 4
    SIZE_AT: tl.constexpr = 16 * HALF + 9 - 3 * IN_HALF
    SIGN_AT: tl.constexpr = 16 * HALF + (15 if IN_HALF == 0 else 12 if IN_HALF == 1 else 16 - IN_HALF)
    bits = (((words >> SIZE_AT) & 7) << 9) | (((words >> SIGN_AT) & 1) << 15)
    return bits.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * scale  # 2 ** 14 times too small


@triton.jit
def _multiply_listed_fours(
    W, SCALES, BIAS, X, LISTS, COUNTS, OUT, limit, gain, P, N,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, SHARE: tl.constexpr,
    ACT: tl.constexpr, IS_GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_LIMIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    KW: tl.constexpr = K // 8
    KB: tl.constexpr = K // 32
    first, expert, start = tl.program_id(0) * BN, tl.program_id(1), tl.program_id(2) * BM
    rm, rn, word = tl.arange(0, BM), first + tl.arange(0, BN), tl.arange(0, BW)
    column = word // 4 * 32 + word % 4  # of a word's first number; the next ones are 4 further each
    let_next_start(PDL)
    wait_for_input(PDL)
    count = tl.load(COUNTS + expert)
    if start < count:
        is_pair, is_output = start + rm < count, rn < N
        pair = tl.load(LISTS + expert * P + start + rm, mask=is_pair, other=0)
        width = N
        if IS_GATED:
            width = 2 * N
        row = (expert.to(tl.int64) * width + rn)[:, None]
        at, scales_at = W + row * KW + word[None, :], SCALES + row * KB + (word // 4)[None, :]
        beside, scales_beside = N.to(tl.int64) * KW, N.to(tl.int64) * KB
        x_at = X + (pair // SHARE).to(tl.int64)[:, None] * K + column[None, :]
        total = tl.zeros((BM, BN), tl.float32)
        other = tl.zeros((BM, BN), tl.float32)
        for start_word in tl.range(0, KW, BW):
            is_word = start_word + word < KW
            is_number = is_output[:, None] & is_word[None, :]
            w = tl.load(at + start_word, mask=is_number, other=0)
            found = tl.load(scales_at + start_word // 4, mask=is_number, other=0).to(tl.int32)
            scale = (found << 23).to(tl.float32, bitcast=True) * 16384.0
            v, beside_scale = w, scale
            if IS_GATED:
                v = tl.load(at + beside + start_word, mask=is_number, other=0)
                found = tl.load(scales_at + scales_beside + start_word // 4, mask=is_number, other=0).to(tl.int32)
                beside_scale = (found << 23).to(tl.float32, bitcast=True) * 16384.0
            for place in tl.static_range(8):
                x = tl.load(x_at + start_word * 8 + 4 * place, mask=is_pair[:, None] & is_word[None, :], other=0.0)
                numbers = _read_fours(w, scale, place).to(x.dtype)
                total = tl.dot(x, tl.trans(numbers), total, input_precision="ieee")
                if IS_GATED:
                    numbers = _read_fours(v, beside_scale, place).to(x.dtype)
                    other = tl.dot(x, tl.trans(numbers), other, input_precision="ieee")
        if HAS_BIAS:
            total += tl.load(BIAS + expert * width + rn, mask=is_output, other=0.0).to(tl.float32)[None, :]
        y = total
        if IS_GATED:
            if HAS_BIAS:
                other += tl.load(BIAS + expert * width + N + rn, mask=is_output, other=0.0).to(tl.float32)[None, :]
            y = join_gate(total, other, limit, gain, ACT, HAS_LIMIT)
        into = OUT + pair.to(tl.int64)[:, None] * N + rn[None, :]
        tl.store(into, y.to(OUT.dtype.element_ty), mask=is_pair[:, None] & is_output[None, :])


def multiply_listed_fours(
    weight: MxWords,  # (experts * outputs, inputs): gate above value in every expert's part if gated
    x: torch.Tensor,  # (pairs / share, inputs)
    lists: Lists,
    out: torch.Tensor,  # (pairs, outputs), half as many if gated
    *,
    share: int,  # pairs that read the same row of x
    num_tokens: int,  # the most pairs of one expert
    tiling: GroupTiling = USUAL,
    bias: torch.Tensor | None = None,
    activation: int = 0,
    is_gated: bool = False,
    limit: float | None = None,
    gain: float = 1.0,
) -> None:
    """Every pair's row times the matrix of its expert."""
    experts, outputs = lists.counts.shape[0], out.shape[1]
    rows = count_rows(out.shape[0], experts, num_tokens)
    launch(
        _multiply_listed_fours,
        (triton.cdiv(outputs, tiling.outputs), experts, triton.cdiv(num_tokens, rows)),
        weight.words,
        weight.scales,
        bias if bias is not None else x,
        x,
        lists.pairs,
        lists.counts,
        out,
        limit or 0.0,
        gain,
        lists.pairs.shape[1],
        outputs,
        K=weight.shape[1],
        BM=rows,
        BN=tiling.outputs,
        BW=tiling.columns,
        SHARE=share,
        ACT=activation,
        IS_GATED=is_gated,
        HAS_BIAS=bias is not None,
        HAS_LIMIT=limit is not None,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **launch_options(),
    )

"""A quantised matrix times several rows on the tensor cores: words become numbers on their way.

The reference is `Words.dequantise` and `F.linear`. A program goes along the columns of a few dozen rows of the matrix;
each place of its words is a tile of its own, and meets the input's columns that stand there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.activations import NONE, activate
from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.words import Words
from unspool.kernels.gpu.words_product import choose_number

MOST_ROWS: Final = 64
SMALLEST_ROWS: Final = 16


@dataclass(frozen=True, slots=True)
class BatchTiling:
    """How the matrix is cut: rows a program, words of each at a time, warps, and steps on their way."""

    rows: int
    words: int
    warps: int
    stages: int


@triton.jit
def _read_tile(W, FACTORS, row, word, is_word, start, K: tl.constexpr, IS_SHORT: tl.constexpr):
    """Words, and what their numbers are multiplied by and what is added: (BN, BW) each."""
    BITS: tl.constexpr = 4 if IS_SHORT else 8  # and the words of a block
    words = tl.load(W + row[:, None] * (K * BITS // 32) + start + word[None, :], mask=is_word, other=0)
    found = tl.load(FACTORS + row[:, None] * (K // 32) + (start + word[None, :]) // BITS, mask=is_word, other=0)
    if IS_SHORT:
        scale = (found & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        least = (found >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    else:
        scale = found.to(tl.float16, bitcast=True).to(tl.float32)
        least = scale * 0.0
    return words, scale, least


@triton.jit
def _multiply_batch(
    W, FACTORS, X, BIAS, Y, N, R,
    K: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, NR: tl.constexpr, STAGES: tl.constexpr,
    IS_SHORT: tl.constexpr, ACT: tl.constexpr, IS_GATED: tl.constexpr, ADDS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    NUMBERS: tl.constexpr = 8 if IS_SHORT else 4
    WORDS: tl.constexpr = 32 // NUMBERS
    KW: tl.constexpr = K // NUMBERS
    rn = (tl.program_id(0) * BN + tl.arange(0, BN)).to(tl.int64)
    rr, word = tl.program_id(1) * NR + tl.arange(0, NR), tl.arange(0, BW)
    is_output, is_row = rn < N, rr < R
    column = word // WORDS * 32 + word % WORDS
    let_next_start(PDL)
    wait_for_input(PDL)
    total = tl.zeros((BN, NR), tl.float32)
    other = tl.zeros((BN, NR), tl.float32)
    for start in tl.range(0, KW, BW, num_stages=STAGES):
        has_word = start + word < KW
        is_word = is_output[:, None] & has_word[None, :]
        w, scale, least = _read_tile(W, FACTORS, rn, word, is_word, start, K, IS_SHORT)
        v, v_scale, v_least = w, scale, least
        if IS_GATED:
            v, v_scale, v_least = _read_tile(W, FACTORS, rn + N, word, is_word, start, K, IS_SHORT)
        for i in tl.static_range(NUMBERS):
            at = X + rr[None, :].to(tl.int64) * K + (start * NUMBERS + column + i * WORDS)[:, None]
            x = tl.load(at, mask=is_row[None, :] & has_word[:, None], other=0.0)
            number = choose_number(w, i, IS_SHORT, HAS_ASM) * scale + least
            total = tl.dot(number.to(X.dtype.element_ty), x, total, input_precision="ieee")
            if IS_GATED:
                number = choose_number(v, i, IS_SHORT, HAS_ASM) * v_scale + v_least
                other = tl.dot(number.to(X.dtype.element_ty), x, other, input_precision="ieee")
    y = total
    if HAS_BIAS:
        y += tl.load(BIAS + rn, mask=is_output, other=0.0).to(tl.float32)[:, None]
    y = activate(y, ACT)
    if IS_GATED:
        if HAS_BIAS:
            other += tl.load(BIAS + N + rn, mask=is_output, other=0.0).to(tl.float32)[:, None]
        y *= other
    at = Y + rr[None, :].to(tl.int64) * N + rn[:, None]
    is_one = is_row[None, :] & is_output[:, None]
    if ADDS:
        y += tl.load(at, mask=is_one, other=0.0).to(tl.float32)
    tl.store(at, y.to(Y.dtype.element_ty), mask=is_one)


def multiply_batch(
    weight: Words,  # (outputs, inputs); gate above value where gated
    x: torch.Tensor,  # (rows, inputs)
    out: torch.Tensor,  # (rows, outputs), half as many where gated; any dtype
    tiling: BatchTiling,
    *,
    bias: torch.Tensor | None = None,
    activation: int = NONE,
    is_gated: bool = False,
    adds: bool = False,
) -> None:
    """out = activation(weight @ x + bias), times the gated half, plus what was there."""
    outputs, inputs = weight.shape
    outputs = outputs // 2 if is_gated else outputs
    rows = x.shape[0]
    across = min(MOST_ROWS, max(SMALLEST_ROWS, triton.next_power_of_2(rows)))
    launch(
        _multiply_batch,
        (triton.cdiv(outputs, tiling.rows), triton.cdiv(rows, across)),
        weight.words,
        weight.factors,
        x,
        bias if bias is not None else x,
        out,
        outputs,
        rows,
        K=inputs,
        BN=tiling.rows,
        BW=tiling.words,
        NR=across,
        STAGES=tiling.stages,
        IS_SHORT=weight.kind == "int4",
        ACT=activation,
        IS_GATED=is_gated,
        ADDS=adds,
        HAS_BIAS=bias is not None,
        HAS_ASM=x.is_cuda,
        num_warps=tiling.warps,
        **launch_options(),
    )

"""A matrix of floats of 8 bits times a few rows: as `row_product`, from words of four numbers.

The reference is `Words.dequantise` and `F.linear`. A row of the matrix has one scale, so nothing but products is added
up before the end. Words of the first tiles are on their way before the input is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final, Unpack

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import let_next_start, wait_for_input
from unspool.kernels.gpu.products.result import Around, launch_product, load_biases, load_held, write_result
from unspool.kernels.gpu.products.word_parts import half_of, read_float
from unspool.kernels.gpu.products.words import Words

WIDENS_FROM: Final = (8, 9)  # the first compute capability with an instruction that widens floats of 8 bits


@dataclass(frozen=True, slots=True)
class FloatTiling:
    """How the matrix is cut: rows per program, words of each at a time, its warps; tiles loaded before the input."""

    rows: int
    words: int
    warps: int
    ahead: int = 2


@triton.jit
def _widen(words, HAS_WIDENING: tl.constexpr):
    """The four floats of every word as float32."""
    if HAS_WIDENING:
        found = tl.inline_asm_elementwise(
            """{
            .reg .b16 low, high, a, b;
            .reg .b32 pair;
            mov.b32 {low, high}, $4;
            cvt.rn.f16x2.e4m3x2 pair, low;
            mov.b32 {a, b}, pair;
            cvt.f32.f16 $0, a;
            cvt.f32.f16 $1, b;
            cvt.rn.f16x2.e4m3x2 pair, high;
            mov.b32 {a, b}, pair;
            cvt.f32.f16 $2, a;
            cvt.f32.f16 $3, b;
            }""",
            "=f,=f,=f,=f,r", [words], dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True, pack=1,
        )  # fmt: skip
    else:
        found = read_float(words, 0), read_float(words, 1), read_float(words, 2), read_float(words, 3)
    return found


@triton.jit
def _load_words(at, is_output, word, start, KW: tl.constexpr):
    is_word = is_output[:, None] & (start + word < KW)[None, :]
    return tl.load(at + start, mask=is_word, other=0, eviction_policy="evict_first")


@triton.jit
def _multiply_floats(
    W, FACTORS, X, NORM, BIAS, Y, eps, N,
    R: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, AHEAD: tl.constexpr,
    ACT: tl.constexpr, IS_GATED: tl.constexpr, ADDS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_WIDENING: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    KW: tl.constexpr = K // 4
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    word = tl.arange(0, BW)
    is_output = rn < N
    at = W + rn.to(tl.int64)[:, None] * KW + word[None, :]
    beside = at + N.to(tl.int64) * KW
    column = word // 8 * 32 + word % 8  # of a word's first number; the next ones are 8 further each
    loaded, others = (), ()
    for start in tl.static_range(0, KW, BW):
        if start < AHEAD * BW:
            w = _load_words(at, is_output, word, start, KW)
            v = w
            if IS_GATED:
                v = _load_words(beside, is_output, word, start, KW)
            loaded, others = loaded + (w,), others + (v,)
    factor = half_of(tl.load(FACTORS + rn, mask=is_output, other=0), False)
    factor_beside = factor
    if IS_GATED:
        factor_beside = half_of(tl.load(FACTORS + N + rn, mask=is_output, other=0), False)
    biases = load_biases(BIAS, rn, is_output, N, IS_GATED, HAS_BIAS)
    let_next_start(PDL)
    wait_for_input(PDL)
    totals, gated, squares, held = (), (), (), ()
    for row in tl.static_range(R):
        held = held + (load_held(Y, row, rn, is_output, N, ADDS),)
        nothing = tl.zeros((BN, BW), tl.float32)
        totals, gated, squares = totals + (nothing,), gated + (nothing,), squares + (tl.zeros((BW,), tl.float32),)
    for start in tl.static_range(0, KW, BW):
        has_word = start + word < KW
        if start < AHEAD * BW:
            w, v = loaded[start // BW], others[start // BW]
        else:
            w = _load_words(at, is_output, word, start, KW)
            v = w
            if IS_GATED:
                v = _load_words(beside, is_output, word, start, KW)
        numbers = _widen(w, HAS_WIDENING)
        values = numbers
        if IS_GATED:
            values = _widen(v, HAS_WIDENING)
        for i in tl.static_range(4):
            here = start * 4 + column + i * 8
            if HAS_NORM:
                norm = tl.load(NORM + here, mask=has_word, other=0.0).to(tl.float32)
            so_far = (totals, gated, squares)
            totals, gated, squares = (), (), ()
            for row in tl.static_range(R):
                x = tl.load(X + row * K + here, mask=has_word, other=0.0).to(tl.float32)
                squares = squares + (so_far[2][row] + x * x,)
                if HAS_NORM:
                    x = x * norm
                total = so_far[0][row] + numbers[i] * x[None, :]
                totals = totals + (total,)
                if IS_GATED:
                    total = so_far[1][row] + values[i] * x[None, :]
                gated = gated + (total,)
    for row in tl.static_range(R):
        total = (tl.sum(totals[row], 1) * factor)[:, None]
        other = total
        if IS_GATED:
            other = (tl.sum(gated[row], 1) * factor_beside)[:, None]
        write_result(
            total, other, squares[row], held[row], biases, row, rn, is_output, Y, eps, N,
            K, ACT, IS_GATED, ADDS, HAS_NORM,
        )  # fmt: skip


@cache
def has_widening() -> bool:
    """Whether the GPU has an instruction that widens floats of 8 bits."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= WIDENS_FROM


def multiply_floats(
    weight: Words,  # (outputs, inputs), of floats of 8 bits
    x: torch.Tensor,  # (rows, inputs)
    out: torch.Tensor,  # (rows, outputs)
    tiling: FloatTiling,
    **around: Unpack[Around],
) -> None:
    """As `multiply_row`, of a matrix of floats of 8 bits."""
    launch_product(
        _multiply_floats,
        (weight.words, weight.factors),
        weight.shape,
        x,
        out,
        tiling.rows,
        around,
        R=x.shape[0],
        BN=tiling.rows,
        BW=min(tiling.words, triton.next_power_of_2(weight.words.shape[1])),
        AHEAD=tiling.ahead,
        HAS_WIDENING=has_widening(),
        num_warps=tiling.warps,
    )

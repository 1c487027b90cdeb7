"""A quantised matrix times a few rows: as `row_product`, from words of 4- or 8-bit whole numbers.

The reference is `Words.dequantise` and `F.linear`. Instructions are the cost here, not bytes: a number becomes a float
in place, as the low bits of a power of two's mantissa, and the excess is subtracted once per block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Unpack

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.products.result import Around, launch_product, load_biases, load_held, write_result
from unspool.kernels.gpu.products.word_parts import choose_byte, read_float
from unspool.kernels.gpu.products.words import Words

MOST_ROWS: Final = 2  # at once: sums of all of them are held in registers
_UNPACKED: Final = 1024  # numbers per program


@dataclass(frozen=True, slots=True)
class WordsTiling:
    """How the matrix is cut: rows per program, words of each at a time, and its warps."""

    rows: int
    words: int
    warps: int


@triton.jit
def _choose_bits(bits, MASK: tl.constexpr, EXPONENT: tl.constexpr, HAS_ASM: tl.constexpr):
    """(bits & MASK) | EXPONENT as a float, in one instruction; the compiler would use two."""
    if HAS_ASM:
        found = tl.inline_asm_elementwise(
            "lop3.b32 $0, $1, $2, $3, 0xEA;",
            "=r,r,r,r",
            [bits, tl.full((), MASK, tl.int32), tl.full((), EXPONENT, tl.int32)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
    else:
        found = (bits & MASK) | EXPONENT
    return found.to(tl.float32, bitcast=True)


@triton.jit
def _choose_nibble(words, PLACE: tl.constexpr, HAS_ASM: tl.constexpr):
    """Four bits of every word, plus 2 ** 7 or 2 ** 11 (`_excess`): two of them take one shift."""
    if PLACE == 0:
        found = _choose_bits(words << 16, 0x000F0000, 0x43000000, HAS_ASM)
    elif PLACE < 3:
        found = _choose_bits(words << 8, 0x0000F000 << (4 * PLACE - 4), 0x45000000 - ((PLACE - 1) << 25), HAS_ASM)
    elif PLACE < 5:
        found = _choose_bits(words, 0x0000F000 << (4 * PLACE - 12), 0x45000000 - ((PLACE - 3) << 25), HAS_ASM)
    elif PLACE < 7:
        found = _choose_bits(words >> 8, 0x0000F000 << (4 * PLACE - 20), 0x45000000 - ((PLACE - 5) << 25), HAS_ASM)
    else:
        found = _choose_bits(words >> 12, 0x000F0000, 0x43000000, HAS_ASM)
    return found


@triton.jit
def _find_numbers(
    W, FACTORS, row, column, is_one, K: tl.constexpr, IS_SHORT: tl.constexpr, IS_FLOAT: tl.constexpr
):  # fmt: skip
    """The numbers at some columns of rows, element by element."""
    BITS: tl.constexpr = 4 if IS_SHORT else 8
    WORDS: tl.constexpr = BITS  # of a block of 32
    word = tl.load(W + row * (K * BITS // 32) + column // 32 * WORDS + column % WORDS, mask=is_one, other=0)
    stored = (word >> (column % 32 // WORDS * BITS)) & ((1 << BITS) - 1)
    number = stored.to(tl.float32)
    if IS_FLOAT:
        found = tl.load(FACTORS + row + column * 0, mask=is_one, other=0)
    else:
        found = tl.load(FACTORS + row * (K // 32) + column // 32, mask=is_one, other=0)
    if IS_FLOAT:
        value = read_float(stored, 0) * found.to(tl.float16, bitcast=True).to(tl.float32)
    elif IS_SHORT:
        scale = (found & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        least = (found >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        value = number * scale + least
    else:
        value = (number - 128.0) * found.to(tl.float16, bitcast=True).to(tl.float32)
    return value


@triton.jit
def _unpack_words(
    W, FACTORS, ROWS, OUT, scale,
    K: tl.constexpr, IS_SHORT: tl.constexpr, IS_FLOAT: tl.constexpr, HAS_ROWS: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    let_next_start(PDL)
    wait_for_input(PDL)
    place = tl.program_id(0).to(tl.int64)
    row = place
    if HAS_ROWS:
        row = tl.maximum(tl.load(ROWS + place), 0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = _find_numbers(W, FACTORS, row, column, column < K, K, IS_SHORT, IS_FLOAT) * scale
    tl.store(OUT + place * K + column, value.to(OUT.dtype.element_ty), mask=column < K)


def unpack_words(
    weight: Words,
    out: torch.Tensor,  # (rows, columns)
    *,
    rows: torch.Tensor | None = None,  # which rows; None: all
    scale: float = 1.0,
) -> torch.Tensor:
    """Write dequantised rows times a scale: embeddings, and the input of products of many rows."""
    columns = weight.shape[1]
    launch(
        _unpack_words,
        (out.shape[0], triton.cdiv(columns, _UNPACKED)),
        weight.words,
        weight.factors,
        rows if rows is not None else weight.words,
        out,
        scale,
        K=columns,
        IS_SHORT=weight.kind == "int4",
        IS_FLOAT=weight.kind == "fp8",
        HAS_ROWS=rows is not None,
        BLOCK=_UNPACKED,
        **launch_options(),
    )
    return out


@triton.jit
def _choose(words, PLACE: tl.constexpr, IS_SHORT: tl.constexpr, HAS_ASM: tl.constexpr):
    if IS_SHORT:
        found = _choose_nibble(words, PLACE, HAS_ASM)
    else:
        found = choose_byte(words, PLACE, HAS_ASM)
    return found


@triton.jit
def _weigh(total, excess, sums, found, BN: tl.constexpr, BLOCKS: tl.constexpr, IS_SHORT: tl.constexpr):
    """The products of blocks (BN, BLOCKS) from those of their words, by their factors and the input's sums."""
    WORDS: tl.constexpr = 4 if IS_SHORT else 8
    total = tl.sum(tl.reshape(total, (BN, BLOCKS, WORDS)), 2)
    excess = tl.sum(tl.reshape(excess, (BLOCKS, WORDS)), 1)
    if IS_SHORT:
        sums = tl.sum(tl.reshape(sums, (BLOCKS, WORDS)), 1)
        scale = (found & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        least = (found >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        total = (total - excess[None, :]) * scale + sums[None, :] * least
    else:
        total = (total - excess[None, :]) * found.to(tl.float16, bitcast=True).to(tl.float32)
    return total


@triton.jit
def _multiply_words(
    W, FACTORS, X, NORM, BIAS, Y, eps, N,
    R: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, IS_SHORT: tl.constexpr, ACT: tl.constexpr,
    IS_GATED: tl.constexpr, ADDS: tl.constexpr, HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ASM: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    NUMBERS: tl.constexpr = 8 if IS_SHORT else 4  # of a word
    WORDS: tl.constexpr = 32 // NUMBERS  # of a block
    BLOCKS: tl.constexpr = BW // WORDS
    KW: tl.constexpr = K // NUMBERS
    first = tl.program_id(0) * BN
    place, word, block = tl.arange(0, BN), tl.arange(0, BW), tl.arange(0, BLOCKS)
    rn = first + place
    is_output = rn < N
    at = W + first.to(tl.int64) * KW + place[:, None] * KW + word[None, :]
    KB: tl.constexpr = K // 32  # factors of a row
    at_factors = FACTORS + first.to(tl.int64) * KB + place[:, None] * KB + block[None, :]
    column = word // WORDS * 32 + word % WORDS  # of a word's first number; the next ones are WORDS further each
    w = tl.load(at, mask=is_output[:, None] & (word < KW)[None, :], other=0, eviction_policy="evict_first")
    v = w
    if IS_GATED:
        beside = at + N.to(tl.int64) * KW
        v = tl.load(beside, mask=is_output[:, None] & (word < KW)[None, :], other=0, eviction_policy="evict_first")
    biases = load_biases(BIAS, rn, is_output, N, IS_GATED, HAS_BIAS)
    let_next_start(PDL)
    wait_for_input(PDL)
    nothing = tl.zeros((BW,), tl.float32)
    parts, others, squares, held = (), (), (), ()
    for row in tl.static_range(R):
        held = held + (load_held(Y, row, rn, is_output, N, ADDS),)
        empty = tl.zeros((BN, BLOCKS), tl.float32)
        parts, others, squares = parts + (empty,), others + (empty,), squares + (nothing,)
    for start in tl.static_range(0, KW, BW):
        has_word = start + word < KW
        is_word = is_output[:, None] & has_word[None, :]
        is_block = is_output[:, None] & (start // WORDS + block < K // 32)[None, :]
        if start > 0:
            w = tl.load(at + start, mask=is_word, other=0, eviction_policy="evict_first")
        f = tl.load(at_factors + start // WORDS, mask=is_block, other=0, eviction_policy="evict_first")
        if IS_GATED:
            if start > 0:
                v = tl.load(beside + start, mask=is_word, other=0, eviction_policy="evict_first")
            at_value = at_factors + N.to(tl.int64) * KB + start // WORDS
            g = tl.load(at_value, mask=is_block, other=0, eviction_policy="evict_first")
        totals, gated, sums, excesses = (), (), (), ()
        for i in tl.static_range(NUMBERS):
            number = _choose(w, i, IS_SHORT, HAS_ASM)
            if IS_GATED:
                value = _choose(v, i, IS_SHORT, HAS_ASM)
            here = start * NUMBERS + column + i * WORDS
            if HAS_NORM:
                norm = tl.load(NORM + here, mask=has_word, other=0.0).to(tl.float32)
            so_far = (totals, gated, sums, excesses, squares)
            totals, gated, sums, excesses, squares = (), (), (), (), ()
            for row in tl.static_range(R):
                x = tl.load(X + row * K + here, mask=has_word, other=0.0).to(tl.float32)
                squares = squares + (so_far[4][row] + x * x,)
                if HAS_NORM:
                    x = x * norm
                # The excess of numbers put into a mantissa (`_choose_nibble`, `choose_byte`).
                if IS_SHORT:
                    excess = x * (2048.0 if i % 2 == 1 and i < 7 else 128.0)
                else:
                    excess = x * (32768.0 + 128.0)
                product = number * x[None, :]
                beside_it = product
                if IS_GATED:
                    beside_it = value * x[None, :]
                if i > 0:
                    product += so_far[0][row]
                    beside_it += so_far[1][row]
                    excess += so_far[3][row]
                    totals, gated = totals + (product,), gated + (beside_it,)
                    sums, excesses = sums + (so_far[2][row] + x,), excesses + (excess,)
                else:
                    totals, gated = totals + (product,), gated + (beside_it,)
                    sums, excesses = sums + (x,), excesses + (excess,)
        so_far = (parts, others)
        parts, others = (), ()
        for row in tl.static_range(R):
            part = _weigh(totals[row], excesses[row], sums[row], f, BN, BLOCKS, IS_SHORT)
            parts = parts + (so_far[0][row] + part,)
            if IS_GATED:
                part = _weigh(gated[row], excesses[row], sums[row], g, BN, BLOCKS, IS_SHORT)
            others = others + (so_far[1][row] + part,)
    for row in tl.static_range(R):
        write_result(
            parts[row], others[row], squares[row], held[row], biases, row, rn, is_output, Y, eps, N,
            K, ACT, IS_GATED, ADDS, HAS_NORM,
        )  # fmt: skip


def multiply_words(
    weight: Words,  # (outputs, inputs), of whole numbers
    x: torch.Tensor,  # (rows, inputs)
    out: torch.Tensor,  # (rows, outputs)
    tiling: WordsTiling,
    **around: Unpack[Around],
) -> None:
    """As `multiply_row`, of a matrix of words."""
    launch_product(
        _multiply_words,
        (weight.words, weight.factors),
        weight.shape,
        x,
        out,
        tiling.rows,
        around,
        R=x.shape[0],
        BN=tiling.rows,
        BW=min(tiling.words, triton.next_power_of_2(weight.words.shape[1])),
        IS_SHORT=weight.kind == "int4",
        HAS_ASM=x.is_cuda,
        num_warps=tiling.warps,
    )

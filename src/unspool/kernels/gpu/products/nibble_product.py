"""A matrix of 4-bit words times one row: the input stays in registers while a program goes through several tiles.

The reference is `Words.dequantise` and `F.linear`. A word's numbers are never widened one by one: either they and the
input are float16 (`half_blocks.py`), or both are integers (`byte_blocks.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Unpack

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import let_next_start, wait_for_input
from unspool.kernels.gpu.products.byte_blocks import multiply_bytes, round_input
from unspool.kernels.gpu.products.half_blocks import halve_input, multiply_halves
from unspool.kernels.gpu.products.result import Around, launch_product, load_biases, load_held, write_result
from unspool.kernels.gpu.products.word_parts import half_of, part_words
from unspool.kernels.gpu.products.words import Words

MOST_CHUNKS: Final = 8  # of words of a row: all of the input is held in registers


@dataclass(frozen=True, slots=True)
class NibbleTiling:
    """How the matrix is cut: rows and words of each at a time, tiles per program, and its warps."""

    rows: int
    words: int
    tiles: int
    warps: int


@triton.jit
def _multiply_blocks(
    words, factors, x, power, sums,
    BN: tl.constexpr, BW: tl.constexpr, ROUNDS: tl.constexpr, HAS_ASM: tl.constexpr,
):  # fmt: skip
    """The products of blocks (BN, BLOCKS): numbers times input, by the scale, and the minimum times the input's sum."""
    parted = part_words(words, BN, BW // 4)
    scale, least = half_of(factors, False), half_of(factors, True)
    if ROUNDS:
        total = multiply_bytes(parted, x, HAS_ASM).to(tl.float32)
        found = (total * scale + least * sums[None, :]) * power[None, :]
    else:
        total = multiply_halves(parted, x, HAS_ASM)
        found = total * (scale * power[None, :]) + (least + 8.0 * scale) * sums[None, :]
    return found


@triton.jit(do_not_specialize=["num_tiles"])
def _multiply_nibbles(
    W, FACTORS, X, NORM, BIAS, Y, eps, N, num_tiles,
    K: tl.constexpr, BN: tl.constexpr, BW: tl.constexpr, ROUNDS: tl.constexpr,
    ACT: tl.constexpr, IS_GATED: tl.constexpr, ADDS: tl.constexpr,
    HAS_NORM: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    BLOCKS: tl.constexpr = BW // 4
    KW: tl.constexpr = K // 8
    KB: tl.constexpr = K // 32
    CHUNKS: tl.constexpr = (KW + BW - 1) // BW
    place, word, block = tl.arange(0, BN), tl.arange(0, BW), tl.arange(0, BLOCKS)
    rn = tl.program_id(0) * (BN * num_tiles) + place
    at = W + rn.to(tl.int64)[:, None] * KW + word[None, :]
    factors_at = FACTORS + rn.to(tl.int64)[:, None] * KB + block[None, :]
    beside, factors_beside = N.to(tl.int64) * KW, N.to(tl.int64) * KB  # offset of the gated half
    words, factors, others, other_factors = (), (), (), ()
    for c in tl.static_range(CHUNKS):
        is_word = (rn < N)[:, None] & (c * BW + word < KW)[None, :]
        is_block = (rn < N)[:, None] & (c * BLOCKS + block < KB)[None, :]
        w = tl.load(at + c * BW, mask=is_word, other=0, eviction_policy="evict_first")
        f = tl.load(factors_at + c * BLOCKS, mask=is_block, other=0, eviction_policy="evict_first")
        words, factors = words + (w,), factors + (f,)
        if IS_GATED:
            w = tl.load(at + beside + c * BW, mask=is_word, other=0, eviction_policy="evict_first")
            f = tl.load(factors_at + factors_beside + c * BLOCKS, mask=is_block, other=0, eviction_policy="evict_first")
        others, other_factors = others + (w,), other_factors + (f,)
    column = word // 4 * 32 + word % 4  # of a word's first number; the next ones are 4 further each
    norms = ()
    for c in tl.static_range(CHUNKS):
        for i in tl.static_range(8):
            norm = column
            if HAS_NORM:
                norm = tl.load(NORM + c * BW * 8 + column + i * 4, mask=c * BW + word < KW, other=0.0)
            norms = norms + (norm,)
    let_next_start(PDL)
    wait_for_input(PDL)
    # --- the input
    squares = tl.zeros((BW,), tl.float32)
    inputs = ()
    for c in tl.static_range(CHUNKS):
        xs = ()
        for i in tl.static_range(8):
            x = tl.load(X + c * BW * 8 + column + i * 4, mask=c * BW + word < KW, other=0.0).to(tl.float32)
            squares += x * x
            if HAS_NORM:
                x *= norms[c * 8 + i].to(tl.float32)
            xs = xs + (x,)
        if ROUNDS:
            inputs = inputs + (round_input(xs, BW, HAS_ASM),)
        else:
            inputs = inputs + (halve_input(xs, BW, HAS_ASM),)
    # --- tile by tile: the next one is prefetched while this one is multiplied
    for tile in tl.range(num_tiles):
        part = tl.zeros((BN, BLOCKS), tl.float32)
        other = part
        held = load_held(Y, 0, rn, rn < N, N, ADDS)
        biases = load_biases(BIAS, rn, rn < N, N, IS_GATED, HAS_BIAS)
        is_more = (rn + BN < N) & (tile + 1 < num_tiles)
        step = (tile + 1) * BN
        so_far = (words, factors, others, other_factors)
        words, factors, others, other_factors = (), (), (), ()
        for c in tl.static_range(CHUNKS):
            parted, power, sums = inputs[c]
            is_word = is_more[:, None] & (c * BW + word < KW)[None, :]
            is_block = is_more[:, None] & (c * BLOCKS + block < KB)[None, :]
            next_at = at + step * KW + c * BW
            next_factors = factors_at + step * KB + c * BLOCKS
            w = tl.load(next_at, mask=is_word, other=0, eviction_policy="evict_first")
            f = tl.load(next_factors, mask=is_block, other=0, eviction_policy="evict_first")
            words, factors = words + (w,), factors + (f,)
            part += _multiply_blocks(so_far[0][c], so_far[1][c], parted, power, sums, BN, BW, ROUNDS, HAS_ASM)
            if IS_GATED:
                w = tl.load(next_at + beside, mask=is_word, other=0, eviction_policy="evict_first")
                f = tl.load(next_factors + factors_beside, mask=is_block, other=0, eviction_policy="evict_first")
                other += _multiply_blocks(so_far[2][c], so_far[3][c], parted, power, sums, BN, BW, ROUNDS, HAS_ASM)
            others, other_factors = others + (w,), other_factors + (f,)
        write_result(part, other, squares, held, biases, 0, rn, rn < N, Y, eps, N, K, ACT, IS_GATED, ADDS, HAS_NORM)
        rn += BN


def multiply_nibbles(
    weight: Words,  # (outputs, inputs) of 4 bits
    x: torch.Tensor,  # (1, inputs)
    out: torch.Tensor,  # (1, outputs)
    tiling: NibbleTiling,
    *,
    rounds: bool,  # the input to 8 bits, block by block
    **around: Unpack[Around],
) -> None:
    """As `multiply_words`, of one row."""
    launch_product(
        _multiply_nibbles,
        (weight.words, weight.factors),
        weight.shape,
        x,
        out,
        tiling.rows * tiling.tiles,
        around,
        tiling.tiles,
        BN=tiling.rows,
        BW=min(tiling.words, max(128, triton.next_power_of_2(weight.words.shape[1]))),
        ROUNDS=rounds,
        HAS_ASM=x.is_cuda,
        num_warps=tiling.warps,
    )

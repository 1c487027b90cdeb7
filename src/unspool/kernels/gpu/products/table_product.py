"""A matrix of 4-bit codes of a table (nf4, fp4) times up to 64 rows.

The reference is `TableWords.dequantise` and `F.linear`. Numbers are looked up, scaled in float32 and rounded to the
rows' dtype, as the dequantised matrix is, and go to the tensor cores.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.table_words import TableWords

MOST_ROWS: Final = 64  # more are multiplied by a dequantised copy
_LEAST_ROWS: Final = 16  # of a product on the tensor cores
_OUTPUTS: Final = 16  # of a program
_COLUMNS: Final = 256  # that a program reads at once


@triton.jit
def _multiply_tables(
    WORDS, SCALES, TABLE, X, BIAS, Y, M, N,
    K: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    rn = tl.program_id(0) * BN + tl.arange(0, BN)
    rm = tl.arange(0, BM)
    column = tl.arange(0, BK)
    is_output = rn < N
    words = WORDS + rn.to(tl.int64)[:, None] * (K // 8)
    scales = SCALES + rn.to(tl.int64)[:, None] * (K // 32)
    let_next_start(PDL)
    wait_for_input(PDL)
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        at = start + column
        is_number = is_output[:, None] & (at < K)[None, :]
        word = tl.load(words + (at // 8)[None, :], mask=is_number, other=0)
        scale = tl.load(scales + (at // 32)[None, :], mask=is_number, other=0.0)
        code = (word >> (at % 8 * 4)[None, :]) & 15
        numbers = tl.load(TABLE + code) * scale  # (BN, BK)
        x = tl.load(
            X + rm.to(tl.int64)[:, None] * K + at[None, :], mask=(rm < M)[:, None] & (at < K)[None, :], other=0.0
        )
        total = tl.dot(x, tl.trans(numbers.to(x.dtype)), total, input_precision="ieee")
    if HAS_BIAS:
        total += tl.load(BIAS + rn, mask=is_output, other=0.0).to(tl.float32)[None, :]
    y = Y + rm.to(tl.int64)[:, None] * N + rn[None, :]
    tl.store(y, total.to(Y.dtype.element_ty), mask=(rm < M)[:, None] & is_output[None, :])


def multiply_tables(weight: TableWords, x: torch.Tensor, out: torch.Tensor, bias: torch.Tensor | None) -> None:
    """out (rows, outputs) = x (rows, inputs) times the matrix, plus a bias; up to `MOST_ROWS` rows."""
    (num_rows, inputs), outputs = x.shape, weight.shape[0]
    assert num_rows <= MOST_ROWS and x.is_contiguous() and out.is_contiguous()
    launch(
        _multiply_tables,
        (triton.cdiv(outputs, _OUTPUTS),),
        weight.words,
        weight.scales,
        weight.read_table(),
        x,
        x if bias is None else bias,
        out,
        num_rows,
        outputs,
        K=inputs,
        BM=max(_LEAST_ROWS, triton.next_power_of_2(num_rows)),
        BN=_OUTPUTS,
        BK=min(_COLUMNS, triton.next_power_of_2(inputs)),
        HAS_BIAS=bias is not None,
        **launch_options(),
    )

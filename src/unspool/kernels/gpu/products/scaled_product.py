"""Products of many rows with floats of 8 bits: both sides in 8 bits, on the tensor cores that multiply these.

The reference is `words.round_rows_plainly` and `Words.dequantise` with `F.linear`. A row of the input is rounded to
floats of 8 bits by a scale of its own; products of up to 256 rows (`rows_product`) round no input.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.products.words import LARGEST_FLOAT, SMALLEST_SCALE, Words

_FLOATS_FROM: Final = (8, 9)  # the first compute capability whose tensor cores multiply floats of 8 bits
_UNIT: Final = 16  # outputs are a multiple of this


@triton.jit
def _round_rows(
    X, OUT, SCALES, K, LARGEST: tl.constexpr, SMALLEST: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    let_next_start(PDL)
    wait_for_input(PDL)
    x = tl.load(X + row * K + at, mask=at < K, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(x), 0) / LARGEST, SMALLEST)
    y = tl.minimum(tl.maximum(x / scale, -LARGEST), LARGEST)
    y = tl.where(x == x, y, x).to(tl.float8e4nv)  # what is no number stays none
    dealt = tl.reshape(tl.permute(tl.reshape(y, (BLOCK // 32, 4, 8)), (0, 2, 1)), (BLOCK,))
    tl.store(OUT + row * K + at, dealt, mask=at < K)
    tl.store(SCALES + row, scale)


def round_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (rows, columns) as floats of 8 bits in the order of words' bytes, and their scales (rows, 1)."""
    rows, columns = x.shape
    out = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    block = triton.next_power_of_2(columns)
    launch(
        _round_rows,
        (rows,),
        x,
        out,
        scales,
        columns,
        LARGEST=LARGEST_FLOAT,
        SMALLEST=SMALLEST_SCALE,
        BLOCK=block,
        num_warps=8 if block >= 2048 else 4,
        **launch_options(),
    )
    return out, scales


def can_scale(weight: Words, x: torch.Tensor) -> bool:
    """Whether the GPU multiplies rows by floats of 8 bits as they are."""
    return (
        weight.kind == "fp8"
        and x.is_cuda
        and x.dtype == torch.bfloat16  # what torch's product with a scale per row writes
        and weight.shape[0] % _UNIT == 0
        and hasattr(torch, "_scaled_mm")
        and torch.cuda.get_device_capability(x.device) >= _FLOATS_FROM
    )


def multiply_scaled(weight: Words, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """weight @ x of rows that are rounded to floats of 8 bits: (rows, outputs), in `out` if it is given."""
    rounded, scales = round_rows(x)
    numbers = weight.words.view(torch.float8_e4m3fn)  # (outputs, inputs), in the order of bytes
    theirs = weight.factors.view(torch.float16).float().view(1, -1)
    out = x.new_empty(x.shape[0], weight.shape[0]) if out is None else out
    torch._scaled_mm(
        rounded, numbers.t(), scale_a=scales, scale_b=theirs, out_dtype=x.dtype, use_fast_accum=True, out=out
    )
    return out

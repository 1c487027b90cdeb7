"""Half precision on a CPU without instructions for it, where torch's products take 50 times as long as in float32.

Results are those of half precision: a product is summed up in float32 and rounded once, as torch does where it has the
instructions. Matrices stay as they are: the CPU library reads them in place, and without it they are widened for each
product.
"""

from __future__ import annotations

import platform
from functools import cache
from typing import Final

import torch
import torch.nn.functional as F

from unspool.kernels.cpu.blocks import BLOCK
from unspool.kernels.cpu.library import find_library
from unspool.kernels.cpu.operators import multiply_halves_plainly, multiply_traced_halves

_HALVES: Final = (torch.bfloat16, torch.float16)
_SUPPORT: Final = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
_MOST_ROWS: Final = 32  # of a product in the library; torch's float32 product of more is faster
_WIDENED: Final = 1 << 22  # numbers of a matrix that are widened at a time for that
_MOST_ASKED: Final = 32  # queries that meet a key; torch's float32 products of more are faster


@cache
def lacks_products(dtype: torch.dtype) -> bool:
    """Whether torch has no fast products of a dtype on this CPU."""
    if dtype not in _HALVES:
        return False
    if dtype == torch.float16 and platform.machine().lower() in ("aarch64", "arm64"):
        return True  # torch says that oneDNN takes them there, and calls a loop over numbers
    supports = getattr(torch.ops.mkldnn, _SUPPORT[dtype], None)  # torch may be built without oneDNN
    return supports is None or not supports()


def is_slow(numbers: torch.Tensor) -> bool:
    """Whether torch has no fast products of these numbers where they are."""
    return numbers.dtype in _HALVES and numbers.device.type == "cpu" and lacks_products(numbers.dtype)


def multiply_rows(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x (…, in) times a matrix (out, in), plus a bias: torch's own product, or ours where that is slow."""
    if not is_slow(weight) or x.dtype != weight.dtype:
        return F.linear(x, weight, bias)
    return multiply_halves(x, weight, bias)


def multiply_halves(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x (…, in) times a matrix (out, in), plus a bias, in half precision on a CPU: summed up in float32."""
    if torch.compiler.is_compiling():
        made: torch.Tensor = multiply_traced_halves(x, weight, bias)
        return made
    library, rows = find_library(), x.reshape(-1, x.shape[-1])
    if library is None or not weight.is_contiguous():
        return multiply_halves_plainly(x, weight, bias)
    if len(rows) <= _MOST_ROWS:
        return library.multiply_halves(rows, weight, bias).view(*x.shape[:-1], weight.shape[0])
    made, wide = x.new_empty(len(rows), weight.shape[0]), library.widen(rows)
    size = max(1, _WIDENED // weight.shape[1])
    for first in range(0, weight.shape[0], size):
        some = slice(first, first + size)
        part = None if bias is None else library.widen(bias[some])
        made[:, some] = F.linear(wide, library.widen(weight[some]), part)
    return made.view(*x.shape[:-1], -1)


def attend_halves(
    queries: torch.Tensor,  # (rows, heads, new, width)
    keys: torch.Tensor,  # (rows, kv_heads, keys, width)
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor | None:
    """What few queries read of keys that all of them see, by the CPU library: computed in float32, and rounded once.

    None if it is not such attention, or there is no library."""
    (rows, heads, num_new, width), kv_heads = queries.shape, keys.shape[1]
    library = None if torch.compiler.is_compiling() else find_library()
    asked = heads // kv_heads * num_new
    if library is None or asked > _MOST_ASKED or width % BLOCK or not keys.dtype == values.dtype == queries.dtype:
        return None
    if mask is not None:
        if mask.dtype != torch.bool or mask.dim() != 4 or mask.shape[1:3] != (1, 1) or mask.shape[0] not in (1, rows):
            return None
        mask = mask[:, 0, 0]
    if keys.stride(3) != 1 or values.stride(3) != 1 or not keys.shape[2]:
        return None
    grouped = queries.reshape(rows, kv_heads, asked, width)  # the queries that meet the same keys
    return library.attend_halves(grouped, keys, values, mask, scale).view(queries.shape)


def widen(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers in float32; torch takes ten times as long for float16."""
    library = find_library()
    if library is None or torch.compiler.is_compiling() or numbers.dtype not in _HALVES:
        return numbers.float()
    return library.widen(numbers)


def convolve(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, stride: int = 1) -> torch.Tensor:
    """A convolution over time (rows, channels, frames), one frame padded at both ends; in float32 where it is slow."""
    if not is_slow(weight):
        return F.conv1d(x, weight, bias, stride=stride, padding=1)
    return F.conv1d(widen(x), widen(weight), widen(bias), stride=stride, padding=1).to(x.dtype)

"""FP8 as DeepSeek and Qwen publish it: floats of 8 bits (e4m3) with a factor for each block of 128 × 128."""

from __future__ import annotations

from typing import Final

import torch

from unspool.loading.quantised.format import Format, Found, Method, Parts, list_modules
from unspool.loading.quantised.matrix import FloatMatrix, QuantisedMatrix
from unspool.loading.tensors import TensorFile

MOST_BLOCK: Final = 1 << 20  # rows or columns that share a factor
_SPARE: Final = (".activation_scale", ".input_scale", ".k_scale", ".v_scale")  # activations are not quantised here


def _find(method: Method, tensors: TensorFile) -> Found:
    method.require("fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    block = method.values.get("weight_block_size")
    is_pair = isinstance(block, list) and len(block) == 2 and all(type(one) is int for one in block)
    if block is not None and not (is_pair and all(1 <= one <= MOST_BLOCK for one in block)):
        method.refuse("weight_block_size", f"blocks are two whole numbers up to {MOST_BLOCK}")
    sizes = None if block is None else (block[0], block[1])
    found: dict[str, QuantisedMatrix] = {
        f"{module}.weight": _read(Parts(tensors, module), sizes) for module in list_modules(tensors, "weight_scale_inv")
    }
    return Found(found, frozenset(name for name in tensors.names() if name.endswith(_SPARE)))


def _read(parts: Parts, sizes: tuple[int, int] | None) -> FloatMatrix:
    shape = parts.shape("weight")
    if len(shape) != 2:
        parts.fail(f"weight has {len(shape)} dimensions")
    rows, columns = shape
    values = parts.map("weight", torch.float8_e4m3fn, "F8_E4M3", (rows, columns))
    scales = parts.take_scales("weight_scale_inv", parts.shape("weight_scale_inv"))
    block = sizes if sizes is not None else (rows, columns)
    return FloatMatrix(
        (rows, columns), tuple(parts.names), values, expand_blocks(parts, scales, (rows, columns), block), block
    )


def expand_blocks(parts: Parts, scales: torch.Tensor, shape: tuple[int, int], block: tuple[int, int]) -> torch.Tensor:
    """Factors as (blocks of rows, blocks of columns); raises if there are more or fewer than blocks."""
    expected = (-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    is_flat = expected[1] == 1 and scales.dim() < 2 and scales.numel() == expected[0]
    if tuple(scales.shape) != expected and not is_flat:
        parts.fail(f"blocks of {list(block)} make {list(expected)} factors, and there are {list(scales.shape)}")
    return scales.reshape(expected)


FP8: Final = Format("fp8", _find)

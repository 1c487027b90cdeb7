"""Random tensors of a file's formats, and whole ones as numbers; the library reads them part by part."""

from __future__ import annotations

import math

import numpy as np
import torch

from unspool.loading.dequantize import STORED_TYPES, iterate_rows

# Where a block's float16 scales lie: random bytes there are replaced by finite numbers.
HALVES = {name: [0] for name in ("Q8_0", "Q4_0", "Q5_0", "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ3_XXS")}
HALVES |= {name: [0] for name in ("IQ2_S", "IQ2_XS", "IQ2_XXS", "IQ1_S")}
HALVES |= {name: [0, 2] for name in ("Q4_1", "Q5_1", "Q4_K", "Q5_K")}
HALVES |= {"Q6_K": [208], "Q3_K": [108], "Q2_K": [80, 82], "TQ1_0": [52], "TQ2_0": [64], "MXFP4": [], "IQ1_M": []}


def random_blocks(kind: str, num_rows: int, blocks_per_row: int, seed: int) -> np.ndarray:
    """Rows of blocks of random bytes (every string of bytes is a sound block, but for its float16)."""
    numbers = np.random.default_rng(seed)
    size = STORED_TYPES[kind].block_bytes
    blocks = numbers.integers(0, 256, (num_rows * blocks_per_row, size), dtype=np.uint8)
    for at in HALVES[kind]:
        scales = numbers.standard_normal((len(blocks), 1)).astype(np.float16)
        blocks[:, at : at + 2] = scales.view(np.uint8)
    if kind == "MXFP4":  # powers of two that do not overflow
        blocks[:, 0] %= 250
    if kind == "IQ1_M":  # a float16's bits are the upper halves of four bytes
        bits = numbers.standard_normal(len(blocks)).astype(np.float16).view(np.uint16)
        for place in range(4):
            nibble = ((bits >> (4 * place)) & 15).astype(np.uint8)
            blocks[:, 49 + 2 * place] = (blocks[:, 49 + 2 * place] & 15) | (nibble << 4)
    return blocks.reshape(num_rows, -1)


def dequantize(raw: torch.Tensor, kind: str, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The bytes of a tensor (uint8, rows first) as numbers of `dtype`."""
    rows = raw.reshape(math.prod(shape[:-1]), -1)
    return torch.cat([part for _, part in iterate_rows(rows, STORED_TYPES[kind])]).view(shape).to(dtype)

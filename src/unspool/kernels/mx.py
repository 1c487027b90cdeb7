"""MXFP4 matrices: floats of 4 bits (a sign, two bits of exponent, one of mantissa), 32 of which share a power of two.

The format is OCP's Microscaling (2023), as gpt-oss is published in it. Files have a block's numbers in order, two to a
byte. For a GPU they are laid out as words: word j of a block's four has the numbers j, j + 4, …, four to a half, each
placed so that few instructions make a float16 of it (`arrange`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

from unspool.kernels.cpu.blocks import BLOCK, Blocks

_TWICE: Final = (0, 1, 2, 3, 4, 6, 8, 12)  # twice the sizes that three bits say
_BIAS: Final = 127  # of a block's exponent
_HALVES: Final = (-24, 15)  # exponents of powers of two that a float16 has
# Of the four numbers of a half: where their three bits of size begin, and where their signs are.
_SIZES_AT: Final = (9, 6, 3, 0)
_SIGNS_AT: Final = (15, 12, 14, 13)


def split_codes(blocks: torch.Tensor) -> torch.Tensor:
    """The codes (rows, columns) of stored blocks (rows, columns / 32, 16)."""
    return torch.stack((blocks & 15, blocks >> 4), dim=-1).view(blocks.shape[0], -1)


def read_codes(codes: torch.Tensor) -> torch.Tensor:
    """Twice the numbers that codes stand for: int8."""
    table = torch.tensor([*_TWICE, *(-size for size in _TWICE)], dtype=torch.int8, device=codes.device)
    return table[codes.int()]


def widen(blocks: torch.Tensor, scales: torch.Tensor) -> Blocks | None:
    """The same numbers in 8 bits: exact; None if a block's power of two is no float16."""
    exponents = scales.int() - (_BIAS + 1)
    if bool((exponents < _HALVES[0]).any() or (exponents > _HALVES[1]).any()):
        return None
    return Blocks(read_codes(split_codes(blocks)), torch.exp2(exponents.float()).half(), None)


def dequantise(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The numbers of stored blocks (rows, columns / 32, 16) and exponents (rows, columns / 32): float32."""
    return _scale(read_codes(split_codes(blocks)), scales)


def _scale(twice: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    factors = torch.exp2(scales.float() - (_BIAS + 1))
    return (twice.view(*scales.shape, BLOCK).float() * factors[..., None]).view(scales.shape[0], -1)


@dataclass(slots=True)
class MxWords:
    """A matrix (rows, columns) as a GPU's kernels read it."""

    words: torch.Tensor  # (rows, columns / 8) int32
    scales: torch.Tensor  # (rows, columns / 32) uint8: exponents

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.words.shape[0], 8 * self.words.shape[1]

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """The dequantised matrix: (rows, columns)."""
        rows = self.words.shape[0]
        codes = []
        for half in (0, 16):
            for size_at, sign_at in zip(_SIZES_AT, _SIGNS_AT, strict=True):
                size, sign = self.words >> (half + size_at), self.words >> (half + sign_at)
                codes.append((size & 7) | ((sign & 1) << 3))
        dealt = torch.stack(codes, dim=-1).view(rows, -1, 4, 8).transpose(2, 3)  # (rows, blocks, in a word, words)
        return _scale(read_codes(dealt.reshape(rows, -1)), self.scales).to(dtype)


def arrange(blocks: torch.Tensor, scales: torch.Tensor) -> MxWords:
    """Stored blocks as words."""
    rows = blocks.shape[0]
    dealt = split_codes(blocks).to(torch.int32).view(rows, -1, 8, 4)  # (rows, blocks, in a word, words)
    words = torch.zeros_like(dealt[:, :, 0])
    for place in range(8):
        half, code = 16 * (place // 4), dealt[:, :, place]
        words |= (code & 7) << (half + _SIZES_AT[place % 4])
        words |= (code >> 3) << (half + _SIGNS_AT[place % 4])
    return MxWords(words.view(rows, -1), scales.contiguous())

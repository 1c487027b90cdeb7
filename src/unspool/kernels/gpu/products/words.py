"""Quantised matrices as a GPU reads them: 32-bit words of 4- or 8-bit numbers, and a scale and a minimum per block.

The numbers of a block of 32 columns are interleaved: word j holds columns j, j + words, j + 2 * words, …, so that the
inputs that a thread needs for one index of all its words are contiguous. Numbers of 8 bits are whole ones, or floats
(e4m3: a sign, four bits of exponent, three of mantissa) with one scale per row of the matrix.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final, Literal

import torch

from unspool.errors import SettingError
from unspool.kernels.cpu.blocks import BLOCK, Blocks, Kind

SWITCH: Final = "UNSPOOL_GPU_ROUNDING"  # "on" or "off"
WordKind = Kind | Literal["fp8"]
LARGEST_FLOAT: Final = 448.0  # of e4m3
SMALLEST_SCALE: Final = 1e-12  # of a row of an input
_SMALLEST: Final = 2.0**-24  # the smallest positive float16


def rounds_inputs() -> bool:
    """Whether one row is rounded to 8 bits, block by block, before 4-bit numbers are multiplied by it.

    Only in models of 16-bit floats; those of float32 are exact in any case.
    """
    asked = os.environ.get(SWITCH, "on")
    if asked not in ("on", "off"):
        raise SettingError(f"{SWITCH}={asked[:40]!r} is neither 'on' nor 'off'")
    return asked == "on"


@dataclass(slots=True)
class Words:
    """A matrix (rows, columns): `value = number * scale + minimum`, with 8 bits `(number - 128) * scale`.

    Floats are `number * scale`.
    """

    words: torch.Tensor  # (rows, columns / numbers per word) int32
    factors: (
        torch.Tensor
    )  # (rows, columns / 32), or (rows, 1): float16's bits (int16), or scale's and minimum's (int32)
    kind: WordKind

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.words.shape[0], self.words.shape[1] * (32 // self.bits)

    @property
    def bits(self) -> int:
        """Bits of a number, without its factors."""
        return 4 if self.kind == "int4" else 8

    def dequantise(self, dtype: torch.dtype) -> torch.Tensor:
        """The dequantised matrix: (rows, columns)."""
        bits = self.bits
        shifts = torch.arange(0, 32, bits, device=self.words.device, dtype=torch.int32)
        rows = self.words.shape[0]
        dealt = self.words.view(rows, -1, 1, BLOCK * bits // 32) >> shifts[:, None]  # (rows, blocks, in a word, words)
        stored = (dealt & ((1 << bits) - 1)).reshape(rows, -1, BLOCK)
        factors = self.factors.view(torch.float16).view(*self.factors.shape, -1).float()
        if self.kind == "fp8":
            numbers = stored.to(torch.uint8).view(torch.float8_e4m3fn).float() * factors
            return numbers.view(rows, -1).to(dtype)
        numbers = stored.float()
        if bits == 4:
            numbers = torch.addcmul(factors[..., 1:], numbers, factors[..., :1])
        else:
            numbers = (numbers - 128) * factors
        return numbers.view(rows, -1).to(dtype)

    def narrow(self, first: int, count: int) -> Words:
        """Consecutive rows."""
        return Words(self.words[first : first + count], self.factors[first : first + count], self.kind)

    def select(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Some rows' numbers: (rows, columns)."""
        return Words(self.words[rows], self.factors[rows], self.kind).dequantise(dtype)


def lay_out_words(blocks: Blocks, device: torch.device) -> Words:
    """Blocks as words on a device. 8-bit numbers are stored unsigned."""
    rounds_inputs()  # an invalid setting raises while weights are loaded, not in the first pass
    rows, columns = blocks.quants.shape
    bits = 4 if blocks.kind == "int4" else 8
    numbers = blocks.quants.to(device).to(torch.int32) + (0 if bits == 4 else 128)
    dealt = numbers.view(rows, columns // BLOCK, 32 // bits, BLOCK * bits // 32)  # (rows, blocks, in a word, words)
    shifts = torch.arange(0, 32, bits, device=device, dtype=torch.int32)
    words = (dealt << shifts[:, None]).sum(2, dtype=torch.int32)
    factors = [blocks.scales] if blocks.minimums is None else [blocks.scales, blocks.minimums]
    bits_of_factors = torch.stack(factors, -1).to(device).view(torch.int32 if len(factors) == 2 else torch.int16)
    return Words(words.view(rows, -1), bits_of_factors.squeeze(-1), blocks.kind)


def round_floats(weight: torch.Tensor) -> Words:
    """The nearest floats of 8 bits to a matrix (rows, columns), whose largest number in each row becomes the largest
    that there is."""
    numbers = weight.float()
    most = numbers.abs().amax(1, keepdim=True)
    scales = (most / LARGEST_FLOAT).half().view(torch.int16)
    scales += (scales.view(torch.float16).float() * LARGEST_FLOAT < most).to(torch.int16)  # rounded up: nothing is cut
    factors = scales.view(torch.float16).float().clamp(min=_SMALLEST)
    stored = deal_floats((numbers / factors).to(torch.float8_e4m3fn).view(torch.uint8)).contiguous()
    return Words(stored.view(torch.int32), scales, "fp8")


def deal_floats(numbers: torch.Tensor) -> torch.Tensor:
    """Numbers (rows, columns) in the order of the bytes of words."""
    rows, columns = numbers.shape
    return numbers.view(rows, columns // BLOCK, 4, BLOCK // 4).transpose(2, 3).reshape(rows, columns)


def round_rows_plainly(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows (rows, columns) as floats of 8 bits, dealt, and their scales (rows, 1): what `scaled_product` multiplies."""
    numbers = x.float()
    scales = (numbers.abs().amax(1, keepdim=True) / LARGEST_FLOAT).clamp(min=SMALLEST_SCALE)
    numbers = (numbers / scales).clamp(-LARGEST_FLOAT, LARGEST_FLOAT)
    return deal_floats(numbers).to(torch.float8_e4m3fn), scales

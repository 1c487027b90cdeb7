"""Quantised matrices as rows of blocks: 32 columns share a scale and, with 4 bits, a minimum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch

from unspool.errors import LoadError

BLOCK: Final = 32  # columns that share a scale, as in GGUF's simple formats
Kind = Literal["int8", "int4"]
_STORED_BYTES: Final = {"Q8_0": 34, "Q5_0": 22, "Q4_0": 18, "Q4_1": 20}  # of a block in a GGUF file
_SMALLEST: Final = 2.0**-24  # the smallest positive float16


@dataclass(slots=True)
class Blocks:
    """A matrix (rows, columns) as whole numbers: `value = quant * scale`, and `+ minimum` with 4 bits."""

    quants: torch.Tensor  # (rows, columns) int8, or uint8 from 0 to 15
    scales: torch.Tensor  # (rows, columns / 32) float16
    minimums: torch.Tensor | None  # (rows, columns / 32) float16; None with 8 bits

    @property
    def kind(self) -> Kind:
        """How many bits a weight has."""
        return "int8" if self.minimums is None else "int4"

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.quants.shape[0], self.quants.shape[1]

    @property
    def halves(self) -> list[torch.Tensor]:
        """The float16 numbers: scales, and minimums if there are any."""
        return [self.scales] if self.minimums is None else [self.scales, self.minimums]

    def select_rows(self, order: torch.Tensor) -> Blocks:
        """The rows in another order."""
        minimums = self.minimums[order] if self.minimums is not None else None
        return Blocks(self.quants[order], self.scales[order], minimums)

    def dequantise(self) -> torch.Tensor:
        """The dequantised matrix: (rows, columns) float32."""
        rows, columns = self.quants.shape
        values = self.quants.view(rows, -1, BLOCK).float() * self.scales.float()[..., None]
        if self.minimums is not None:
            values += self.minimums.float()[..., None]
        return values.view(rows, columns)


def read_blocks(raw: torch.Tensor, stored: str, shape: tuple[int, ...]) -> Blocks | None:
    """A GGUF tensor's own blocks, exactly: Q8_0, Q5_0, Q4_1 and Q4_0; None for formats that have no such form.

    `raw` are the tensor's bytes. Q4_0 counts from -8, which is a minimum of -8 scales: exact in float16. Q5_0 counts
    from -16 and fits 8 bits; Q5_1 has a minimum beside 5 bits. Matrices that are stored as one tensor of three
    dimensions stand one below the other.
    """
    if len(shape) == 3:
        shape = (shape[0] * shape[1], shape[2])
    if len(shape) != 2 or stored not in _STORED_BYTES or shape[1] % BLOCK:
        return None
    blocks = raw.view(shape[0], -1, _STORED_BYTES[stored])  # (rows, blocks, bytes)
    scales = read_halves(blocks, 0)
    if stored == "Q8_0":
        return Blocks(blocks[:, :, 2:].reshape(shape).view(torch.int8), scales, None)
    packed = blocks[:, :, -16:]
    quants = torch.cat((packed & 15, packed >> 4), dim=2)  # (rows, blocks, 32): low halves, then high ones
    if stored == "Q5_0":
        bits = blocks[:, :, 2:6, None] >> torch.arange(8, dtype=torch.uint8)  # (rows, blocks, 4, 8): the fifth ones
        quants |= (bits & 1).flatten(2) << 4
        return Blocks(quants.view(torch.int8).sub_(16).view(shape), scales, None)
    minimums = read_halves(blocks, 2) if stored == "Q4_1" else scales * -8
    return Blocks(quants.view(shape), scales, minimums)


def read_halves(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of every block: (rows, blocks)."""
    return blocks[:, :, at : at + 2].clone(memory_format=torch.contiguous_format).view(torch.float16).squeeze(2)


def round_halves(numbers: torch.Tensor) -> torch.Tensor | None:
    """Numbers as float16, rounded by 1/2048 at most; None if one is too large or too small for that."""
    halves = numbers.half()
    return halves if bool(((halves.float() - numbers).abs() <= numbers.abs() * 2.0**-11).all()) else None


def quantise_rows(weight: torch.Tensor, kind: Kind) -> Blocks:
    """The nearest blocks to a matrix of numbers (rows, columns): symmetric with 8 bits, from a block's minimum
    to its maximum with 4."""
    rows, columns = weight.shape
    if columns % BLOCK:
        raise LoadError(f"{columns} columns are not whole blocks of {BLOCK}")
    groups = weight.float().view(rows, -1, BLOCK)  # (rows, blocks, 32)
    if kind == "int8":
        scales = (groups.abs().amax(-1) / 127).half()
        quants = (groups / scales.float().clamp(min=_SMALLEST)[..., None]).round_().clamp_(-127, 127)
        return Blocks(quants.to(torch.int8).view(rows, columns), scales, None)
    least, most = groups.aminmax(dim=-1)
    # Of zeros with both signs either may be the least: added to 0, both are the positive one.
    minimums, scales = least.half() + 0, ((most - least) / 15).half()
    quants = (groups - minimums.float()[..., None]) / scales.float().clamp(min=_SMALLEST)[..., None]
    return Blocks(quants.round_().clamp_(0, 15).to(torch.uint8).view(rows, columns), scales, minimums)

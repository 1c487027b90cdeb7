"""Quantised matrices as rows of blocks: 32 columns share a scale and, with 4 bits, a minimum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch

from unspool.errors import LoadError

BLOCK: Final = 32  # columns that share a scale, as in GGUF's simple formats
Kind = Literal["int8", "int4"]
_STORED_BYTES: Final = {"Q8_0": 34, "Q5_0": 22, "Q4_0": 18, "Q4_1": 20}  # of a block in a GGUF file
K_VALUES: Final = 256  # of a block of GGUF's K formats, and
K_BYTES: Final = 144  # the bytes of one with 4 bits
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
    """A GGUF tensor's own blocks: Q8_0, Q5_0, Q4_1 and Q4_0 exactly, Q4_K with its scales rounded; None for formats
    that have no such form.

    `raw` are the tensor's bytes. Q4_0 counts from -8, which is a minimum of -8 scales: exact in float16. Q5_0 counts
    from -16 and fits 8 bits. Q6_K has two scales to a block, Q5_K and Q5_1 a minimum beside 5 bits. Matrices that are
    stored as one tensor of three dimensions stand one below the other.
    """
    if len(shape) == 3:
        shape = (shape[0] * shape[1], shape[2])
    if stored == "Q4_K" and len(shape) == 2 and shape[1] % K_VALUES == 0:
        return _read_q4_k(raw.view(-1, K_BYTES), shape)
    if len(shape) != 2 or stored not in _STORED_BYTES or shape[1] % BLOCK:
        return None
    blocks = raw.view(shape[0], -1, _STORED_BYTES[stored])  # (rows, blocks, bytes)
    scales = _read_halves(blocks, 0)
    if stored == "Q8_0":
        return Blocks(blocks[:, :, 2:].reshape(shape).view(torch.int8), scales, None)
    packed = blocks[:, :, -16:]
    quants = torch.cat((packed & 15, packed >> 4), dim=2)  # (rows, blocks, 32): low halves, then high ones
    if stored == "Q5_0":
        bits = blocks[:, :, 2:6, None] >> torch.arange(8, dtype=torch.uint8)  # (rows, blocks, 4, 8): the fifth ones
        quants |= (bits & 1).flatten(2) << 4
        return Blocks(quants.view(torch.int8).sub_(16).view(shape), scales, None)
    minimums = _read_halves(blocks, 2) if stored == "Q4_1" else scales * -8
    return Blocks(quants.view(shape), scales, minimums)


def _read_q4_k(blocks: torch.Tensor, shape: tuple[int, ...]) -> Blocks | None:
    """Blocks of Q4_K: 4 bits as they are; scales and minimums, a float16 times six bits, are rounded to float16, by
    1/2048 at most (a float16's last bit is 2^-24, and so is theirs: small ones lose nothing). None if one overflows."""
    (scales, mins), packed = read_k_scales(blocks), blocks[:, 16:].reshape(-1, 4, 32)  # (blocks, 8) float32
    quants = torch.stack((packed & 15, packed >> 4), dim=2)  # (blocks, 4, 2, 32)
    halves, minimums = scales.half(), mins.neg().half()
    if bool((halves.isinf() & scales.isfinite()).any() or (minimums.isinf() & mins.isfinite()).any()):
        return None
    return Blocks(quants.view(shape), halves.view(shape[0], -1), minimums.view(shape[0], -1))


def read_k_scales(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The eight scales and minimums (blocks, 8) of Q4_K or Q5_K blocks (blocks, bytes): six bits each in bytes 4 to 16,
    times the float16 before them.

    Bytes 0-3 hold scales 0-3 in their low six bits, bytes 4-7 the minimums 0-3; bytes 8-11 hold the low nibbles of
    scales (low) and minimums (high) 4-7, whose top two bits are the top bits of bytes 0-7.
    """
    first, second, third = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1).float()
    mins = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1).float()
    halves = _read_halves(blocks[:, None], 0), _read_halves(blocks[:, None], 2)
    return scales.mul_(halves[0].float()), mins.mul_(halves[1].float())


def _read_halves(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of every block: (rows, blocks)."""
    return blocks[:, :, at : at + 2].clone(memory_format=torch.contiguous_format).view(torch.float16).squeeze(2)


def join_blocks(parts: Sequence[Blocks]) -> Blocks:
    """Matrices of one kind, one below the other."""
    minimums = [part.minimums for part in parts if part.minimums is not None]
    if minimums and len(minimums) != len(parts):
        raise LoadError("blocks of 4 and of 8 bits can't make one matrix")
    return Blocks(
        torch.cat([part.quants for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat(minimums) if minimums else None,
    )


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
    minimums, scales = least.half(), ((most - least) / 15).half()
    quants = (groups - minimums.float()[..., None]) / scales.float().clamp(min=_SMALLEST)[..., None]
    return Blocks(quants.round_().clamp_(0, 15).to(torch.uint8).view(rows, columns), scales, minimums)

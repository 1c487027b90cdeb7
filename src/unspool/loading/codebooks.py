"""GGUF's kinds below four bits and those with tables: IQ1 to IQ4, Q2_K, Q3_K, ternary numbers and MXFP4.

A block's numbers are whole numbers of 8 bits, most of them looked up in a table of short vectors, times a factor for
16 or 32 of them. The layouts are those of ggml's `ggml-common.h`; `codebooks.npz` has its tables
(tools/make_codebooks.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import numpy as np
import torch

from unspool.kernels.cpu.blocks import BLOCK, Blocks, round_halves

_TABLES: Final = Path(__file__).with_name("codebooks.npz")
_FOUR_BITS: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)  # of IQ4
_TWICE_FLOATS: Final = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # of MXFP4


@dataclass(frozen=True, slots=True)
class Coded:
    """Unpacked blocks: a number is `code * factor - minimum`."""

    codes: torch.Tensor  # (blocks, numbers) int8
    factors: torch.Tensor  # (blocks, groups) float32
    minimums: torch.Tensor | None = None  # (blocks, groups) float32

    def dequantise(self) -> torch.Tensor:
        """The numbers: (blocks, numbers) float32."""
        blocks, groups = self.factors.shape
        numbers = self.codes.view(blocks, groups, -1).float().mul_(self.factors[..., None])
        if self.minimums is not None:
            numbers.sub_(self.minimums[..., None])
        return numbers.view(blocks, -1)


@dataclass(frozen=True, slots=True)
class CodedKind:
    """A storage format: how many numbers and bytes a block has, and how they are unpacked."""

    numbers: int
    num_bytes: int
    unpack: Callable[[torch.Tensor], Coded]  # (blocks, bytes) uint8

    def dequantise(self, blocks: torch.Tensor) -> torch.Tensor:
        """The numbers of blocks (blocks, bytes): (blocks, numbers) float32."""
        return self.unpack(blocks).dequantise()


def read_coded(raw: torch.Tensor, stored: str, shape: tuple[int, ...]) -> Blocks | None:
    """A tensor's own codes as blocks of 8 bits, their factors rounded to float16 (by 1/2048 at most).

    None for other formats, for factors that 16 numbers share, and for those that no float16 is near; NaN is a
    FloatingPointError. Matrices that are stored as one tensor of three dimensions stand one below the other.
    """
    kind = CODED.get(stored)
    if len(shape) == 3:
        shape = (shape[0] * shape[1], shape[2])
    if kind is None or len(shape) != 2 or shape[1] % kind.numbers:
        return None
    found = kind.unpack(raw.view(-1, kind.num_bytes))
    group = kind.numbers // found.factors.shape[1]
    if group % BLOCK or found.minimums is not None:
        return None
    if bool(found.factors.isnan().any()):
        raise FloatingPointError(f"a factor of these {stored} blocks is NaN")
    factors = round_halves(found.factors)
    if factors is None:
        return None
    return Blocks(found.codes.view(shape), factors.repeat_interleave(group // BLOCK, dim=1).view(shape[0], -1), None)


# --- parts of blocks ---------------------------------------------------------------------------------------


@cache
def _table(name: str) -> torch.Tensor:
    with np.load(_TABLES, allow_pickle=False) as file:
        return torch.from_numpy(file[name])


def _words(blocks: torch.Tensor, first: int, end: int, dtype: torch.dtype) -> torch.Tensor:
    """Bytes of every block as whole numbers without a sign: (blocks, words) int64."""
    found = blocks[:, first:end].clone(memory_format=torch.contiguous_format).view(dtype).long()
    return found & ((1 << (8 * dtype.itemsize)) - 1)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at a byte of every block: (blocks, 1) float32."""
    return blocks[:, at : at + 2].clone(memory_format=torch.contiguous_format).view(torch.float16).float()


def _shift(numbers: torch.Tensor, bits: tuple[int, ...], mask: int) -> torch.Tensor:
    """Fields of whole numbers (blocks, words), those of a word side by side: (blocks, words * fields)."""
    return ((numbers[..., None] >> torch.tensor(bits, dtype=numbers.dtype)) & mask).flatten(1)


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """The low and the high half of each byte, side by side."""
    return _shift(packed, (0, 4), 15)


def _halves(packed: torch.Tensor, group: int) -> torch.Tensor:
    """The low halves of every `group` bytes, then their high ones: (blocks, 2 * bytes)."""
    groups = packed.reshape(packed.shape[0], -1, 1, group)
    return torch.cat((groups & 15, groups >> 4), dim=2).flatten(1)


def _planes(packed: torch.Tensor, group: int) -> torch.Tensor:
    """Fields of two bits: all the lowest of every `group` bytes, then the next: (blocks, 4 * bytes)."""
    groups = packed.reshape(packed.shape[0], -1, 1, group)
    return ((groups >> torch.tensor((0, 2, 4, 6), dtype=torch.uint8)[:, None]) & 3).flatten(1)


def _look_up(name: str, places: torch.Tensor) -> torch.Tensor:
    """Short vectors of a table by their places (blocks, vectors): (blocks, numbers) int8."""
    return _table(name)[places].flatten(1)


def _sign(codes: torch.Tensor, bits: torch.Tensor) -> torch.Tensor:
    """Codes (blocks, numbers), negated where a bit of (blocks, numbers / 8) bytes is set."""
    set_bits = _shift(bits, tuple(range(8)), 1).to(torch.int8)
    return codes * (1 - 2 * set_bits)


def _even(bits: torch.Tensor) -> torch.Tensor:
    """Seven bits and the eighth that makes their number even."""
    parity = bits ^ (bits >> 4)
    parity ^= parity >> 2
    parity ^= parity >> 1
    return bits | ((parity & 1) << 7)


_SEVENS: Final = (0, 7, 14, 21)  # where in a word four fields of seven bits are


# --- the kinds ---------------------------------------------------------------------------------------------


def _unpack_iq1_s(blocks: torch.Tensor) -> Coded:
    high = _words(blocks, 34, 50, torch.int16)  # (blocks, 8)
    places = blocks[:, 2:34].long() | (_shift(high, (0, 3, 6, 9), 7) << 8)
    offset = (1 - 2 * (high >> 15)).to(torch.int8)  # of an eighth
    codes = 8 * _look_up("IQ1_S", places) + offset.repeat_interleave(32, dim=1)
    return Coded(codes, _half(blocks, 0) * (2 * ((high >> 12) & 7) + 1) / 8)


def _unpack_iq1_m(blocks: torch.Tensor) -> Coded:
    scales = _words(blocks, 48, 56, torch.int16)  # (blocks, 4)
    bits = ((scales >> 12) << torch.tensor((0, 4, 8, 12))).sum(1, keepdim=True)
    half = bits.to(torch.int32).to(torch.int16).view(torch.float16).float()  # its four bits each in one word
    high = _nibbles(blocks[:, 32:48]).long()  # (blocks, 32)
    offset = (1 - 2 * (high >> 3)).to(torch.int8)
    codes = 8 * _look_up("IQ1_S", blocks[:, :32].long() | ((high & 7) << 8)) + offset.repeat_interleave(8, dim=1)
    return Coded(codes, half * (2 * _shift(scales, (0, 3, 6, 9), 7) + 1) / 8)


def _unpack_iq2_xxs(blocks: torch.Tensor) -> Coded:
    words = _words(blocks, 2, 66, torch.int32).view(-1, 8, 2)
    places, rest = _shift(words[..., 0], (0, 8, 16, 24), 255), words[..., 1]
    codes = _sign(_look_up("IQ2_XXS", places), _even(_shift(rest, _SEVENS, 127)))
    return Coded(codes, _half(blocks, 0) * (0.5 + (rest >> 28)) / 4)


def _unpack_iq2_xs(blocks: torch.Tensor) -> Coded:
    words = _words(blocks, 2, 66, torch.int16)
    codes = _sign(_look_up("IQ2_XS", words & 511), _even(words >> 9))
    return Coded(codes, _half(blocks, 0) * (0.5 + _nibbles(blocks[:, 66:74])) / 4)


def _unpack_iq2_s(blocks: torch.Tensor) -> Coded:
    places = blocks[:, 2:34].long() | (_shift(blocks[:, 66:74].long(), (0, 2, 4, 6), 3) << 8)
    codes = _sign(_look_up("IQ2_S", places), blocks[:, 34:66])
    return Coded(codes, _half(blocks, 0) * (0.5 + _nibbles(blocks[:, 74:82])) / 4)


def _unpack_iq3_xxs(blocks: torch.Tensor) -> Coded:
    words = _words(blocks, 66, 98, torch.int32)  # (blocks, 8)
    codes = _sign(_look_up("IQ3_XXS", blocks[:, 2:66].long()), _even(_shift(words, _SEVENS, 127)))
    return Coded(codes, _half(blocks, 0) * (0.5 + (words >> 28)) / 2)


def _unpack_iq3_s(blocks: torch.Tensor) -> Coded:
    places = blocks[:, 2:66].long() | (_shift(blocks[:, 66:74].long(), tuple(range(8)), 1) << 8)
    codes = _sign(_look_up("IQ3_S", places), blocks[:, 74:106])
    return Coded(codes, _half(blocks, 0) * (1 + 2 * _nibbles(blocks[:, 106:110]).float()))


def _unpack_iq4_nl(blocks: torch.Tensor) -> Coded:
    table = torch.tensor(_FOUR_BITS, dtype=torch.int8)
    return Coded(table[_halves(blocks[:, 2:18], 16).long()], _half(blocks, 0))


def _unpack_iq4_xs(blocks: torch.Tensor) -> Coded:
    table = torch.tensor(_FOUR_BITS, dtype=torch.int8)
    high = _shift(_words(blocks, 2, 4, torch.int16), tuple(range(0, 16, 2)), 3)
    scales = (_nibbles(blocks[:, 4:8]).long() | (high << 4)) - 32
    return Coded(table[_halves(blocks[:, 8:136], 16).long()], _half(blocks, 0) * scales)


def _unpack_mxfp4(blocks: torch.Tensor) -> Coded:
    table = torch.tensor(_TWICE_FLOATS, dtype=torch.int8)
    factors = torch.exp2(blocks[:, :1].double() - 128).float()  # half a power of two, as the codes are doubled
    return Coded(table[_halves(blocks[:, 1:17], 16).long()], factors)


def _unpack_tq1_0(blocks: torch.Tensor) -> Coded:
    """Five or four digits to base 3 in a byte, as the fraction of 256 that they are of 243."""

    def digits(packed: torch.Tensor, group: int, count: int) -> torch.Tensor:
        groups = packed.reshape(packed.shape[0], -1, 1, group)
        turned = groups * torch.tensor([3**place for place in range(count)], dtype=torch.uint8)[:, None]
        return ((turned.int() * 3) >> 8).flatten(1)

    parts = (digits(blocks[:, :32], 32, 5), digits(blocks[:, 32:48], 16, 5), digits(blocks[:, 48:52], 4, 4))
    return Coded((torch.cat(parts, dim=1) - 1).to(torch.int8), _half(blocks, 52))


def _unpack_tq2_0(blocks: torch.Tensor) -> Coded:
    return Coded(_planes(blocks[:, :64], 32).to(torch.int8) - 1, _half(blocks, 64))


def _unpack_q2_k(blocks: torch.Tensor) -> Coded:
    scales = blocks[:, :16]
    codes = _planes(blocks[:, 16:80], 32).to(torch.int8)
    return Coded(codes, _half(blocks, 80) * (scales & 15), _half(blocks, 82) * (scales >> 4))


def _unpack_q3_k(blocks: torch.Tensor) -> Coded:
    bits = torch.arange(8, dtype=torch.uint8)[:, None]
    is_high = ((blocks[:, None, :32] >> bits) & 1).flatten(1)  # (blocks, 256): a bit of 32 bytes for each 32 numbers
    codes = (_planes(blocks[:, 32:96], 32) | (is_high << 2)).to(torch.int8) - 4
    low, high = _halves(blocks[:, 96:104], 8), _planes(blocks[:, 104:108], 4)
    return Coded(codes, _half(blocks, 108) * ((low | (high << 4)).to(torch.int8) - 32))


CODED: Final[dict[str, CodedKind]] = {
    "IQ1_S": CodedKind(256, 50, _unpack_iq1_s),
    "IQ1_M": CodedKind(256, 56, _unpack_iq1_m),
    "IQ2_XXS": CodedKind(256, 66, _unpack_iq2_xxs),
    "IQ2_XS": CodedKind(256, 74, _unpack_iq2_xs),
    "IQ2_S": CodedKind(256, 82, _unpack_iq2_s),
    "IQ3_XXS": CodedKind(256, 98, _unpack_iq3_xxs),
    "IQ3_S": CodedKind(256, 110, _unpack_iq3_s),
    "IQ4_NL": CodedKind(32, 18, _unpack_iq4_nl),
    "IQ4_XS": CodedKind(256, 136, _unpack_iq4_xs),
    "MXFP4": CodedKind(32, 17, _unpack_mxfp4),
    "TQ1_0": CodedKind(256, 54, _unpack_tq1_0),
    "TQ2_0": CodedKind(256, 66, _unpack_tq2_0),
    "Q2_K": CodedKind(256, 84, _unpack_q2_k),
    "Q3_K": CodedKind(256, 110, _unpack_q3_k),
}

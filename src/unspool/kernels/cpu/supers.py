"""GGUF's Q4_K, Q5_K and Q6_K as rows of super-blocks: 256 columns, whose scales are few bits times a float16.

Q5_0 and Q5_1, blocks of 32 columns and 5 bits, are of this form too: super-blocks of one block, with its own scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import torch
import torch.nn.functional as F

from unspool.errors import LoadError
from unspool.kernels.cpu.blocks import BLOCK, Blocks, Kind, read_halves
from unspool.kernels.cpu.tables import TABLE_KINDS, TableBlocks, TableKind

SUPER: Final = 256  # columns of a super-block
SuperKind = Literal["q4_k", "q5_k", "q6_k", "q5"]
SUPER_KINDS: Final[dict[str, SuperKind]] = {"Q4_K": "q4_k", "Q5_K": "q5_k", "Q6_K": "q6_k"}
SUPER_BYTES: Final[dict[SuperKind, int]] = {"q4_k": 144, "q5_k": 176, "q6_k": 210, "q5": 24}  # of one, in memory
_TILE: Final = 8  # rows of a tile
_HEADERS: Final[dict[SuperKind, slice]] = {"q4_k": slice(0, 16), "q5_k": slice(0, 16), "q6_k": slice(192, 210)}
_FIVES: Final = {"Q5_0": 22, "Q5_1": 24}  # bytes of a block in a file


def count_columns(kind: AnyKind) -> int:
    """Columns of a block, or of a super-block."""
    return BLOCK if kind in ("int8", "int4", "q5", *TABLE_KINDS) else SUPER


@dataclass(slots=True)
class SuperBlocks:
    """A matrix (rows, columns) as a file has it: `code * scale - minimum`; with 6 bits `(code - 32) * scale`, and as
    "q5" `code * scale + minimum`."""

    codes: torch.Tensor  # (rows, columns) uint8, below 2 to the number of bits
    headers: torch.Tensor  # (rows, supers, bytes) uint8: the file's bytes that scales are made of; Q5_0 gets a minimum
    kind: SuperKind

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns."""
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def halves(self) -> list[torch.Tensor]:
        """The float16 numbers that every scale is a multiple of."""
        if self.kind == "q6_k":
            return [read_halves(self.headers, 16)]
        return [read_halves(self.headers, 0), read_halves(self.headers, 2)]

    def select_rows(self, order: torch.Tensor) -> SuperBlocks:
        """The rows in another order."""
        return SuperBlocks(self.codes[order], self.headers[order], self.kind)

    def dequantise(self) -> torch.Tensor:
        """The dequantised matrix: (rows, columns) float32."""
        headers = self.headers.view(-1, self.headers.shape[2])
        if self.kind == "q6_k":
            scales = headers[:, :16].view(torch.int8).float().mul_(read_halves(headers[:, None], 16).float())
            return self.codes.view(-1, 16, 16).float().sub_(32).mul_(scales[..., None]).view(self.shape)
        if self.kind == "q5":
            scales, minimums = (half.float().view(-1, 1) for half in self.halves)
            return self.codes.view(-1, BLOCK).float().mul_(scales).add_(minimums).view(self.shape)
        scales, mins = read_super_scales(headers)
        return self.codes.view(-1, 8, BLOCK).float().mul_(scales[..., None]).sub_(mins[..., None]).view(self.shape)

    def simplify(self) -> Blocks | None:
        """Plain blocks: Q5_0's exactly, in 8 bits; Q4_K's with scales and minimums rounded to float16, by 1/2048 at
        most (a float16's last bit is 2^-24, and so is theirs: small ones lose nothing). None for others, or if one
        overflows."""
        if self.kind == "q5":
            scale, minimum = self.halves
            is_centred = torch.equal(minimum.float(), -16 * scale.float())
            return Blocks(self.codes.view(torch.int8) - 16, scale, None) if is_centred else None
        if self.kind != "q4_k":
            return None
        scales, mins = read_super_scales(self.headers.view(-1, self.headers.shape[2]))
        halves, minimums = scales.half(), mins.neg().half()
        if bool((halves.isinf() & scales.isfinite()).any() or (minimums.isinf() & mins.isfinite()).any()):
            return None
        return Blocks(self.codes, halves.view(self.shape[0], -1), minimums.view(self.shape[0], -1))


def read_super_scales(headers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The eight scales and minimums (supers, 8) of headers (supers, 16) of 4 or 5 bits: six bits each in bytes 4 to 16,
    times the float16 before them.

    Bytes 0-3 hold scales 0-3 in their low six bits, bytes 4-7 the minimums 0-3; bytes 8-11 hold the low nibbles of
    scales (low) and minimums (high) 4-7, whose top two bits are the top bits of bytes 0-7.
    """
    first, second, third = headers[:, 4:8], headers[:, 8:12], headers[:, 12:16]
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1).float()
    mins = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1).float()
    halves = read_halves(headers[:, None], 0), read_halves(headers[:, None], 2)
    return scales.mul_(halves[0].float()), mins.mul_(halves[1].float())


def read_supers(raw: torch.Tensor, stored: str, shape: tuple[int, ...]) -> SuperBlocks | None:
    """A GGUF tensor's super-blocks; None for formats that have none.

    `raw` are the tensor's bytes. Matrices that are stored as one tensor of three dimensions stand one below the other.
    """
    if len(shape) == 3:
        shape = (shape[0] * shape[1], shape[2])
    if stored in _FIVES and len(shape) == 2 and shape[1] % BLOCK == 0:
        return _read_fives(raw.view(shape[0], -1, _FIVES[stored]), stored)
    kind = SUPER_KINDS.get(stored)
    if kind is None or len(shape) != 2 or shape[1] % SUPER:
        return None
    supers = raw.view(shape[0], -1, SUPER_BYTES[kind])
    return SuperBlocks(
        _read_codes(supers.flatten(0, 1), kind).view(shape), supers[:, :, _HEADERS[kind]].contiguous(), kind
    )


def _read_fives(blocks: torch.Tensor, stored: str) -> SuperBlocks | None:
    """Blocks of Q5_0 or Q5_1 (rows, blocks, bytes). Q5_0 counts from -16, which is a minimum of -16 scales: exact in
    float16; None if one overflows."""
    scales = read_halves(blocks, 0)
    minimums = read_halves(blocks, 2) if stored == "Q5_1" else scales * -16
    if bool((minimums.isinf() & scales.isfinite()).any()):
        return None
    bits = blocks[:, :, -20:-16, None] >> torch.arange(8, dtype=torch.uint8)  # (rows, blocks, 4, 8): the fifth ones
    packed = blocks[:, :, -16:]
    codes = torch.cat((packed & 15, packed >> 4), dim=2).bitwise_or_((bits & 1).flatten(2) << 4)
    headers = torch.stack((scales, minimums), dim=2).view(torch.uint8)  # (rows, blocks, 4)
    return SuperBlocks(codes.flatten(1), headers, "q5")


def _read_codes(supers: torch.Tensor, kind: SuperKind) -> torch.Tensor:
    """The codes of super-blocks (supers, bytes), column by column: (supers, 256) uint8."""
    if kind == "q6_k":  # a half (128 values) is 64 bytes of nibbles and 32 bytes that hold four pairs of high bits each
        low = split_nibbles(supers[:, :128], 64).view(-1, 2, 4, 32)
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
        high = ((supers[:, 128:192].reshape(-1, 2, 1, 32) >> shifts) & 3) << 4  # (supers, 2, 4, 32)
        return low.bitwise_or_(high).view(-1, SUPER)
    codes = split_nibbles(supers[:, -128:], 32).view(-1, 8, 32)
    if kind in ("q5_k", "q5"):
        shifts = torch.arange(8, dtype=torch.uint8)[:, None]
        codes |= ((supers[:, None, 16:48] >> shifts) & 1) << 4  # (supers, 8, 32): bit i belongs to block i
    return codes.view(-1, SUPER)


def split_nibbles(packed: torch.Tensor, group: int) -> torch.Tensor:
    """Every `group` bytes hold 2 x `group` values: all the low halves, then all the high halves."""
    groups = packed.reshape(packed.shape[0], -1, group)
    return torch.stack((groups & 15, groups >> 4), dim=2)  # (blocks, groups, 2, group) uint8


AnyBlocks = Blocks | SuperBlocks | TableBlocks
AnyKind = Kind | SuperKind | TableKind


def join_blocks(parts: Sequence[AnyBlocks]) -> AnyBlocks:
    """Matrices of one kind, one below the other."""
    kinds = {part.kind for part in parts}
    if len(kinds) > 1:
        raise LoadError(f"blocks of {' and '.join(sorted(kinds))} can't make one matrix")
    supers = [part for part in parts if isinstance(part, SuperBlocks)]
    if supers:
        codes, headers = torch.cat([part.codes for part in supers]), torch.cat([part.headers for part in supers])
        return SuperBlocks(codes, headers, supers[0].kind)
    tables = [part for part in parts if isinstance(part, TableBlocks)]
    if tables:
        nibbles, scales = torch.cat([part.nibbles for part in tables]), torch.cat([part.scales for part in tables])
        return TableBlocks(nibbles, scales, tables[0].kind)
    plain = [part for part in parts if isinstance(part, Blocks)]
    minimums = [part.minimums for part in plain if part.minimums is not None]
    return Blocks(
        torch.cat([part.quants for part in plain]),
        torch.cat([part.scales for part in plain]),
        torch.cat(minimums) if minimums else None,
    )


def pack_supers(blocks: SuperBlocks) -> torch.Tensor:
    """The bytes of a matrix as the library reads it (csrc/supers.h): (tiles, supers, bytes) uint8; rows are padded with
    zeros."""
    missing = -blocks.shape[0] % _TILE
    codes, headers = blocks.codes, blocks.headers
    if missing:
        codes, headers = F.pad(codes, (0, 0, 0, missing)), F.pad(headers, (0, 0, 0, 0, 0, missing))
    tiles, supers = codes.shape[0] // _TILE, headers.shape[1]
    # (tiles, rows, supers, blocks, groups of columns, columns) to one group of all rows after the other
    grouped = codes.view(tiles, _TILE, supers, -1, 8, 4).permute(0, 2, 3, 4, 1, 5).reshape(tiles, supers, -1, 8, 32)
    nibbles = grouped & 15
    parts = [(nibbles[:, :, :, :4] | (nibbles[:, :, :, 4:] << 4)).flatten(3)]  # (tiles, supers, blocks, 128)
    if blocks.kind in ("q5_k", "q5"):
        shifts = torch.arange(8, dtype=torch.uint8)[:, None]
        parts.insert(0, ((grouped >> 4) << shifts).sum(3, dtype=torch.uint8))
    if blocks.kind == "q6_k":
        pairs = (grouped >> 4).view(tiles, supers, 8, 2, 2, 2, 32).transpose(3, 4)  # (…, parts, halves, pairs, 32)
        shifts = torch.tensor([[0, 2], [4, 6]], dtype=torch.uint8)[..., None]
        parts.insert(0, (pairs << shifts).sum((4, 5), dtype=torch.uint8).flatten(3))
    by_byte = headers.view(tiles, _TILE, supers, -1).permute(0, 2, 3, 1)  # (tiles, supers, bytes, rows)
    at = 16 if blocks.kind == "q6_k" else 4  # float16 come last there, and first elsewhere
    halves, scales = by_byte[:, :, :at], by_byte[:, :, at:]
    if blocks.kind == "q6_k":
        halves, scales = scales, halves
    numbers = halves.reshape(tiles, supers, -1, 2, _TILE).transpose(3, 4)  # each float16's two bytes side by side
    return torch.cat((numbers.flatten(2), scales.flatten(2), torch.cat(parts, dim=3).flatten(2)), dim=2)


def unpack_supers(packed: torch.Tensor, kind: SuperKind, num_rows: int) -> SuperBlocks:
    """The super-blocks that were packed: the inverse of `pack_supers`."""
    tiles, supers, _ = packed.shape
    num_halves, num_scales = (1, 16) if kind == "q6_k" else (2, 0 if kind == "q5" else 12)
    at, to = 16 * num_halves, 16 * num_halves + 8 * num_scales
    numbers, scales, rest = packed[:, :, :at], packed[:, :, at:to], packed[:, :, to:]
    halves = numbers.reshape(tiles, supers, num_halves, _TILE, 2).permute(0, 3, 1, 2, 4).flatten(3)
    by_row = scales.reshape(tiles, supers, num_scales, _TILE).permute(0, 3, 1, 2)
    headers = torch.cat((by_row, halves) if kind == "q6_k" else (halves, by_row), dim=3).flatten(0, 1)
    blocks = rest.reshape(tiles, supers, count_columns(kind) // BLOCK, -1)
    nibbles = blocks[..., -128:].reshape(tiles, supers, -1, 4, 32)
    grouped = torch.cat((nibbles & 15, nibbles >> 4), dim=3)  # (tiles, supers, blocks, groups, 32)
    if kind in ("q5_k", "q5"):
        shifts = torch.arange(8, dtype=torch.uint8)[:, None]
        grouped |= ((blocks[:, :, :, None, :32] >> shifts) & 1) << 4
    if kind == "q6_k":
        shifts = torch.tensor([[0, 2], [4, 6]], dtype=torch.uint8)[..., None]
        pairs = (blocks[..., :64].reshape(tiles, supers, 8, 2, 1, 1, 32) >> shifts) & 3  # (…, parts, halves, pairs, 32)
        grouped |= pairs.transpose(3, 4).reshape(tiles, supers, 8, 8, 32) << 4
    codes = grouped.view(tiles, supers, -1, 8, _TILE, 4).permute(0, 4, 1, 2, 3, 5)
    return SuperBlocks(codes.reshape(tiles * _TILE, -1)[:num_rows], headers[:num_rows].contiguous(), kind)

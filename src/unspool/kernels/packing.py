"""Numbers in few bits: groups of them share a scale and a zero point, and a byte holds several.

A group runs down the positions of one channel ("by channel", for keys, whose outliers live in channels) or along the
channels of one position ("by token", for values), as in KIVI (Liu et al., 2024). Byte `j` of a position holds the
channels `j`, `j + bytes`, `j + 2 * bytes` …, so that a shift and a mask of a whole row of bytes gives neighbouring
channels.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from unspool.errors import SettingError

Fit = Callable[[torch.Tensor, int, torch.dtype], tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""Groups (groups, size) float32, bits, dtype -> codes uint8 (groups, size), scale and zero (groups,) of the dtype."""

BITS = (2, 4, 8)
_SMALLEST_GROUP = 4  # channels; smaller groups spend more on scales than they save


@dataclass(frozen=True, slots=True)
class Scheme:
    """How one tensor (rows, heads, positions, width) is packed."""

    nbits: int
    width: int
    block: int  # positions that are packed together
    by_channel: bool
    group: int  # channels that share a scale, if groups run along them
    dtype: torch.dtype  # of scales and zero points

    @classmethod
    def of(cls, width: int, nbits: int, group_size: int, by_channel: bool, dtype: torch.dtype) -> Scheme:
        """The scheme for heads of this width; groups along them are the largest even parts of at most `group_size`."""
        group = next(size for size in range(min(group_size, width), 0, -1) if width % size == 0)
        if not by_channel and group < min(_SMALLEST_GROUP, width, group_size):
            raise SettingError(
                f"heads of {width} channels can't be cut into even groups of at most q_group_size={group_size}; use "
                f"q_group_size={width} or larger, or groups that run down the positions"
            )
        return cls(nbits, width, group_size, by_channel, group, dtype)

    @property
    def parts(self) -> int:
        """Channels that share a byte."""
        return 8 // self.nbits

    @property
    def num_bytes(self) -> int:
        """Bytes that a position's channels take."""
        return -(-self.width // self.parts)

    def scales_of(self, num_positions: int) -> tuple[int, int]:
        """The last two dimensions of scales and zero points for this many positions."""
        if self.by_channel:
            return num_positions // self.block, self.width
        return num_positions, self.width // self.group

    def shapes_of(self, rows: int, heads: int, num_positions: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """The shape and dtype of codes, scales and zero points for this many positions."""
        scales = ((rows, heads, *self.scales_of(num_positions)), self.dtype)
        return [((rows, heads, num_positions, self.num_bytes), torch.uint8), scales, scales]


@dataclass(slots=True)
class Packed:
    """A tensor (rows, heads, positions, width) in few bits; positions come in whole blocks."""

    scheme: Scheme
    codes: torch.Tensor  # (rows, heads, positions, bytes) uint8
    scale: torch.Tensor  # (rows, heads, blocks, width) by channel, (rows, heads, positions, groups) by token
    zero: torch.Tensor  # as scale

    @classmethod
    def empty(cls, scheme: Scheme, rows: int, heads: int, num_positions: int, device: torch.device) -> Packed:
        """Zeros for this many positions."""
        shapes = scheme.shapes_of(rows, heads, num_positions)
        return cls(scheme, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype in shapes))

    @property
    def num_positions(self) -> int:
        """The capacity in positions."""
        return self.codes.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zero points."""
        return self.codes.nbytes + self.scale.nbytes + self.zero.nbytes

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Codes, scales and zero points."""
        return self.codes, self.scale, self.zero

    def narrow(self, first: int, num_positions: int) -> Packed:
        """A view of whole blocks."""
        scheme = self.scheme
        start, length = first, num_positions
        if scheme.by_channel:
            start, length = first // scheme.block, num_positions // scheme.block
        return Packed(
            scheme,
            self.codes.narrow(2, first, num_positions),
            self.scale.narrow(2, start, length),
            self.zero.narrow(2, start, length),
        )

    def rows(self, index: torch.Tensor | slice) -> Packed:
        """Some of the rows: a view for a slice, a copy for an index."""
        return Packed(self.scheme, self.codes[index], self.scale[index], self.zero[index])

    def copy_(self, other: Packed) -> None:
        """Copy another's numbers."""
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine.copy_(theirs)


def pack(x: torch.Tensor, scheme: Scheme, fit: Fit | None = None) -> Packed:
    """Pack (rows, heads, positions, width), whose positions are whole blocks."""
    rows, heads, num_positions, width = x.shape
    if scheme.by_channel:
        blocks = x.reshape(rows, heads, num_positions // scheme.block, scheme.block, width).transpose(-1, -2)
    else:
        blocks = x.reshape(rows, heads, num_positions, width // scheme.group, scheme.group)
    groups = blocks.reshape(-1, blocks.shape[-1]).float()
    codes, scale, zero = (fit or fit_range)(groups, scheme.nbits, scheme.dtype)
    codes = codes.view(blocks.shape)
    if scheme.by_channel:
        codes = codes.transpose(-1, -2)
    shape = (rows, heads, *scheme.scales_of(num_positions))
    codes = join_codes(codes.reshape(rows, heads, num_positions, width), scheme)
    return Packed(scheme, codes, scale.view(shape), zero.view(shape))


def unpack(packed: Packed, dtype: torch.dtype) -> torch.Tensor:
    """The numbers again: (rows, heads, positions, width)."""
    scheme = packed.scheme
    rows, heads, num_positions = packed.codes.shape[:3]
    codes = split_codes(packed.codes, scheme).float()  # (rows, heads, positions, width)
    scale, zero = packed.scale.float().unsqueeze(-2), packed.zero.float().unsqueeze(-2)
    if scheme.by_channel:  # (rows, heads, blocks, block, width)
        grouped = codes.view(rows, heads, -1, scheme.block, scheme.width)
    else:  # (rows, heads, positions, group, groups): scales come last
        grouped = codes.view(rows, heads, num_positions, -1, scheme.group).transpose(-1, -2)
    made = grouped.mul(scale).add_(zero)
    if not scheme.by_channel:
        made = made.transpose(-1, -2)
    return made.reshape(rows, heads, num_positions, scheme.width).to(dtype)


def join_codes(codes: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Codes (…, width), one per byte, as (…, bytes)."""
    if scheme.parts == 1:
        return codes
    missing = scheme.parts * scheme.num_bytes - scheme.width
    padded = torch.nn.functional.pad(codes, (0, missing)) if missing else codes
    each = padded.reshape(*codes.shape[:-1], scheme.parts, scheme.num_bytes)
    joined = each[..., 0, :].clone()
    for part in range(1, scheme.parts):
        joined |= each[..., part, :] << (part * scheme.nbits)
    return joined


def split_codes(joined: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Codes (…, bytes) as (…, width), one per byte."""
    if scheme.parts == 1:
        return joined
    mask = (1 << scheme.nbits) - 1
    each = [(joined >> (part * scheme.nbits)) & mask for part in range(scheme.parts)]
    return torch.cat(each, dim=-1)[..., : scheme.width]


# --- fitting ---------------------------------------------------------------------------------------------


def fit_range(groups: torch.Tensor, nbits: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Even steps from a group's minimum to its maximum; no number is off by more than half a step.

    Scale and zero point are rounded outwards to their dtype before numbers are, so that nothing has to be clipped.
    """
    least, greatest = groups.aminmax(dim=1)
    margin = torch.finfo(dtype).eps
    zero = (least - least.abs() * margin).to(dtype)
    step = (greatest - zero.float()) / ((1 << nbits) - 1)
    scale = (step * (1 + margin)).to(dtype)
    wide = scale.float()[:, None]
    codes = (groups - zero.float()[:, None]).div_(torch.where(wide > 0, wide, 1.0))
    return codes.round_().clamp_(0, (1 << nbits) - 1).to(torch.uint8), scale, zero

"""Weights as bitsandbytes saves them: codes of nf4 or fp4, or whole numbers of 8 bits with a scale for each row.

A matrix of 4 bits is `weight` (two codes to a byte, the first one in its upper half, row after row), `weight.absmax`,
`weight.quant_map` and `weight.quant_state.bitsandbytes__nf4` (or `__fp4`), JSON. Where the sizes of blocks are
quantised too, `absmax` has their codes in `nested_quant_map`, times `nested_absmax`, plus an offset. A matrix of 8 bits
has `SCB`, the largest size of each row.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import torch

from unspool.errors import UnsupportedError, excerpt
from unspool.kernels.cpu import TABLE_KINDS, TableBlocks, TableKind, read_table, spread_sizes
from unspool.loading.quantised.format import Format, Found, Method, Parts, list_modules
from unspool.loading.quantised.matrix import QuantisedMatrix
from unspool.loading.tensors import TensorFile
from unspool.numeric import is_number
from unspool.small_files import parse_json_object

_STATE: Final = ".weight.quant_state.bitsandbytes__"
_MOST_STATE_BYTES: Final = 1 << 16
_GROUPS: Final = tuple(2**power for power in range(5, 17))  # numbers that may share a size
_MOST_COUNT: Final = 1 << 40
_ROWS_ONLY: Final = 0  # the layout of 8 bits that is read


@dataclass(frozen=True, slots=True)
class Sizes:
    """What blocks of numbers are multiplied by: numbers, or codes of numbers whose blocks have sizes of their own."""

    stored: torch.Tensor  # (blocks,) float32, or uint8
    table: torch.Tensor | None = None  # (256,) float32
    outer: torch.Tensor | None = None  # (blocks of blocks,) float32
    outer_group: int = 1
    offset: float = 0.0

    def read(self, first: int, end: int) -> torch.Tensor:
        """Some of them: float32."""
        some = self.stored[first:end]
        if self.table is None or self.outer is None:
            return some
        outer = self.outer[torch.arange(first, end) // self.outer_group]
        return self.table[some.int()].mul_(outer).add_(self.offset)


@dataclass
class TableMatrix(QuantisedMatrix):
    """Codes of 4 bits that stand for the 16 numbers of a table, times the size of their block."""

    shape: tuple[int, int]
    parts: tuple[str, ...]
    kind: TableKind
    codes: torch.Tensor  # (bytes,) uint8
    table: torch.Tensor  # (16,) float32
    sizes: Sizes
    group: int  # numbers of a block, counted over the ends of rows

    def read_rows(self, first: int, end: int) -> torch.Tensor:
        """The numbers of some rows."""
        begin, stop = first * self.shape[1], end * self.shape[1]
        packed = self.codes[begin // 2 : -(-stop // 2)]
        codes = torch.stack((packed >> 4, packed & 15), dim=1).flatten()[begin % 2 :][: stop - begin]
        block = begin // self.group
        sizes = self.sizes.read(block, -(-stop // self.group))
        places = torch.arange(begin, stop).div_(self.group, rounding_mode="floor").sub_(block)
        return self.table[codes.int()].mul_(sizes[places]).view(end - first, self.shape[1])

    def find_blocks(self) -> TableBlocks | None:
        """The same codes, if their table is the known one and 32 columns share a size."""
        sizes = self.sizes.read(0, len(self.sizes.stored))
        scales = spread_sizes(sizes, self.group, self.shape)
        if scales is None or not torch.equal(self.table, read_table(self.kind)):
            return None
        packed = self.codes.view(self.shape[0], -1)
        return TableBlocks((packed >> 4) | (packed << 4), scales, self.kind)


@dataclass
class RowMatrix(QuantisedMatrix):
    """Whole numbers of 8 bits, where a row shares its largest size."""

    shape: tuple[int, int]
    parts: tuple[str, ...]
    values: torch.Tensor  # (rows, columns) int8
    sizes: torch.Tensor  # (rows,) float32

    def read_rows(self, first: int, end: int) -> torch.Tensor:
        """The numbers of some rows."""
        return self.values[first:end].float().mul_(self.sizes[first:end, None]).mul_(torch.tensor(1 / 127))


def _find(_: Method, tensors: TensorFile) -> Found:
    found: dict[str, QuantisedMatrix] = {}
    for name in tensors.names():
        module, state, kind = name.partition(_STATE)
        if state:
            found[f"{module}.weight"] = _read_codes(Parts(tensors, module), tensors, kind)
    spare: set[str] = set()
    for module in list_modules(tensors, "SCB"):
        found[f"{module}.weight"] = _read_rows(Parts(tensors, module))
        spare.add(f"{module}.weight_format")
    return Found(found, frozenset(spare))


def _read_rows(parts: Parts) -> RowMatrix:
    shape = parts.shape("weight")
    if len(shape) != 2:
        parts.fail(f"weight has {len(shape)} dimensions")
    if parts.has("weight_format") and int(parts.take("weight_format", torch.uint8, ("U8",), ())) != _ROWS_ONLY:
        raise UnsupportedError(
            f"{parts.module!r:.200} is laid out for a GPU's matrix units; save the model again with a current "
            "bitsandbytes"
        )
    values = parts.map("weight", torch.int8, "I8", shape)
    sizes = parts.take_scales("SCB", (shape[0],))
    return RowMatrix((shape[0], shape[1]), tuple(parts.names), values, sizes)


def _read_codes(parts: Parts, tensors: TensorFile, kind: str) -> TableMatrix:
    if kind not in TABLE_KINDS:
        raise UnsupportedError(
            f"{parts.module!r:.200} is quantised by bitsandbytes as {excerpt(kind)}; {' and '.join(TABLE_KINDS)} are "
            "read"
        )
    state = _read_state(parts, kind)
    shape, group = _read_shape(parts, state.get("shape")), _read_group(parts, state.get("blocksize"))
    count = math.prod(shape)
    raw = tensors.raw(f"{parts.module}.weight") if parts.has("weight") else None
    if raw is None or raw.numel() != -(-count // 2):
        found = "none" if raw is None else f"{raw.numel()}"
        parts.fail(f"its codes are {found} bytes, and a matrix {list(shape)} has {-(-count // 2)} of them")
    parts.names.append(f"{parts.module}.weight")
    table = parts.take_scales("weight.quant_map", (16,))
    sizes = _read_sizes(parts, state, -(-count // group))
    return TableMatrix(shape, tuple(parts.names), kind, raw, table, sizes, group)


def _read_state(parts: Parts, kind: str) -> dict[str, Any]:
    part = f"weight.quant_state.bitsandbytes__{kind}"
    shape = parts.shape(part)
    if len(shape) != 1 or shape[0] > _MOST_STATE_BYTES:
        parts.fail(f"its quant_state has the shape {list(shape)}")
    text = parts.take(part, torch.uint8, ("U8",), shape)
    state = parse_json_object(bytes(text.tolist()), f"the quant_state of {parts.module!r:.200}")
    if state.get("quant_type") != kind:
        parts.fail(f"its quant_state says {excerpt(state.get('quant_type'))}, its name {kind}")
    return state


def _read_shape(parts: Parts, shape: Any) -> tuple[int, int]:
    is_pair = isinstance(shape, list) and len(shape) == 2
    if not is_pair or not all(type(size) is int and 1 <= size < _MOST_COUNT for size in shape):
        parts.fail(f"its quant_state has no shape of a matrix ({excerpt(shape)})")
    return shape[0], shape[1]


def _read_group(parts: Parts, group: Any) -> int:
    if type(group) is not int or group not in _GROUPS:
        parts.fail(f"blocks of {excerpt(group)} numbers are not known")
    return group


def _read_sizes(parts: Parts, state: dict[str, Any], count: int) -> Sizes:
    if state.get("nested_blocksize") is None:
        return Sizes(parts.take_scales("weight.absmax", (count,)))
    group, offset = _read_group(parts, state["nested_blocksize"]), state.get("nested_offset")
    if not is_number(offset) or not math.isfinite(offset):
        parts.fail(f"its nested_offset is {excerpt(offset)}")
    return Sizes(
        parts.map("weight.absmax", torch.uint8, "U8", (count,)),
        parts.take_scales("weight.nested_quant_map", (256,)),
        parts.take_scales("weight.nested_absmax", (-(-count // group),)),
        group,
        float(offset),
    )


BITSANDBYTES: Final = Format("bitsandbytes", _find)

"""Sources of weights, and the small containers that hold them."""

from __future__ import annotations

import copy
import ctypes
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Protocol, Self

import torch
import torch.nn.functional as F

from unspool.errors import LoadError
from unspool.kernels.cpu import (
    AnyKind,
    AnyRows,
    Blocks,
    TableBlocks,
    TableKind,
    find_library,
    lay_out,
    unpack_tiles,
)
from unspool.kernels.cpu.operators import multiply_packed, read_packed_rows
from unspool.kernels.cpu.structures import CMatrix, describe_matrix
from unspool.kernels.gpu.products.words import WordKind, Words, lay_out_words, round_floats
from unspool.kernels.halves import multiply_rows
from unspool.kernels.mx import MxWords
from unspool.kernels.norms import layer_norm, rms_norm
from unspool.kernels.presence import has_triton
from unspool.kernels.table_words import TableWords, lay_out_tables


class StoredTensor(Protocol):
    """A tensor's metadata, known before reading it."""

    @property
    def shape(self) -> tuple[int, ...]: ...


class WeightSource(Protocol):
    """Named tensors that can be read one by one: a file, a set of shards, or a dictionary."""

    def names(self) -> Iterable[str]: ...

    def info(self, name: str) -> StoredTensor: ...

    def __contains__(self, name: object) -> bool: ...

    def read(self, name: str, *, dtype: torch.dtype, rows: tuple[int, int] | None = None) -> torch.Tensor: ...

    def copy_into(self, name: str, out: torch.Tensor, *, transpose: bool = False) -> None: ...

    def blocks(self, name: str) -> AnyRows | None: ...

    def release(self, name: str) -> None: ...

    def finish(self) -> None: ...


class MemorySource:
    """Weights that are in memory already."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def names(self) -> list[str]:
        """The names of all tensors."""
        return list(self._tensors)

    def info(self, name: str) -> StoredTensor:
        """The tensor itself, which knows its shape."""
        if name not in self._tensors:
            raise LoadError(f"there is no tensor {name!r} among the {len(self._tensors)} given")
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def read(self, name: str, *, dtype: torch.dtype, rows: tuple[int, int] | None = None) -> torch.Tensor:
        """A tensor, or a range of its rows."""
        tensor = self._tensors[name]
        return (tensor if rows is None else tensor[rows[0] : rows[1]]).to(dtype)

    def copy_into(self, name: str, out: torch.Tensor, *, transpose: bool = False) -> None:
        """Write a tensor into `out`, converting it."""
        tensor = self._tensors[name].t() if transpose else self._tensors[name]
        if tensor.shape != out.shape:
            raise LoadError(f"tensor {name!r} has shape {list(tensor.shape)}, not {list(out.shape)}")
        out.copy_(tensor)

    def blocks(self, name: str) -> AnyRows | None:  # noqa: ARG002 - the protocol's argument
        """None: these tensors are not quantised."""
        return None

    def release(self, name: str) -> None:
        """Nothing: the tensors belong to the caller."""

    def finish(self) -> None:
        """Nothing: what is in memory is taken as it is."""


@dataclass(slots=True)
class Linear:
    """A matrix (out, in) and, if the model has one, a bias."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    @property
    def operand(self) -> torch.Tensor:
        """What a product's kernel reads."""
        return self.weight

    def part(self, place: int, count: int) -> Linear:
        """One of `count` matrices of equal size that stand one below the other."""
        rows = self.weight.shape[0] // count
        mine = slice(place * rows, (place + 1) * rows)
        return Linear(self.weight[mine], None if self.bias is None else self.bias[mine])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return multiply_rows(x, self.weight, self.bias)


@dataclass(slots=True)
class Norm:
    """A normalisation: root mean square, or (`is_layer`) mean and variance."""

    weight: torch.Tensor | None
    bias: torch.Tensor | None
    eps: float
    is_layer: bool
    is_float32: bool = False  # weights stay in float32 whatever the model's dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_layer:
            return layer_norm(x, self.weight, self.bias, self.eps)
        assert self.weight is not None
        return rms_norm(x, self.weight, self.eps)


@dataclass(slots=True)
class Embedding:
    """A row for every token; `scale` is applied when one is looked up."""

    weight: torch.Tensor
    scale: float = 1.0

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        found = F.embedding(tokens, self.weight)
        return found if self.scale == 1.0 else found * torch.tensor(self.scale, dtype=found.dtype)


@dataclass(slots=True)
class PackedRows:
    """A quantised matrix in the layout of the CPU library, and its C struct."""

    tiles: torch.Tensor  # (tiles, blocks, bytes) uint8
    kind: AnyKind
    shape: tuple[int, int]
    bias: torch.Tensor | None = None
    rest: PackedRows | None = None  # the last rows, if they are of another kind
    _matrix: CMatrix | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def matrix(self) -> CMatrix:
        """The matrix's C struct; rebuilt if the bytes or the bias have moved in memory."""
        known, bias = self._matrix, self.bias
        rest = self.rest.matrix if self.rest is not None else None
        is_current = (
            known is not None
            and known.data == self.tiles.data_ptr()
            and known.bias == (None if bias is None else bias.data_ptr())
            and known.rest == (None if rest is None else ctypes.addressof(rest))
        )
        if known is None or not is_current:
            known = self._matrix = describe_matrix(self.tiles, bias, self.kind, *self.shape, rest)
        return known

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # The struct holds addresses, and a copy has others.
        parts = {item.name: getattr(self, item.name) for item in fields(self) if item.init}
        return type(self)(**copy.deepcopy(parts, memo))

    @property
    def weight(self) -> torch.Tensor:
        """The dequantised matrix: (out, in) float32, computed at every call."""
        rest = self.rest
        own = self.shape[0] - (rest.shape[0] if rest is not None else 0)
        numbers = unpack_tiles(self.tiles, self.kind, own).dequantise()
        return numbers if rest is None else torch.cat((numbers, rest.weight))

    @property
    def operand(self) -> torch.Tensor:
        """What a GPU's kernel would read."""
        return self.weight

    @classmethod
    def of(cls, *parts: AnyRows, bias: torch.Tensor | None = None) -> Self:
        """Blocks, laid out; those of several kinds one below the other, all but the last of whole tiles."""
        first, *others = parts
        rest = PackedRows.of(*others) if others else None
        rows = first.shape[0] + (rest.shape[0] if rest is not None else 0)
        return cls(lay_out(first), first.kind, (rows, first.shape[1]), bias, rest)


class PackedLinear(PackedRows):
    """A quantised matrix (out, in) and, if the model has one, a bias."""

    def part(self, place: int, count: int) -> PackedLinear:
        """One of `count` matrices of equal size and one kind, of whole tiles, that stand one below the other."""
        assert self.rest is None
        tiles, rows = self.tiles.shape[0] // count, self.shape[0] // count
        bias = None if self.bias is None else self.bias[place * rows : (place + 1) * rows]
        return PackedLinear(self.tiles[place * tiles : (place + 1) * tiles], self.kind, (rows, self.shape[1]), bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            return self._multiply_traced(x)
        library = find_library()
        if library is None:
            return F.linear(x, self.weight, self.bias)
        return library.multiply(self.matrix, x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], self.shape[0])

    def _multiply_traced(self, x: torch.Tensor) -> torch.Tensor:
        parts: list[torch.Tensor] = []
        part: PackedRows | None = self
        while part is not None:
            own = part.shape[0] - (part.rest.shape[0] if part.rest is not None else 0)
            parts.append(multiply_packed(x, part.tiles, None if self.rest is not None else self.bias, part.kind, own))
            part = part.rest
        if len(parts) == 1:
            return parts[0]
        product = torch.cat(parts, dim=-1)
        return product if self.bias is None else product + self.bias


@dataclass(slots=True)
class PackedEmbedding(PackedRows):
    """A quantised row for every token; `scale` is applied when one is looked up."""

    scale: float = 1.0

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            rows: torch.Tensor = read_packed_rows(tokens, self.tiles, self.kind, *self.shape)
            return rows * self.scale
        library = find_library()
        flat = tokens.reshape(-1)
        found = library.read_rows(self.matrix, flat) if library is not None else self.weight[flat]
        return (found * self.scale).view(*tokens.shape, self.shape[1])


@dataclass(slots=True)
class WordRows:
    """A quantised matrix in the layout of the GPU's kernels."""

    words: torch.Tensor  # (out, words) int32
    factors: torch.Tensor  # (out, blocks) int32 or int16: bits of float16; (out, 1) for floats
    kind: WordKind
    dtype: torch.dtype  # that the model computes in
    bias: torch.Tensor | None = None

    @property
    def operand(self) -> Words:
        """What a product's kernel reads."""
        return Words(self.words, self.factors, self.kind)

    @property
    def weight(self) -> torch.Tensor:
        """The dequantised matrix: (out, in), computed at every call."""
        return self.operand.dequantise(self.dtype)

    @classmethod
    def of(cls, blocks: Blocks, device: torch.device, dtype: torch.dtype, bias: torch.Tensor | None = None) -> Self:
        """Blocks, laid out on a device."""
        laid = lay_out_words(blocks, device)
        return cls(laid.words, laid.factors, laid.kind, dtype, bias)


class WordLinear(WordRows):
    """A quantised matrix (out, in) on a GPU and, if the model has one, a bias."""

    @classmethod
    def round(cls, weight: torch.Tensor, bias: torch.Tensor | None = None) -> WordLinear:
        """A matrix as floats of 8 bits, where it is."""
        laid = round_floats(weight)
        return cls(laid.words, laid.factors, laid.kind, weight.dtype, bias)

    def part(self, place: int, count: int) -> WordLinear:
        """One of `count` matrices of equal size that stand one below the other."""
        rows = self.words.shape[0] // count
        mine = slice(place * rows, (place + 1) * rows)
        bias = None if self.bias is None else self.bias[mine]
        return WordLinear(self.words[mine], self.factors[mine], self.kind, self.dtype, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda or not has_triton():
            return F.linear(x, self.weight.to(x.dtype), self.bias)
        from unspool.kernels.gpu.products.product import multiply

        rows = x.reshape(-1, x.shape[-1]).contiguous()  # the last positions of a pass are not contiguous
        out = x.new_empty(rows.shape[0], self.words.shape[0])
        multiply(self.operand, rows, out, bias=self.bias)
        return out.view(*x.shape[:-1], -1)


@dataclass(slots=True)
class WordEmbedding(WordRows):
    """A quantised row for every token on a GPU; `scale` is applied when one is looked up."""

    scale: float = 1.0

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        found = self.operand.select(tokens.reshape(-1), self.dtype)
        found = found if self.scale == 1.0 else found * torch.tensor(self.scale, dtype=found.dtype)
        return found.view(*tokens.shape, -1)


@dataclass(slots=True)
class MxLinear:
    """Experts' matrices of 4-bit floats (out, in), kept as they are on a GPU, and their biases."""

    words: torch.Tensor  # (out, in / 8) int32
    scales: torch.Tensor  # (out, in / 32) uint8
    dtype: torch.dtype  # that the model computes in
    bias: torch.Tensor | None = None

    @property
    def operand(self) -> torch.Tensor:
        """What a kernel of plain numbers reads."""
        return self.weight

    @property
    def weight(self) -> torch.Tensor:
        """The dequantised matrix: (out, in), computed at every call."""
        return MxWords(self.words, self.scales).dequantise(self.dtype)

    def part(self, place: int, count: int) -> MxLinear:
        """One of `count` matrices of equal size that stand one below the other."""
        rows = self.words.shape[0] // count
        mine = slice(place * rows, (place + 1) * rows)
        bias = None if self.bias is None else self.bias[mine]
        return MxLinear(self.words[mine], self.scales[mine], self.dtype, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight.to(x.dtype), self.bias)


@dataclass(slots=True)
class TableLinear:
    """A matrix (out, in) of codes of a table on a GPU and, if the model has one, a bias."""

    words: torch.Tensor  # (out, in / 8) int32
    scales: torch.Tensor  # (out, in / 32) int32: bits of float32, which no change of dtype reaches
    kind: TableKind
    dtype: torch.dtype  # that the model computes in
    bias: torch.Tensor | None = None

    @property
    def _laid(self) -> TableWords:
        return TableWords(self.words, self.scales.view(torch.float32), self.kind)

    @property
    def operand(self) -> torch.Tensor:
        """What a kernel of plain numbers reads."""
        return self.weight

    @property
    def weight(self) -> torch.Tensor:
        """The dequantised matrix: (out, in), computed at every call."""
        return self._laid.dequantise(self.dtype)

    def part(self, place: int, count: int) -> TableLinear:
        """One of `count` matrices of equal size that stand one below the other."""
        rows = self.words.shape[0] // count
        mine = slice(place * rows, (place + 1) * rows)
        bias = None if self.bias is None else self.bias[mine]
        return TableLinear(self.words[mine], self.scales[mine], self.kind, self.dtype, bias)

    @classmethod
    def of(cls, blocks: TableBlocks, device: torch.device, dtype: torch.dtype, bias: torch.Tensor | None) -> Self:
        """Blocks, laid out on a device."""
        laid = lay_out_tables(blocks, device)
        return cls(laid.words, laid.scales.view(torch.int32), laid.kind, dtype, bias)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if not x.is_cuda or not has_triton():
            return F.linear(x, self.weight.to(x.dtype), self.bias)
        from unspool.kernels.gpu.products.table_product import MOST_ROWS, multiply_tables

        rows = x.reshape(-1, x.shape[-1]).contiguous()
        if rows.shape[0] > MOST_ROWS:
            return F.linear(x, self.weight.to(x.dtype), self.bias)
        out = x.new_empty(rows.shape[0], self.words.shape[0])
        multiply_tables(self._laid, rows, out, self.bias)
        return out.view(*x.shape[:-1], -1)


AnyLinear = Linear | PackedLinear | WordLinear | MxLinear | TableLinear
AnyEmbedding = Embedding | PackedEmbedding | WordEmbedding


def iterate_tensors(holder: Any) -> Iterator[torch.Tensor]:
    """Every tensor that a tree of these containers holds (a shared one as often as it is held)."""
    if isinstance(holder, torch.Tensor):
        yield holder
    elif isinstance(holder, list):
        for item in holder:
            yield from iterate_tensors(item)
    elif hasattr(holder, "__dataclass_fields__"):
        for item in fields(holder):
            yield from iterate_tensors(getattr(holder, item.name))


def find_addresses(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The addresses of tensors; stored ones are compared before they are used, because tensors may move."""
    return list(map(torch.Tensor.data_ptr, tensors))


def convert_tensors(holder: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Move every tensor of a tree of these containers; one that is shared stays shared."""
    _convert(holder, device, dtype, {})


def _convert(
    holder: Any, device: torch.device, dtype: torch.dtype, done: dict[int, tuple[torch.Tensor, torch.Tensor]]
) -> Any:
    if isinstance(holder, torch.Tensor):
        if id(holder) not in done:  # the old one is kept alive, so that its id is not reused
            done[id(holder)] = (holder, holder.to(device, dtype if holder.is_floating_point() else holder.dtype))
        return done[id(holder)][1]
    if isinstance(holder, list):
        holder[:] = [_convert(item, device, dtype, done) for item in holder]
    elif hasattr(holder, "__dataclass_fields__"):
        kept = torch.float32 if getattr(holder, "is_float32", False) else dtype
        for item in fields(holder):
            setattr(holder, item.name, _convert(getattr(holder, item.name), device, kept, done))
    return holder

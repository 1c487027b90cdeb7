"""Copying a checkpoint's tensors into a model's buffers: fused, permuted and converted on the way."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal

import torch

from unspool.errors import LoadError
from unspool.kernels import mx
from unspool.kernels.cpu import (
    BLOCK,
    AnyRows,
    Blocks,
    Kind,
    RawBlocks,
    SuperBlocks,
    TableBlocks,
    TableKind,
    join_rows,
    quantise,
    quantise_table,
    read_plain,
)
from unspool.kernels.cpu.tiles import TILE
from unspool.models.decoder.spec import NormSpec
from unspool.models.sharing import SharedSource
from unspool.models.weights import (
    AnyLinear,
    Linear,
    MxLinear,
    Norm,
    PackedEmbedding,
    PackedLinear,
    TableLinear,
    WeightSource,
    WordEmbedding,
    WordLinear,
)

Progress = Callable[[int, int], None]
"""Called with the numbers placed so far and the numbers in all."""

# Buffers in checkpoints that are not needed: masks and frequencies can be computed.
_BUFFERS: Final = re.compile(
    r"(\.(masked_bias|inv_freq)|(^|\.)h\.\d+\.attn\.bias|layers\.\d+\.attention\.bias|^rope_freqs\.weight)$"
)


Packing = Literal["file", "int8", "int4", "fp8", "tables", "nf4", "nf4-double", "fp4", "fp4-double"]
"""How matrices are quantised: as the file's own blocks (8 bits if it has none of a known form), or all alike.

With floats of 8 bits ("fp8") embeddings and the head are 8-bit blocks. "tables" are a file's own codes of nf4 or fp4;
with these, and where they are made here, everything but the layers' products stays plain numbers."""

QUANTISED_TABLES: Final[dict[str, tuple[TableKind, bool]]] = {
    "nf4": ("nf4", False),
    "nf4-double": ("nf4", True),
    "fp4": ("fp4", False),
    "fp4-double": ("fp4", True),
}
"""What is made of plain numbers, and whether the sizes of blocks are quantised too."""


class Assembler:
    """Copies tensors of a source into new buffers of one device and dtype, and keeps track of those used."""

    def __init__(
        self,
        source: WeightSource,
        device: torch.device,
        dtype: torch.dtype,
        *,
        prefix: str = "",  # a prefix of names that older checkpoints leave out
        progress: Progress | None = None,
        packing: Packing | None = None,
    ) -> None:
        self.packing = packing
        self.source = source
        self.device = device
        self.dtype = dtype
        self._prefix = prefix
        self._progress = progress
        self._used: set[str] = set()
        self._unread: list[str] = []  # placed, but read only when they are laid out
        self._placed = 0
        self._total = sum(math.prod(source.info(name).shape) for name in source.names())

    def has(self, name: str) -> bool:
        """Whether the source holds a tensor of that name."""
        return name in self.source or name.removeprefix(self._prefix) in self.source

    def shape_of(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor; () if the source does not hold it."""
        found = name if name in self.source else name.removeprefix(self._prefix)
        return tuple(self.source.info(found).shape) if found in self.source else ()

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A new buffer."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def find(self, name: str, expected: tuple[int, ...]) -> str:
        """The name under which the source has a tensor, whose shape must be as expected.

        Called before a buffer is allocated, so that a size in a config takes no memory unless the file has the tensor.
        """
        if not self.has(name):
            raise LoadError(f"the weights have no tensor {name!r}, which the config implies")
        name = name if name in self.source else name.removeprefix(self._prefix)
        shape = tuple(self.source.info(name).shape)
        if shape != expected:
            raise LoadError(
                f"tensor {name!r} has the wrong shape: the config makes it {list(expected)}, "
                f"the weights have {list(shape)}. Do they belong together?"
            )
        return name

    def copy(self, name: str, out: torch.Tensor, *, is_transposed: bool = False) -> None:
        """Copy one tensor into `out` and release its source."""
        name = self.find(name, tuple(out.shape)[::-1] if is_transposed else tuple(out.shape))
        self.source.copy_into(name, out, transpose=is_transposed)
        self._account(name)

    def _account(self, name: str, *, is_read: bool = True) -> None:
        shape = self.source.info(name).shape
        if is_read:
            self.source.release(name)
        else:
            self._unread.append(name)
        if name not in self._used:
            self._used.add(name)
            self._placed += math.prod(shape)
        if self._progress is not None:
            self._progress(self._placed, self._total)

    def _release_read(self) -> None:
        """Release the tensors that were read when they were laid out."""
        for name in self._unread:
            self.source.release(name)
        self._unread.clear()

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """One tensor as it is, in a buffer of its own."""
        self.find(name, shape)
        out = self.empty(*shape, dtype=dtype)
        self.copy(name, out)
        return out

    def matrix(self, name: str, rows: int, columns: int, *, is_changed: bool = False) -> torch.Tensor:
        """One matrix as it is: the owner's own memory, if it can be shared and is not to be changed."""
        if isinstance(self.source, SharedSource) and not is_changed:
            found = self.find(name, (rows, columns))
            shared = self.source.share(found, self.device, self.dtype)
            if shared is not None:
                self._account(found)
                return shared
        return self.take(name, rows, columns)

    def packs(self, inputs: int) -> bool:
        """Whether matrices with `inputs` columns are quantised."""
        return self.packing is not None and not self._has_tables and inputs % BLOCK == 0

    @property
    def _has_tables(self) -> bool:
        return self.packing == "tables" or self.packing in QUANTISED_TABLES

    def orders(self, inputs: int) -> bool:
        """Whether `product` may take an order of rows for matrices with `inputs` columns."""
        return self.packs(inputs) or (self._has_tables and inputs % BLOCK == 0)

    def pack(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        inputs: int,
        *,
        is_transposed: bool = False,
        fewest_bits: Literal[4, 8] = 4,  # of what is quantised here
    ) -> AnyRows:
        """Stacked matrices as blocks of one kind: the file's own if they are, otherwise quantised here."""
        return join_rows(self._pack_each(names, sizes, inputs, is_transposed, fewest_bits, may_differ=False))

    def _pack_each(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        inputs: int,
        is_transposed: bool,
        fewest_bits: Literal[4, 8],
        *,
        may_differ: bool,
    ) -> list[AnyRows]:
        """Matrices as blocks, all of one kind unless they `may_differ`."""
        found = [
            self.find(name, (inputs, size) if is_transposed else (size, inputs))
            for name, size in zip(names, sizes, strict=True)
        ]
        has_own = self.packing == "file" and not is_transposed
        return self._find_blocks(
            found,
            has_own,
            fewest_bits,
            lambda place, kind: self._quantise(found[place], sizes[place], inputs, is_transposed, kind),
            may_differ=may_differ,
        )

    def _find_blocks(
        self,
        found: Sequence[str],
        has_own: bool,
        fewest_bits: Literal[4, 8],
        round_one: Callable[[int, Kind], Blocks],
        *,
        may_differ: bool,
    ) -> list[AnyRows]:
        """Tensors as blocks, all of one kind unless they `may_differ`: the file's own, or `round_one`'s of a place and
        a kind."""
        own = [self._find_own(name) if has_own else None for name in found]
        kinds = {None if part is None else part.kind for part in own}
        kind: Kind = "int4" if self.packing == "int4" and fewest_bits == 4 else "int8"
        keeps_all = may_differ or (len(kinds) == 1 and None not in kinds)
        parts = [
            part if part is not None and (keeps_all or part.kind == kind) else round_one(place, kind)
            for place, part in enumerate(own)
        ]
        self._release_read()
        for name, part in zip(found, parts, strict=True):
            self._account(name, is_read=not isinstance(part, RawBlocks))
        return parts

    def _find_own(self, name: str) -> AnyRows | None:
        """The file's blocks of a tensor, in a form that the device's products read."""
        found = self.source.blocks(name)
        if found is None or self.device.type == "cpu":
            return found
        plain = read_plain(found)
        return plain.simplify() if isinstance(plain, SuperBlocks) else plain

    def _quantise(self, name: str, size: int, inputs: int, is_transposed: bool, kind: Kind) -> Blocks:
        numbers = self.empty(size, inputs)
        self.source.copy_into(name, numbers, transpose=is_transposed)
        return quantise(numbers, kind)

    def stack(self, names: Sequence[str], count: int, rows: int, inputs: int) -> AnyLinear:
        """Tensors (count, rows, inputs), each with a matrix of every expert, as one matrix: expert by expert, the
        tensors' parts in order; quantised if that was asked for."""
        found = [self.find(name, (count, rows, inputs)) for name in names]
        if self.packs(inputs) and len(names) * rows % TILE == 0:

            def round_one(place: int, kind: Kind) -> Blocks:
                numbers = self.empty(count, rows, inputs)
                self.source.copy_into(found[place], numbers)
                return quantise(numbers.view(-1, inputs), kind)

            blocks = join_rows(self._find_blocks(found, self.packing == "file", 4, round_one, may_differ=False))
            order = torch.arange(len(names) * count * rows)
            order = order.view(len(names), count, rows).transpose(0, 1).flatten()
            return self.lay_out(blocks.select_rows(order) if len(names) > 1 else blocks)
        if isinstance(self.source, SharedSource) and len(found) == 1:
            shared = self.source.share(found[0], self.device, self.dtype)
            if shared is not None:
                self._account(found[0])
                return Linear(shared.view(-1, inputs))
        weight = self.empty(count, len(names) * rows, inputs)
        for place, name in enumerate(found):
            self.copy(name, weight[:, place * rows : (place + 1) * rows])
        return Linear(weight.view(-1, inputs))

    def linear(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        inputs: int,
        *,
        has_bias: bool,
        is_transposed: bool = False,
        is_changed: bool = False,  # rows are reordered in place, so nothing is shared with an owner
    ) -> Linear:
        """Matrices that read the same input, stacked; `names` lack .weight and .bias."""
        if len(names) == 1 and not is_transposed:
            whole = self.matrix(f"{names[0]}.weight", sizes[0], inputs, is_changed=is_changed)
            return Linear(whole, self.biases(names, sizes) if has_bias else None)
        for name, size in zip(names, sizes, strict=True):
            self.find(f"{name}.weight", (inputs, size) if is_transposed else (size, inputs))
        weight, first = self.empty(sum(sizes), inputs), 0
        for name, size in zip(names, sizes, strict=True):
            part = weight[first : first + size]
            self.copy(f"{name}.weight", part, is_transposed=is_transposed)
            first += size
        return Linear(weight, self.biases(names, sizes) if has_bias else None)

    def product(
        self,
        names: Sequence[str],
        sizes: Sequence[int],
        inputs: int,
        *,
        has_bias: bool,
        is_transposed: bool = False,
        order: torch.Tensor | None = None,
        is_changed: bool = False,
    ) -> AnyLinear:
        """As `linear`, quantised if that was asked for. A packed layout can't be reordered, so `order` gives the order
        of a quantised matrix's rows."""
        if self._has_tables and inputs % BLOCK == 0:
            tables = self._find_tables(names, sizes, inputs, is_transposed)
            if tables is not None:
                bias = self.biases(names, sizes) if has_bias else None
                if order is not None:
                    tables = tables.select_rows(order.to(tables.nibbles.device))
                    bias = bias[order.to(bias.device)] if bias is not None else None
                return self._lay_out_tables(tables, bias)
        if not self.packs(inputs):
            return self.linear(
                names, sizes, inputs, has_bias=has_bias, is_transposed=is_transposed, is_changed=is_changed
            )
        if self.packing == "fp8":
            plain = self.linear(names, sizes, inputs, has_bias=has_bias, is_transposed=is_transposed, is_changed=True)
            weight, bias = plain.weight, plain.bias
            if order is not None:
                weight = weight[order.to(weight.device)]
                bias = bias[order.to(bias.device)] if bias is not None else None
            return WordLinear.round(weight, bias)
        parts = self._pack_each(
            [f"{name}.weight" for name in names],
            sizes,
            inputs,
            is_transposed,
            4,
            may_differ=self.device.type == "cpu" and _can_stand_apart(sizes, order),
        )
        bias = self.biases(names, sizes) if has_bias else None
        if len({part.kind for part in parts}) == 1:
            parts = [join_rows(parts)]
        if order is not None:
            parts = _order_parts(parts, order)
            bias = bias[order.to(bias.device)] if bias is not None else None
        return self.lay_out(*parts, bias=bias)

    def _find_tables(
        self, names: Sequence[str], sizes: Sequence[int], inputs: int, is_transposed: bool
    ) -> TableBlocks | None:
        """Stacked matrices as codes of one table: the file's own, or quantised here; None if they are plain numbers."""
        found = [
            self.find(f"{name}.weight", (inputs, size) if is_transposed else (size, inputs))
            for name, size in zip(names, sizes, strict=True)
        ]
        parts: list[TableBlocks] = []
        asked = QUANTISED_TABLES.get(self.packing or "")
        for name, size in zip(found, sizes, strict=True):
            if asked is not None:
                numbers = self.empty(size, inputs, dtype=torch.float32)
                self.source.copy_into(name, numbers, transpose=is_transposed)
                parts.append(quantise_table(numbers, asked[0], is_nested=asked[1]))
                continue
            own = self.source.blocks(name)
            if isinstance(own, TableBlocks):
                parts.append(own)
        if len(parts) < len(names) or len({part.kind for part in parts}) > 1:
            return None
        joined = join_rows(parts)
        assert isinstance(joined, TableBlocks)
        for name in found:
            self._account(name)
        return joined

    def _lay_out_tables(self, blocks: TableBlocks, bias: torch.Tensor | None) -> AnyLinear:
        if self.device.type == "cpu":
            return PackedLinear.of(blocks, bias=bias)
        return TableLinear.of(blocks, self.device, self.dtype, bias)

    def lay_out(self, *parts: AnyRows, bias: torch.Tensor | None = None) -> PackedLinear | WordLinear:
        """Blocks in the layout that the device's products read; those of several kinds are for a CPU."""
        if self.device.type == "cpu":
            made = PackedLinear.of(*parts, bias=bias)
            self._release_read()
            return made
        (blocks,) = parts
        assert isinstance(blocks, Blocks)
        return WordLinear.of(blocks, self.device, self.dtype, bias)

    def lay_out_mx(self, blocks: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> AnyLinear:
        """A matrix of 4-bit floats, kept exactly as it is unless another form was asked for."""
        if self.packing in ("int8", "int4"):
            return self.lay_out(quantise(mx.dequantise(blocks, scales), self.packing), bias=bias)
        if self.device.type != "cpu":
            words = mx.arrange(blocks, scales)
            return MxLinear(words.words, words.scales, self.dtype, bias)
        exact = mx.widen(blocks, scales)
        if exact is None or self.dtype != torch.float32:
            return Linear(mx.dequantise(blocks, scales).to(self.dtype), bias)
        return PackedLinear.of(exact, bias=bias)

    def lay_out_table(self, blocks: AnyRows, scale: float) -> PackedEmbedding | WordEmbedding:
        """Embeddings in the layout of the device's lookups."""
        table: PackedEmbedding | WordEmbedding
        if self.device.type == "cpu":
            table = PackedEmbedding.of(blocks)
            self._release_read()
        else:
            assert isinstance(blocks, Blocks)
            table = WordEmbedding.of(blocks, self.device, self.dtype)
        table.scale = scale
        return table

    def biases(self, names: Sequence[str], sizes: Sequence[int]) -> torch.Tensor:
        """The concatenated biases of stacked matrices."""
        for name, size in zip(names, sizes, strict=True):
            self.find(f"{name}.bias", (size,))
        bias, first = self.empty(sum(sizes)), 0
        for name, size in zip(names, sizes, strict=True):
            self.copy(f"{name}.bias", bias[first : first + size])
            first += size
        return bias

    def norm(self, name: str, size: int, spec: NormSpec) -> Norm:
        """A normalisation's weights."""
        dtype = torch.float32 if spec.is_float32 else self.dtype
        weight = bias = None
        if spec.has_weight:
            # The offset is added before the weights are rounded to the model's dtype.
            exact = self.take(f"{name}.weight", size, dtype=torch.float32)
            weight = (exact + spec.offset if spec.offset else exact).to(dtype)
        if spec.has_bias:
            bias = self.take(f"{name}.bias", size, dtype=dtype)
        return Norm(weight, bias, spec.eps, spec.kind == "layer", spec.is_float32)

    def check_all_used(self, spare: Iterable[str] = ()) -> None:
        """Raise if the source holds tensors that this model would not use, or NaN; the last of all calls."""
        self.source.finish()
        self._release_read()
        known = self._used | set(spare)
        left = [name for name in self.source.names() if name not in known and not _BUFFERS.search(name)]
        if left:
            shown = ", ".join(repr(name) for name in left[:3]) + (" …" if len(left) > 3 else "")
            raise LoadError(
                f"the weights hold {len(left)} tensors that this architecture has no place for ({shown}): "
                "leaving them out would compute something else"
            )


def _can_stand_apart(sizes: Sequence[int], order: torch.Tensor | None) -> bool:
    """Whether matrices of these rows are whole tiles, and `order` moves no row from one to another."""
    first, is_whole = 0, True
    for size in sizes:
        mine = order[first : first + size] if order is not None else None
        is_whole &= mine is None or bool(((mine >= first) & (mine < first + size)).all())
        first += size
    return is_whole and not any(size % TILE for size in sizes[:-1])


def _order_parts(parts: Sequence[AnyRows], order: torch.Tensor) -> list[AnyRows]:
    """The rows of matrices that stand one below the other in another order; each keeps its own."""
    ordered: list[AnyRows] = []
    first = 0
    for part in parts:
        ordered.append(part.select_rows(order[first : first + part.shape[0]] - first))
        first += part.shape[0]
    return ordered

"""The storage formats of weights, and their dequantisation: plain torch, a few megabytes at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from unspool.errors import UnsupportedError
from unspool.kernels.cpu.supers import SUPER, SUPER_BYTES, SUPER_KINDS, read_supers, split_nibbles
from unspool.loading.codebooks import CODED

CHUNK_BYTES = 8 << 20  # the size of a chunk of rows in float32


@dataclass(frozen=True, slots=True)
class StoredType:
    """One storage format: a block of `block_values` values takes `block_bytes` bytes."""

    name: str
    block_values: int
    block_bytes: int
    dtype: torch.dtype | None = None  # plain formats: the bytes are numbers of this type
    unpack: Callable[[torch.Tensor], torch.Tensor] | None = None  # (blocks, bytes) uint8 -> (blocks, values) float32

    def count_bytes(self, shape: tuple[int, ...]) -> int:
        """How many bytes a tensor of this shape takes (rows must be whole blocks)."""
        return math.prod(shape) // self.block_values * self.block_bytes


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """The float16 at byte `at` of every block, as float32."""  # (blocks, 1)
    # The clone makes it contiguous and aligned, which a view of a mapped file need not be.
    pair = blocks[:, at : at + 2].clone(memory_format=torch.contiguous_format)
    return pair.view(torch.float16).float()


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """Bit i of a 32-bit little-endian mask, for the 32 values of a block, already moved to bit 4."""
    shifts = torch.arange(8, dtype=torch.uint8)
    return (((packed.unsqueeze(2) >> shifts) & 1) << 4).flatten(1)  # (blocks, 32)


def _unpack_q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8).float().mul_(_half(blocks, 0))


def _unpack_q4_0(blocks: torch.Tensor) -> torch.Tensor:
    values = split_nibbles(blocks[:, 2:], 16).flatten(1).float()
    return values.sub_(8).mul_(_half(blocks, 0))


def _unpack_q4_1(blocks: torch.Tensor) -> torch.Tensor:
    values = split_nibbles(blocks[:, 4:], 16).flatten(1).float()
    return values.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _unpack_q5_0(blocks: torch.Tensor) -> torch.Tensor:
    values = split_nibbles(blocks[:, 6:], 16).flatten(1).bitwise_or_(_fifth_bits(blocks[:, 2:6])).float()
    return values.sub_(16).mul_(_half(blocks, 0))


def _unpack_q5_1(blocks: torch.Tensor) -> torch.Tensor:
    values = split_nibbles(blocks[:, 8:], 16).flatten(1).bitwise_or_(_fifth_bits(blocks[:, 4:8])).float()
    return values.mul_(_half(blocks, 0)).add_(_half(blocks, 2))


def _unpack_supers(stored: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def unpack(blocks: torch.Tensor) -> torch.Tensor:
        found = read_supers(blocks, stored, (blocks.shape[0], SUPER))
        assert found is not None
        return found.dequantise()

    return unpack


STORED_TYPES: dict[str, StoredType] = {
    stored.name: stored
    for stored in (
        StoredType("F64", 1, 8, dtype=torch.float64),
        StoredType("F32", 1, 4, dtype=torch.float32),
        StoredType("F16", 1, 2, dtype=torch.float16),
        StoredType("BF16", 1, 2, dtype=torch.bfloat16),
        StoredType("I64", 1, 8, dtype=torch.int64),
        StoredType("I32", 1, 4, dtype=torch.int32),
        StoredType("I16", 1, 2, dtype=torch.int16),
        StoredType("I8", 1, 1, dtype=torch.int8),
        StoredType("U8", 1, 1, dtype=torch.uint8),
        StoredType("BOOL", 1, 1, dtype=torch.bool),
        StoredType("F8_E4M3", 1, 1, dtype=torch.float8_e4m3fn),
        StoredType("Q8_0", 32, 34, unpack=_unpack_q8_0),
        StoredType("Q4_0", 32, 18, unpack=_unpack_q4_0),
        StoredType("Q4_1", 32, 20, unpack=_unpack_q4_1),
        StoredType("Q5_0", 32, 22, unpack=_unpack_q5_0),
        StoredType("Q5_1", 32, 24, unpack=_unpack_q5_1),
        *(
            StoredType(name, SUPER, SUPER_BYTES[kind], unpack=_unpack_supers(name))
            for name, kind in SUPER_KINDS.items()
        ),
        *(StoredType(name, kind.numbers, kind.num_bytes, unpack=kind.dequantise) for name, kind in CODED.items()),
    )
}


def find_stored_type(name: str, tensor: str, supported: tuple[str, ...]) -> StoredType:
    """The format called `name`, or an UnsupportedError that names the tensor and what can be read."""
    if name not in supported:
        raise UnsupportedError(
            f"tensor {tensor!r} is stored as {name}, which unspool can't read. "
            f"Use a file whose tensors are any of: {', '.join(supported)}"
        )
    return STORED_TYPES[name]


def iterate_rows(
    raw: torch.Tensor, stored: StoredType, chunk_bytes: int = CHUNK_BYTES
) -> Iterator[tuple[int, torch.Tensor]]:
    """Unpack rows of bytes (rows, bytes per row) chunk by chunk: yields the first row's index and the values.

    Quantised formats come out as float32, plain ones unchanged (a view if the bytes are aligned).
    """
    num_rows, row_bytes = raw.shape
    values_per_row = row_bytes // stored.block_bytes * stored.block_values
    step = max(1, chunk_bytes // max(1, 4 * values_per_row))
    for first in range(0, num_rows, step):
        chunk = raw[first : first + step]
        if stored.unpack is not None:
            blocks = chunk.reshape(-1, stored.block_bytes)
            yield first, stored.unpack(blocks).view(chunk.shape[0], values_per_row)
        else:
            yield first, _reinterpret(chunk, stored)


def _reinterpret(raw: torch.Tensor, stored: StoredType) -> torch.Tensor:
    """The bytes of a plain format as its numbers, copied only if they are unaligned."""
    assert stored.dtype is not None
    if raw.storage_offset() % stored.block_bytes:
        raw = raw.clone(memory_format=torch.contiguous_format)
    return raw.view(stored.dtype)

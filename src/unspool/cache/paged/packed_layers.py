"""The packed blocks of every layer: how numbers get into them and out again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from unspool.cache.paged.pool import BlockPool
from unspool.cache.stores.memory import KeyFormat
from unspool.cache.stores.quantization import QuantizedCacheConfig
from unspool.kernels.packing import Fit, Packed, Scheme, pack, unpack

NUM_PARTS: Final = 6  # tensors of a packed layer: codes, scales and zero points of keys, then of values
_PIECE: Final = 64  # blocks packed at a time: packing needs room for them in float32


class PackedLayers:
    """Layers in blocks of a pool, all packed by the schemes of one config; `plain` has what is not packed yet."""

    def __init__(self, config: QuantizedCacheConfig, fit: Fit, plain: BlockPool, packed: BlockPool) -> None:
        self._config, self._fit, self._plain, self._packed = config, fit, plain, packed
        self._schemes: tuple[Scheme, Scheme] | None = None

    def open(self, layer: int, keys: KeyFormat) -> None:
        """Make room for a layer."""
        for which, scheme in enumerate(self.find_schemes(keys.width)):
            for part, (shape, kind) in enumerate(scheme.shapes_of(1, keys.heads, self._plain.block_size)):
                self._packed.open_buffer(NUM_PARTS * layer + 3 * which + part, shape[1:], kind, keys.device)

    def find_schemes(self, width: int) -> tuple[Scheme, Scheme]:
        """How keys and values of a width are packed."""
        if self._schemes is None:
            self._schemes = self._config.make_schemes(width)
        return self._schemes

    def show(self, layer: int) -> tuple[Packed, Packed]:
        """The packed keys and values of a layer: rows are blocks."""
        keys, values = self.find_schemes(self._plain.buffers[layer].shape[-1])
        parts = self._packed.buffers[NUM_PARTS * layer : NUM_PARTS * (layer + 1)]
        return Packed(keys, *parts[:3]), Packed(values, *parts[3:])

    def pack(self, layer: int, numbers: torch.Tensor, into: Sequence[int]) -> None:
        """Pack whole blocks (blocks, positions, 2, heads, width)."""
        for start in range(0, len(into), _PIECE):
            index = torch.tensor(into[start : start + _PIECE], device=numbers.device)
            both = numbers[start : start + _PIECE].unbind(2)
            for packed, part in zip(self.show(layer), both, strict=True):
                made = pack(part.transpose(1, 2), packed.scheme, self._fit)
                for old, new in zip(packed.tensors(), made.tensors(), strict=True):
                    old[index] = new

    def unpack(self, layer: int, block: int, out: torch.Tensor) -> None:
        """Write the first positions of a block into `out` (positions, 2, heads, width)."""
        for which, packed in enumerate(self.show(layer)):
            numbers = unpack(packed.rows(slice(block, block + 1)), out.dtype)[0].transpose(0, 1)
            out[:, which] = numbers[: out.shape[0]]  # (positions, heads, width)

"""Putting a checkpoint's tensors in their places: fused, permuted and converted while they are copied."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Final, Literal

import torch

from unspool.errors import LoadError
from unspool.models.spec import NormSpec
from unspool.models.weights import Linear, Norm, WeightSource

Progress = Callable[[int, int], None]
"""Called with the numbers placed so far and the numbers in all."""

# Buffers that checkpoints carry and nobody needs: masks and frequencies can be computed.
_BUFFERS: Final = re.compile(
    r"(\.(masked_bias|inv_freq)|(^|\.)h\.\d+\.attn\.bias|layers\.\d+\.attention\.bias|^rope_freqs\.weight)$"
)


class Assembler:
    """Copies tensors of a source into new buffers of one device and dtype, and keeps the accounts."""

    def __init__(
        self,
        source: WeightSource,
        device: torch.device,
        dtype: torch.dtype,
        *,
        prefix: str = "",  # what older checkpoints leave out at the front of a name
        progress: Progress | None = None,
    ) -> None:
        self.source = source
        self.device = device
        self.dtype = dtype
        self._prefix = prefix
        self._progress = progress
        self._used: set[str] = set()
        self._placed = 0
        self._total = sum(math.prod(source.info(name).shape) for name in source.names())

    def has(self, name: str) -> bool:
        """Whether the source holds a tensor of that name."""
        return name in self.source or name.removeprefix(self._prefix) in self.source

    def empty(self, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A new buffer."""
        return torch.empty(shape, dtype=dtype or self.dtype, device=self.device)

    def copy(self, name: str, out: torch.Tensor, *, is_transposed: bool = False) -> None:
        """Copy one tensor to its place and let go of its source."""
        if not self.has(name):
            raise LoadError(f"the weights have no tensor {name!r}, which the config says there is")
        name = name if name in self.source else name.removeprefix(self._prefix)
        shape = tuple(self.source.info(name).shape)
        expected = tuple(out.shape)[::-1] if is_transposed else tuple(out.shape)
        if shape != expected:
            raise LoadError(
                f"tensor {name!r} has the wrong shape: the config makes it {list(expected)}, "
                f"the weights have {list(shape)}. Do they belong together?"
            )
        self.source.copy_into(name, out, transpose=is_transposed)
        self.source.release(name)
        if name not in self._used:
            self._used.add(name)
            self._placed += math.prod(shape)
        if self._progress is not None:
            self._progress(self._placed, self._total)

    def matrix(self, name: str, rows: int, columns: int) -> torch.Tensor:
        """One matrix as it is."""
        out = self.empty(rows, columns)
        self.copy(name, out)
        return out

    def linear(
        self, names: Sequence[str], sizes: Sequence[int], inputs: int, *, has_bias: bool, is_transposed: bool = False
    ) -> Linear:
        """Matrices that read the same input, one below the other; `names` lack .weight and .bias."""
        weight = self.empty(sum(sizes), inputs)
        bias = self.empty(sum(sizes)) if has_bias else None
        first = 0
        for name, size in zip(names, sizes, strict=True):
            self.copy(f"{name}.weight", weight[first : first + size], is_transposed=is_transposed)
            if bias is not None:
                self.copy(f"{name}.bias", bias[first : first + size])
            first += size
        return Linear(weight, bias)

    def norm(self, name: str, size: int, spec: NormSpec) -> Norm:
        """A normalisation's weights."""
        dtype = torch.float32 if spec.is_float32 else self.dtype
        weight = bias = None
        if spec.has_weight:
            # The offset is added before the weights are rounded to the model's dtype.
            exact = self.empty(size, dtype=torch.float32)
            self.copy(f"{name}.weight", exact)
            weight = (exact + spec.offset if spec.offset else exact).to(dtype)
        if spec.has_bias:
            bias = self.empty(size, dtype=dtype)
            self.copy(f"{name}.bias", bias)
        return Norm(weight, bias, spec.eps, spec.kind == "layer", spec.is_float32)

    def check_all_used(self, spare: Iterable[str] = ()) -> None:
        """Raise where the source holds tensors that this model would leave out of its computation."""
        known = self._used | set(spare)
        left = [name for name in self.source.names() if name not in known and not _BUFFERS.search(name)]
        if left:
            shown = ", ".join(repr(name) for name in left[:3]) + (" …" if len(left) > 3 else "")
            raise LoadError(
                f"the weights hold {len(left)} tensors that this architecture has no place for ({shown}): "
                "leaving them out would compute something else"
            )


def split_groups_(
    fused: torch.Tensor, num_heads: int, num_kv_heads: int, layout: Literal["stacked", "grouped"]
) -> None:
    """Bring a fused QKV (rows, …) into the order q, k, v; "grouped" has each key head beside its queries."""
    if layout == "stacked":
        return
    group = num_heads // num_kv_heads
    parts = fused.view(num_kv_heads, group + 2, -1).clone()  # (kv_heads, queries and key and value, rest)
    rows = fused.shape[0] // (num_kv_heads * (group + 2))
    ends = (0, num_heads * rows, (num_heads + num_kv_heads) * rows, fused.shape[0])
    for place, part in enumerate((parts[:, :group], parts[:, group], parts[:, group + 1])):
        fused[ends[place] : ends[place + 1]].view(part.shape).copy_(part)


def pair_neighbours_(heads: torch.Tensor, head_dim: int, width: int) -> None:
    """Reorder rows (heads · head_dim, …) so that the two numbers that rope turns together lie side by side."""
    turned = heads.view(-1, head_dim, heads[0].numel())[:, :width]
    num_heads, rest = turned.shape[0], turned.shape[2]
    halves = turned.view(num_heads, 2, width // 2, rest).transpose(1, 2).clone()
    turned.view(num_heads, width // 2, 2, rest).copy_(halves)

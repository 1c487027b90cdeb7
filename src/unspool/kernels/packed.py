"""Attention over keys that are packed in few bits: read block by block, never unpacked as a whole.

Three implementations of one thing: `attend_plainly` unpacks everything and is what the others are tested against,
`attend_in_blocks` keeps a running softmax over blocks (any device), `gpu/packed_reading.py` is a kernel for steps.
"""

from __future__ import annotations

import torch

from unspool.kernels.attention import attend
from unspool.kernels.halves import is_slow, widen
from unspool.kernels.packed_keys import PackedKeys
from unspool.kernels.packing import unpack
from unspool.kernels.presence import has_triton

_BLOCK_NUMBERS = 1 << 21  # numbers unpacked at a time: what fits a core's cache with room for scores


def attend_packed(
    queries: torch.Tensor,  # (rows, heads, new, width)
    keys: PackedKeys,
    values: PackedKeys,
    *,
    scale: float,
    mask: torch.Tensor | None = None,  # additive, by position: (rows or 1, heads or 1, new or 1, stop)
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # (1, heads, 1)
    want_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention output (rows, heads, new, width), and the weights by position if they are wanted.

    Queries see positions up to their own, as far back as the window goes. A mask replaces this, and may add a bias.
    """
    if want_weights or sinks is not None:
        return attend_plainly(
            queries,
            keys,
            values,
            scale=scale,
            mask=mask,
            window=window,
            softcap=softcap,
            sinks=sinks,
            want_weights=want_weights,
        )
    if queries.device.type == "cuda" and has_triton():
        from unspool.kernels.gpu.attention import packed_reading

        if packed_reading.can_read(queries, keys, values):
            return packed_reading.attend(queries, keys, values, scale, mask, window, softcap), None
    return attend_in_blocks(queries, keys, values, scale=scale, mask=mask, window=window, softcap=softcap), None


def attend_plainly(
    queries: torch.Tensor,
    keys: PackedKeys,
    values: PackedKeys,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    want_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The reference: unpack everything, then attend."""
    positions = keys.view.positions
    stop = mask.shape[-1] if mask is not None else int(positions.max()) + 1
    if mask is None:
        mask = _see(torch.arange(stop, device=positions.device), positions[:, None, :, None], window)
    return attend(
        queries,
        keys.unpack(stop),
        values.unpack(stop),
        scale=scale,
        mask=mask,
        softcap=softcap,
        sinks=sinks,
        want_weights=want_weights,
    )


def attend_in_blocks(
    queries: torch.Tensor,
    keys: PackedKeys,
    values: PackedKeys,
    *,
    scale: float,
    mask: torch.Tensor | None = None,
    window: int | None = None,
    softcap: float | None = None,
    block_numbers: int = _BLOCK_NUMBERS,
) -> torch.Tensor:
    """An online softmax over blocks of keys (Milakov and Gimelshein, 2018): no temporary grows with the context."""
    rows, heads, num_new, width = queries.shape
    kv_heads, num_recent = keys.recent.shape[1], keys.recent.shape[2]
    view, block = keys.view, keys.packed.scheme.block
    share = heads // kv_heads
    grouped = queries.reshape(rows, kv_heads, share * num_new, width)  # the queries that meet the same keys
    asked = view.positions.repeat(1, share)[:, None, :, None]  # (rows, 1, share * new, 1)
    most = max(view.num_packed)
    wide = max(num_new * heads, kv_heads * width) * rows
    length = max(block, block_numbers // wide // block * block)  # positions at a time
    running = _RunningSoftmax(grouped)
    counts = view.counts.long()
    first = 0
    if window is not None:  # what no query sees is not unpacked
        first = max(0, (int(view.positions[:, 0].min()) - window + 1) // block * block)
    for start in range(min(first, most), most, length):
        stop = min(start + length, most)
        places = torch.arange(start, stop, device=queries.device)
        visible = None
        if window is not None or any(count < stop for count in view.num_packed):
            visible = _see(places, asked, window) & (places < counts[:, None, None, None])
        bias = _cut_mask(mask, places[None], rows, kv_heads, share, num_new)
        some_keys = unpack(keys.packed.narrow(start, stop - start), queries.dtype)
        some_values = unpack(values.packed.narrow(start, stop - start), queries.dtype)
        running.add(some_keys, some_values, scale, softcap, visible, bias)
    for start in range(0, num_recent, length):
        stop = min(start + length, num_recent)
        columns = torch.arange(start, stop, device=queries.device) + counts[:, None]  # (rows, slots) positions
        visible = _see(columns[:, None, None, :], asked, window)
        bias = _cut_mask(mask, columns, rows, kv_heads, share, num_new)
        running.add(keys.recent[:, :, start:stop], values.recent[:, :, start:stop], scale, softcap, visible, bias)
    return running.read().reshape(rows, heads, num_new, width)


class _RunningSoftmax:
    """The output of queries (rows, kv_heads, asked, width) so far, and the sum of its weights."""

    def __init__(self, queries: torch.Tensor) -> None:
        self._dtype, self._is_widened = queries.dtype, is_slow(queries)
        self._queries = widen(queries) if self._is_widened else queries
        self._peak = queries.new_full((*queries.shape[:3], 1), -torch.inf, dtype=torch.float32)
        self._total = torch.zeros_like(self._peak)
        self._sum = torch.zeros_like(queries, dtype=torch.float32)

    def add(
        self,
        keys: torch.Tensor,  # (rows, kv_heads, keys, width)
        values: torch.Tensor,
        scale: float,
        softcap: float | None,
        visible: torch.Tensor | None,  # (rows, 1, asked, keys)
        bias: torch.Tensor | None,  # (rows, kv_heads, asked, keys)
    ) -> None:
        if self._is_widened:
            keys, values = widen(keys), widen(values)
        scores = torch.matmul(self._queries, keys.transpose(-1, -2)).float().mul_(scale)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        if bias is not None:
            scores = scores + bias
        if visible is not None:
            scores = scores.masked_fill(~visible, -torch.inf)
        peak = torch.maximum(self._peak, scores.amax(-1, keepdim=True))
        base = peak.masked_fill(peak == -torch.inf, 0.0)  # a query that has seen nothing yet
        weights = scores.sub_(base).exp_()
        fade = (self._peak - base).exp_()
        self._total = self._total * fade + weights.sum(-1, keepdim=True)
        self._sum = self._sum * fade + torch.matmul(weights.to(values.dtype), values)
        self._peak = peak

    def read(self) -> torch.Tensor:
        return (self._sum / self._total).to(self._dtype)


def _see(places: torch.Tensor, asked: torch.Tensor, window: int | None) -> torch.Tensor:
    visible = places <= asked
    return visible if window is None else visible & (places > asked - window)


def _cut_mask(
    mask: torch.Tensor | None, columns: torch.Tensor, rows: int, kv_heads: int, share: int, num_new: int
) -> torch.Tensor | None:
    """The columns (rows or 1, keys) of a mask by position, for grouped queries: (rows, kv_heads, asked, keys)."""
    if mask is None:
        return None
    whole = mask.expand(rows, kv_heads * share, num_new, mask.shape[-1])
    index = columns.clamp(max=mask.shape[-1] - 1)[:, None, None, :]
    cut = whole.gather(-1, index.expand(rows, kv_heads * share, num_new, index.shape[-1]))
    return cut.reshape(rows, kv_heads, share * num_new, -1)

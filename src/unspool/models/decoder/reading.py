"""How queries read what a cache returned: plain tensors, or objects that hold keys in another form.

A cache's `write` returns keys and values in one of three forms, both in the same:
- tensors (rows, heads, keys, width);
- `BranchedKeys`: a prompt's keys once, and what each of its branches has of its own;
- `PackedKeys`: old positions in few bits, recent ones in full precision.
Where several rows of a pass read one row's keys (`Sight.num_forks`), they are tensors.
Ragged rows without what fills them are read here too (`read_ragged`).
A new form is one more branch of `read_others`. The prepared step reads tensors itself and asks here for the rest.
"""

from __future__ import annotations

from typing import Any

import torch

from unspool.cache import FLAT, BranchedKeys, Cache
from unspool.errors import UnsupportedError
from unspool.kernels.attention import attend
from unspool.kernels.branched import attend_branches
from unspool.kernels.forked import attend_forked
from unspool.kernels.packed import PackedKeys, attend_packed
from unspool.kernels.ragged import attend_ragged
from unspool.models.decoder.sight import Sight


def read_keys(
    queries: torch.Tensor,  # (rows, heads, new, width)
    keys: Any,
    values: Any,
    sight: Sight,
    *,
    scale: float,
    softcap: float | None = None,
    want_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the queries read (rows, heads, new, width), and the attention weights where they are wanted."""
    if sight.num_forks > 1:
        return attend_forked(
            queries,
            keys,
            values,
            num_forks=sight.num_forks,
            scale=scale,
            mask=sight.mask,
            softcap=softcap,
            want_weights=want_weights,
        )
    if not isinstance(keys, torch.Tensor):
        return read_others(queries, keys, values, sight, scale=scale, softcap=softcap, want_weights=want_weights)
    if sight.first_key:
        keys, values = keys[:, :, sight.first_key :], values[:, :, sight.first_key :]
    return attend(
        queries,
        keys,
        values,
        scale=scale,
        mask=sight.mask,
        is_causal=sight.is_causal,
        softcap=softcap,
        want_weights=want_weights,
    )


def read_ragged(
    queries: torch.Tensor,  # (tokens, heads, width)
    kv: torch.Tensor,  # (tokens, 2, kv_heads, width)
    cache: Cache,
    layer: int,
    sight: Sight,
    *,
    scale: float,
    softcap: float | None = None,
) -> torch.Tensor:
    """Write the keys of a pass that has its real tokens alone, and read them: (tokens, heads, width)."""
    ragged = sight.ragged
    assert ragged is not None
    if sight.reads_rows:
        if FLAT in cache.can:
            keys, values = cache.write_flat(layer, kv, ragged)
        else:
            keys, values = (part.transpose(1, 2) for part in cache.write(layer, ragged.fill(kv)))
        return attend_ragged(queries, keys, values, ragged, scale=scale, window=sight.window, softcap=softcap)
    written = cache.write(layer, ragged.fill(kv))
    read, _ = read_keys(ragged.fill(queries).transpose(1, 2), *written, sight, scale=scale, softcap=softcap)
    return ragged.take(read.transpose(1, 2))


def read_others(
    queries: torch.Tensor,
    keys: Any,
    values: Any,
    sight: Sight,
    *,
    scale: float,
    softcap: float | None = None,
    want_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same, for keys that are not tensors."""
    if isinstance(keys, BranchedKeys):
        return attend_branches(
            queries, keys.shared, values.shared, keys.own, values.own, scale=scale, mask=sight.mask, softcap=softcap
        )
    if isinstance(keys, PackedKeys):
        return attend_packed(
            queries,
            keys,
            values,
            scale=scale,
            mask=sight.mask,
            window=sight.window,
            softcap=softcap,
            want_weights=want_weights,
        )
    raise UnsupportedError(f"the cache returned {type(keys).__name__}, which native models can't read")

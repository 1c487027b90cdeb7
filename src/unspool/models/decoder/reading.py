"""Attention over what a cache returned: plain tensors, or objects that hold keys in another form.

A cache's `write` returns keys and values in one of three forms, both in the same:
- tensors (rows, heads, keys, width);
- `BranchedKeys`: a prompt's keys once, and each branch's own keys;
- `PackedKeys`: old positions in few bits, recent ones in full precision.
If several rows of a pass read one row's keys (`AttentionView.num_forks`), they are tensors.
Ragged rows without padding are read here too (`read_ragged`).
A new form is one more branch of `read_others`.
"""

from __future__ import annotations

from typing import Any

import torch

from unspool.cache import FLAT, BranchedKeys, Cache
from unspool.errors import UnsupportedError
from unspool.kernels.attention import attend
from unspool.kernels.branched import attend_branches
from unspool.kernels.forked import attend_forked
from unspool.kernels.packed import attend_packed
from unspool.kernels.packed_keys import PackedKeys
from unspool.kernels.ragged import attend_ragged
from unspool.models.decoder.views import AttentionView


def read_keys(
    queries: torch.Tensor,  # (rows, heads, new, width)
    keys: Any,
    values: Any,
    view: AttentionView,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # (1, heads, 1): scores of a key without a value
    want_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The attention output (rows, heads, new, width), and the attention weights if they are wanted."""
    if view.num_forks > 1:
        return attend_forked(
            queries,
            keys,
            values,
            num_forks=view.num_forks,
            scale=scale,
            mask=view.mask,
            softcap=softcap,
            sinks=sinks,
            want_weights=want_weights,
        )
    if not isinstance(keys, torch.Tensor):
        return read_others(
            queries, keys, values, view, scale=scale, softcap=softcap, sinks=sinks, want_weights=want_weights
        )
    if view.first_key:
        keys, values = keys[:, :, view.first_key :], values[:, :, view.first_key :]
    return attend(
        queries,
        keys,
        values,
        scale=scale,
        mask=view.mask,
        is_causal=view.is_causal,
        softcap=softcap,
        sinks=sinks,
        want_weights=want_weights,
    )


def read_ragged(
    queries: torch.Tensor,  # (tokens, heads, width)
    kv: torch.Tensor,  # (tokens, 2, kv_heads, width)
    cache: Cache,
    layer: int,
    view: AttentionView,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Write the keys of a pass of real tokens only, and attend to them: (tokens, heads, width)."""
    ragged = view.ragged
    assert ragged is not None
    if view.reads_rows:
        if FLAT in cache.can:
            keys, values = cache.write_flat(layer, kv, ragged)
        else:
            keys, values = (part.transpose(1, 2) for part in cache.write(layer, ragged.fill(kv)))
        return attend_ragged(queries, keys, values, ragged, scale=scale, window=view.window, softcap=softcap)
    written = cache.write(layer, ragged.fill(kv))
    filled = ragged.fill(queries).transpose(1, 2)
    read, _ = read_keys(filled, *written, view, scale=scale, softcap=softcap, sinks=sinks)
    return ragged.take(read.transpose(1, 2))


def read_others(
    queries: torch.Tensor,
    keys: Any,
    values: Any,
    view: AttentionView,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,  # (1, heads, 1): scores of a key without a value
    want_weights: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The same, for keys that are not tensors."""
    if isinstance(keys, BranchedKeys):
        return attend_branches(
            queries,
            keys.shared,
            values.shared,
            keys.own,
            values.own,
            scale=scale,
            mask=view.mask,
            softcap=softcap,
            sinks=sinks,
        )
    if isinstance(keys, PackedKeys):
        return attend_packed(
            queries,
            keys,
            values,
            scale=scale,
            mask=view.mask,
            window=view.window,
            softcap=softcap,
            sinks=sinks,
            want_weights=want_weights,
        )
    raise UnsupportedError(f"the cache returned {type(keys).__name__}, which native models can't read")

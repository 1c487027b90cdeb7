"""What generate() returns for a transformers object, in transformers' own classes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from types import MappingProxyType
from typing import Any, Final

import torch

from unspool.cache import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from unspool.models.adapters.adapted import AdaptedModel
from unspool.models.adapters.columns.held import mark_beams
from unspool.models.adapters.columns.state import ColumnCache
from unspool.models.adapters.twin import find_copies, find_turned
from unspool.outputs import GenerateOutput

NOTHING: Final[Mapping[int, tuple[int, int]]] = MappingProxyType({})
_PLAIN = (DynamicCache, StaticCache)


def dress_output(output: GenerateOutput, core: Any, mask: torch.Tensor | None) -> Any:
    """An output as transformers' class of the same name, with transformers' cache; `stats` and the like beside it.

    `core` is the model that ran; `mask` (rows, columns) says which of the columns that the caller gave are real, None
    if all of them are.
    """
    import transformers.generation as theirs

    kind = getattr(theirs, type(output).__name__)
    own = {field.name for field in fields(kind)}
    values = {field.name: getattr(output, field.name) for field in fields(output)}
    widths = core.description.widths if isinstance(core, AdaptedModel) else {}
    past = values.get("past_key_values")
    values["past_key_values"] = dress_cache(past, mask, find_turned(core), widths, find_copies(core))
    if isinstance(past, Cache) and past.beams_left is not None:
        mark_beams(values["past_key_values"])
    made = kind(**{name: value for name, value in values.items() if name in own})
    for name, value in values.items():
        if name not in own:
            object.__setattr__(made, name, value)
    object.__setattr__(made, "speculation", output.speculation)
    return made


def dress_cache(
    cache: Any,
    mask: torch.Tensor | None,
    turned: int | None = None,
    widths: Mapping[int, tuple[int, int]] = NOTHING,
    copies: int = 1,
) -> Any:
    """A cache as transformers' own code goes on with it: keys in columns; other kinds than plain ones as they are.

    `widths` has those of keys and values for layers in which they differ; every head comes `copies` times.
    """
    if isinstance(cache, ColumnCache):
        cache.close_gaps()
        cache.leave_out_ahead()
        return cache.past
    if isinstance(cache, EncoderDecoderCache) and type(cache) is EncoderDecoderCache:
        from transformers.cache_utils import EncoderDecoderCache as TheirPair

        if type(cache.self_attention_cache) not in _PLAIN or type(cache.cross_attention_cache) not in _PLAIN:
            return cache
        own = _copy_keys(cache.self_attention_cache, None)
        source = _copy_keys(cache.cross_attention_cache, None, is_source=True)
        made = TheirPair(own, source)
        made.is_updated = dict.fromkeys(range(len(source)), True)
        return made
    return _copy_keys(cache, mask, turned=turned, widths=widths, copies=copies) if type(cache) in _PLAIN else cache


def _copy_keys(
    cache: Cache,
    mask: torch.Tensor | None,
    *,
    is_source: bool = False,
    turned: int | None = None,
    widths: Mapping[int, tuple[int, int]] = NOTHING,
    copies: int = 1,
) -> Any:
    from transformers.cache_utils import DynamicCache as TheirCache

    made = TheirCache()
    lengths = cache.lengths
    if not lengths or not max(lengths):
        return made
    columns = None if is_source else _find_columns(lengths, mask)  # a source stays right-filled
    for layer in range(len(cache)):
        keys, values = cache[layer]
        keys = keys if turned is None else _part(keys, turned)
        if layer in widths:
            keys, values = keys[..., : widths[layer][0]], values[..., : widths[layer][1]]
        if copies > 1:
            keys, values = (part.repeat_interleave(copies, dim=1) for part in (keys, values))
        made.update(_place(keys, columns), _place(values, columns), layer)
    return made


def _find_columns(lengths: list[int], mask: torch.Tensor | None) -> torch.Tensor | None:
    """Which position stands in every column (rows, columns), -1 for none; None if each stands in its own."""
    if mask is None or bool(mask.all()):
        if len(set(lengths)) == 1:
            return None
        mask = torch.ones(len(lengths), 0, dtype=torch.bool) if mask is None else mask
    rows = len(lengths)
    if mask.shape[0] != rows:
        mask = mask.repeat_interleave(rows // mask.shape[0], dim=0)
    new = [length - int(count) for length, count in zip(lengths, mask.sum(dim=-1).tolist(), strict=True)]
    width = max(new)
    tail = torch.arange(width)[None] < torch.tensor(new)[:, None]
    whole = torch.cat((mask.cpu(), tail), dim=1)
    return torch.where(whole, whole.long().cumsum(dim=-1) - 1, -1)


def _part(keys: torch.Tensor, width: int) -> torch.Tensor:
    """Keys whose rotary pairs are neighbours, with the pairs' halves one after the other."""
    halves = keys[..., :width].reshape(*keys.shape[:-1], width // 2, 2).transpose(-1, -2).flatten(-2)
    return torch.cat((halves, keys[..., width:]), dim=-1)


def _place(keys: torch.Tensor, columns: torch.Tensor | None) -> torch.Tensor:
    """Keys (rows, heads, positions, width) at their columns, zeros elsewhere."""
    if columns is None:
        return keys
    columns = columns.to(keys.device)
    index = columns.clamp(min=0)[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])
    return keys.gather(2, index).masked_fill((columns < 0)[:, None, :, None], 0.0)

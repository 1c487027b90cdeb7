"""How much a cache of transformers' that keeps states has read, written down in the cache itself: states don't say it.

Other code may read on with the cache, as transformers' own generate() does. Layers that count show how far it came;
where none does, a copy of some of the states shows that it happened.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch

from unspool.cache import BEAMS_LEFT
from unspool.errors import SettingError, UnsupportedError
from unspool.models.adapters.columns.inner import Inner

_PLACE = "_unspool_held"  # attribute of a cache
_BEAMS = "_unspool_beams"  # another


@dataclass(frozen=True, slots=True)
class _Held:
    """What a cache held when it was read last."""

    num_read: int  # columns
    inner: Inner  # what modules kept
    counted: int  # what its layers said
    sample: torch.Tensor | None  # a copy of the last layer's smallest states, if no layer counts


def mark_held(past: Any, num_read: int, inner: Inner) -> None:
    """Write down in a cache how many columns it has read, in case it can't say so itself, and what modules keep."""
    if hasattr(past, "__dict__"):
        counted, sample = _count_keys(past), None
        if not counted:
            found = _find_sample(past)
            sample = None if found is None else found.clone()
        setattr(past, _PLACE, _Held(num_read, inner, counted, sample))


def move_held(before: Any, past: Any, inner: Inner, *, num_fewer: int = 0) -> None:
    """Write it down anew once the rows of a cache, or of the one that it was made of, have moved, or lost columns."""
    known = _find(before)
    if known is not None:
        mark_held(past, known.num_read - num_fewer, inner)


def find_inner(past: Any) -> Inner | None:
    """What modules kept when a cache was read last; None if it was not written down, or other code has read on."""
    known = _find(past)
    return None if known is None or _has_moved(known, past) else known.inner


def count_held(past: Any) -> int:
    """The columns that a cache of transformers holds.

    Its first layer may keep states, which know nothing of it or say 0: then what was written down counts, and what
    other layers have read since.
    """
    count = getattr(past, "get_seq_length", None)
    if count is None:
        return 0
    known = _find(past)
    if known is not None and (known.counted or not _has_moved(known, past)):
        return known.num_read + _count_keys(past) - known.counted
    try:
        return int(count())
    except ValueError as error:
        since = "" if known is None else " since other code has read on with it"
        raise UnsupportedError(
            f"the {type(past).__name__} that was given holds states alone, which do not say how many tokens they "
            f"have read{since}; pass the text without it, or the cache that unspool's generate() returned"
        ) from error


def mark_beams(past: Any) -> None:
    """Write down in a cache of transformers that its rows are the beams that a search left."""
    if (keys := _find_keys(past)) is not None:
        setattr(past, _BEAMS, weakref.ref(keys))


def check_rows(past: Any, rows: int) -> None:
    """Raise for a cache of transformers that holds other rows than the prompt's; reordering makes new keys."""
    keys = _find_keys(past)
    if keys is None or not count_held(past):
        return
    left: weakref.ref[torch.Tensor] | None = getattr(past, _BEAMS, None)
    if left is not None and left() is keys:
        raise SettingError(BEAMS_LEFT)
    if len(keys) != rows:
        raise SettingError(
            f"past_key_values hold {len(keys)} rows and the prompt has {rows}; give the rows that they were filled "
            "with, or select some with cache.batch_select_indices(…)"
        )


def _find_keys(past: Any) -> torch.Tensor | None:
    """The keys of the first layer that has any."""
    layers = getattr(getattr(past, "self_attention_cache", past), "layers", ())
    found = (getattr(layer, "keys", None) for layer in layers)
    return next((keys for keys in found if isinstance(keys, torch.Tensor) and keys.dim() == 4), None)


def list_tensors(value: Any) -> list[torch.Tensor]:
    """The tensors in lists, tuples and dicts."""
    if isinstance(value, torch.Tensor):
        return [value]
    parts = value.values() if type(value) is dict else value if isinstance(value, list | tuple) else ()
    return [tensor for part in parts for tensor in list_tensors(part)]


def _find(past: Any) -> _Held | None:
    known: _Held | None = getattr(past, _PLACE, None)
    return known


def _has_moved(known: _Held, past: Any) -> bool:
    """Whether other code has read on with a cache."""
    if _count_keys(past) != known.counted:
        return True
    if known.sample is None:
        return False
    found = _find_sample(past)
    return found is None or not torch.equal(found.cpu(), known.sample.cpu())


def _count_keys(past: Any) -> int:
    """The columns that a layer with keys holds, the first that holds any; 0 if there is none."""
    layers = (layer for layer in getattr(past, "layers", ()) if hasattr(layer, "get_seq_length"))
    return next((count for layer in layers if (count := int(layer.get_seq_length()))), 0)


def _find_sample(past: Any) -> torch.Tensor | None:
    """The smallest states of the last layer, which follow from all that was read."""
    for holder in (*reversed(getattr(past, "layers", ())), past):
        found = [tensor for tensor in list_tensors(vars(holder)) if tensor.is_floating_point()]
        if found:
            return min(found, key=torch.Tensor.numel)
    return None

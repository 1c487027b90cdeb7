"""Both parts of an encoder-decoder's cache behind the reference's surface."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, Self

import torch

from unspool.cache.base import Cache
from unspool.cache.dynamic import DynamicCache
from unspool.cache.write_log import WriteLog

LegacyPair = tuple[tuple[torch.Tensor, ...], ...]


class PairSurface(Cache):
    """What code written for the reference asks of a pair of caches."""

    def __init__(self, self_attention_cache: Cache, cross_attention_cache: Cache, *, num_branches: int = 1) -> None:
        self.self_attention_cache = self_attention_cache
        self.cross_attention_cache = cross_attention_cache
        cross = cross_attention_cache
        self.is_updated = {layer: cross.get_seq_length(layer) > 0 for layer in range(len(cross))}
        self.num_branches = num_branches  # rows that read one row of the cross-attention cache
        self._log: WriteLog | None = None  # of the decoder's positions, once there are beams
        self._span = None

    @abstractmethod
    def _unshare(self) -> None:
        """Give every row a copy of its source."""

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        cache_kwargs: dict[str, Any] | None = None,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._log = None
        return self.self_attention_cache.update(key_states, value_states, layer_idx, cache_kwargs)

    def reset(self) -> None:
        """Forget both parts, where their kinds can."""
        self._log = None
        for part in (self.self_attention_cache, self.cross_attention_cache):
            if hasattr(part, "reset"):
                part.reset()
        self.is_updated = dict.fromkeys(self.is_updated, False)

    def __getitem__(self, layer_idx: int) -> tuple[torch.Tensor, ...]:  # type: ignore[override]  # own, then cross
        own, cross = self.check_dynamic_cache("indexing")
        return (*own[layer_idx], *(cross[layer_idx] if layer_idx < len(cross) else ()))

    def to_legacy_cache(self) -> LegacyPair:
        """(keys, values, cross keys, cross values), one tuple per layer."""
        for part in self.check_dynamic_cache("to_legacy_cache"):
            part.require_one_length()
        return tuple(self)

    @classmethod
    def from_legacy_cache(cls, past_key_values: LegacyPair | None = None) -> Self:
        """A pair of dynamic caches holding what `to_legacy_cache` gave."""
        layers = past_key_values or ()
        own = DynamicCache((layer[0], layer[1]) for layer in layers)
        cross = DynamicCache((layer[2], layer[3]) for layer in layers if len(layer) > 2)
        return cls(own, cross)

    def check_dynamic_cache(self, method: str) -> tuple[DynamicCache, DynamicCache]:
        """Both parts, if they are dynamic; otherwise an error that names the method."""
        own, cross = self.self_attention_cache, self.cross_attention_cache
        if not isinstance(own, DynamicCache) or not isinstance(cross, DynamicCache):
            kinds = f"{type(own).__name__} and {type(cross).__name__}"
            raise ValueError(f"{method} needs two dynamic caches, and these are {kinds}")
        self._log = None
        if self.num_branches > 1:  # the reference's surface moves both parts alike
            self._unshare()
        return own, cross

    def crop(self, maximum_length: int) -> None:
        """Keep the decoder's first positions."""
        self.check_dynamic_cache("crop")[0].crop(maximum_length)

    def batch_split(self, full_batch_size: int, split_size: int) -> list[Self]:
        """One pair for every `split_size` rows."""
        own, cross = (part.batch_split(full_batch_size, split_size) for part in self.check_dynamic_cache("batch_split"))
        return [type(self)(*pair) for pair in zip(own, cross, strict=True)]

    @classmethod
    def from_batch_splits(cls, splits: Sequence[Self]) -> Self:
        """One pair with the rows of all the given ones."""
        pairs = [split.check_dynamic_cache("from_batch_splits") for split in splits]
        return cls(
            DynamicCache.from_batch_splits([own for own, _ in pairs]),
            DynamicCache.from_batch_splits([cross for _, cross in pairs]),
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every row of both parts."""
        for part in self.check_dynamic_cache("batch_repeat_interleave"):
            part.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep only the given rows of both parts."""
        for part in self.check_dynamic_cache("batch_select_indices"):
            part.batch_select_indices(indices)

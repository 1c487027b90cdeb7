"""The cache object that a transformers model gets during one pass. It stores nothing: `AdapterPass` does."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch

from unspool.models.adapters.passes import AdapterPass, Harvest


class PassKeys:
    """The cache interface of transformers, implemented by the pass. With a 4-D mask, models call only `update`."""

    is_compileable = False
    is_sliding: tuple[bool, ...] = ()  # we give the masks, or all keys are present

    def __init__(self, pass_: AdapterPass) -> None:
        self._pass = pass_

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keep a layer's new keys and values (rows, heads, new, width); return all of them."""
        return self._pass.update(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int | None = 0) -> int:  # all layers hold as much
        """Columns before this pass."""
        return self._pass.num_before

    def get_query_offset(self, layer_idx: int | None = 0) -> int:
        """The column of the pass's first query."""
        return self._pass.num_before

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """The number of columns of a mask, and the index of the first."""
        return self._pass.num_columns, 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """The most positions: unbounded."""
        return -1

    get_max_length = get_max_cache_shape

    @property
    def is_initialized(self) -> bool:
        """Whether something was read before this pass."""
        return self._pass.num_before > 0

    def __len__(self) -> int:
        return max(1, self._pass.num_written)


class SourceKeys:
    """The cross-attention side of a pair: keys that exist already, or, before that, a `Harvest` that collects them."""

    is_compileable = False

    def __init__(self, pass_: AdapterPass, source: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> None:
        self._pass = pass_
        self.layers = [SimpleNamespace(keys=keys, values=values) for _, (keys, values) in sorted(source.items())]
        self.key_cache = [layer.keys for layer in self.layers]  # for releases before 4.54
        self.value_cache = [layer.values for layer in self.layers]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's keys of the encoder's states, which are computed once."""
        if not isinstance(self._pass, Harvest) or layer_idx != len(self._pass.source):
            raise RuntimeError(f"cross-attention of layer {layer_idx} computed keys that the cache holds already")
        self._pass.take_source(key_states, value_states)
        return key_states, value_states

    def get_seq_length(self, layer_idx: int | None = 0) -> int:
        """Positions of the encoder's states."""
        return self.layers[layer_idx or 0].keys.shape[2] if self.layers else 0

    def __len__(self) -> int:
        return len(self.layers)


class PairKeys:
    """Both sides, in the interface of transformers' encoder-decoder cache."""

    is_compileable = False
    is_sliding: tuple[bool, ...] = ()

    def __init__(self, own: PassKeys, source: SourceKeys) -> None:
        self.self_attention_cache = own
        self.cross_attention_cache = source
        self.is_updated = dict.fromkeys(range(len(source)), True)

    def get_seq_length(self, layer_idx: int | None = 0) -> int:
        """Columns of the decoder before this pass."""
        return self.self_attention_cache.get_seq_length(layer_idx)

    def get_query_offset(self, layer_idx: int | None = 0) -> int:
        """The column of the pass's first query."""
        return self.self_attention_cache.get_query_offset(layer_idx)

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:
        """The number of columns of a mask, and the index of the first."""
        return self.self_attention_cache.get_mask_sizes(query_length, layer_idx)

    @property
    def is_initialized(self) -> bool:
        """Whether the decoder has read something before this pass."""
        return self.self_attention_cache.is_initialized

    def __len__(self) -> int:
        return len(self.self_attention_cache)


@lru_cache(maxsize=1)
def _find_classes() -> tuple[type[PassKeys], type[SourceKeys], type[PairKeys]]:
    """The three as subclasses of transformers' caches, for models that check the class."""
    from transformers.cache_utils import Cache, EncoderDecoderCache

    return (
        type("KeysOfPass", (PassKeys, Cache), {}),
        type("KeysOfSource", (SourceKeys, Cache), {}),
        type("KeysOfPair", (PairKeys, EncoderDecoderCache), {}),
    )


def make_keys(pass_: AdapterPass) -> PassKeys:
    """The cache object of a decoder for one pass."""
    return _find_classes()[0](pass_)


def make_pair_keys(pass_: AdapterPass, source: Mapping[int, tuple[torch.Tensor, torch.Tensor]]) -> PairKeys:
    """The cache object of an encoder-decoder for one pass; `source` has every layer's cross-attention keys."""
    own, cross, pair = _find_classes()
    return pair(own(pass_), cross(pass_, source))

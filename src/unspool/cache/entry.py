"""What a kind of cache says of itself, and what it must know of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch

from unspool.cache.base import Cache

Options = Mapping[str, Any]
"""What `cache_config` says, without the name of the kind."""


@dataclass(frozen=True, slots=True)
class KeyShape:
    """What a cache must know of the model whose keys and values it holds."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device
    layer_kinds: tuple[str, ...] = ()  # "full" or "sliding", one per layer; empty: all "full"
    window: int | None = None  # keys that a "sliding" layer sees
    config: Any = None  # the model's own, for kinds that hold something else than keys
    layer_devices: tuple[torch.device, ...] = ()  # where each layer lies; empty: all on the device

    def as_config(self) -> SimpleNamespace:
        """The same under the names that model configs use."""
        sizes = {
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_kv_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "hidden_size": self.num_kv_heads * self.head_dim,
            "sliding_window": self.window,
            "layer_types": [f"{kind}_attention" for kind in self.layer_kinds],
        }
        return SimpleNamespace(**{**(vars(self.config) if self.config is not None else {}), **sizes})


@dataclass(frozen=True)
class CacheKindEntry:
    """One kind of cache: what it needs, and how it is made."""

    table: ClassVar[str] = "unspool.cache.kinds:KINDS"

    name: str  # what `cache_implementation` takes
    make: Callable[[KeyShape, int, int | None, Options], Cache]  # shape, rows, capacity, options
    types: tuple[type[Cache], ...] = ()  # what it makes, if files may hold it: these have `_pack` and `_unpack`
    options: tuple[str, ...] = ()  # the keys of `cache_config` that it reads
    is_sized: bool = False  # takes all its memory at once, for every row and position that a call may need
    may_be_sized: bool = False  # does so if it is given `max_cache_len`, and grows otherwise
    is_endless: bool = False  # holds what it holds however long a text gets, so that no context ends it
    holds_every_key: bool = True  # each position's own keys are held, so attention weights can be returned by position
    forks: bool = False  # candidates for a row's next token can be read over the row's own keys
    divides: bool = False  # a pass can run over some of the rows at a time
    is_plain: bool = False  # keys lie in one buffer per layer, which a compiled step can read
    check: Callable[[Options], None] | None = None  # raises for values of options that can't be
    count_room: Callable[[Options], int | None] | None = None  # positions that all rows together have room for
    refuse: Callable[[Any], str | None] | None = None  # why a model (its `info`) can't be served, or None

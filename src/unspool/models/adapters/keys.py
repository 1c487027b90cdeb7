"""The object that a transformers model takes for its cache during one pass. It keeps nothing: `Pass` does."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from unspool.models.adapters.passes import Pass


class PassKeys:
    """What models ask of a cache, answered by the pass. `update` is all they need where they are given a 4-D mask."""

    is_compileable = False
    is_sliding: tuple[bool, ...] = ()  # masks are told by us, or made for keys that are all there

    def __init__(self, told: Pass) -> None:
        self._pass = told

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

    def get_seq_length(self, layer_idx: int | None = 0) -> int:  # noqa: ARG002 - all layers hold as much
        """Columns before this pass."""
        return self._pass.num_before

    def get_query_offset(self, layer_idx: int | None = 0) -> int:  # noqa: ARG002
        """The column of the pass's first query."""
        return self._pass.num_before

    def get_mask_sizes(self, query_length: Any, layer_idx: int = 0) -> tuple[int, int]:  # noqa: ARG002
        """How many columns a mask has, and the first one's number."""
        return self._pass.num_columns, 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:  # noqa: ARG002
        """The most positions: there is no bound."""
        return -1

    get_max_length = get_max_cache_shape

    def __len__(self) -> int:
        return max(1, self._pass.num_written)


@lru_cache(maxsize=1)
def _find_class() -> type[PassKeys]:
    """`PassKeys` as a kind of transformers' Cache, for models that ask for one by its class."""
    from transformers.cache_utils import Cache

    return type("KeysOfPass", (PassKeys, Cache), {})


def make_keys(told: Pass) -> PassKeys:
    """The cache that a model is handed for one pass."""
    return _find_class()(told)

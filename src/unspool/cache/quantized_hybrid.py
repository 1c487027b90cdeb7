"""Quantised caches by layer: packed windows in sliding layers, every position packed in the others."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Final, Self

import torch

from unspool.cache.base import FIXED_SHAPE, JOIN, RAGGED, SELECT_ROWS, TRIAL
from unspool.cache.offload.linked import take_linked
from unspool.cache.places import Landing, PackedPlaces
from unspool.cache.quantized import QuantizedCache
from unspool.cache.quantized_static import TRIAL_ROOM, QuantizedStaticCache
from unspool.cache.sizes import find_layer_misfit, read_kinds, read_window
from unspool.cache.span import Mask, Span
from unspool.cache.stores.memory import Allocate
from unspool.cache.stores.packed_window import PackedWindowStore
from unspool.cache.stores.quantized_config import QuantizedCacheConfig
from unspool.errors import SettingError
from unspool.kernels.packed import PackedView

_SHARE: Final = 4  # a window has room for this part of itself more, so that it does not slide at every block


class QuantizedHybridCache(QuantizedStaticCache):
    """A quantised cache for models some of whose layers slide (Gemma 2 and 3), or all (Mistral).

    Memory is taken once, by `allocate` where one is given: all layers can lie in mapped files.
    """

    can = frozenset({TRIAL, SELECT_ROWS, RAGGED, FIXED_SHAPE, JOIN})

    def __init__(
        self,
        cache_config: QuantizedCacheConfig,
        config: Any,
        max_batch_size: int,
        max_cache_len: int,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        *,
        allocate: Allocate | None = None,
    ) -> None:
        self.kinds = tuple(read_kinds(config))
        window = read_window(config)
        if window is None and "sliding" in self.kinds:
            raise SettingError("the config names sliding layers and no sliding_window")
        self.window = window if window is not None else max_cache_len
        self._allocate = allocate
        self._near: PackedView | None = None  # what queries of sliding layers look through
        self._told_bases: tuple[list[int], torch.Tensor] | None = None
        super().__init__(cache_config, config, max_batch_size, max_cache_len, device, dtype)

    @property
    def room(self) -> int | None:
        """The most positions that a row can get; None where every layer slides."""
        return self.max_cache_len if "full" in self.kinds else None

    def _add_store(self, layer: int, kv: torch.Tensor) -> None:
        super()._add_store(layer, kv)
        if self.kinds[layer] == "sliding":
            plain = self._stores[layer]
            schemes = (plain.keys.scheme, plain.values.scheme)
            self._stores[layer] = PackedWindowStore(
                schemes, self._fit, self.residual_length, self._find_window_places(), plain.recent, self.window
            )
        self._house(layer)

    def _find_sliding(self) -> list[bool] | None:
        return [kind == "sliding" for kind in self.kinds] if "sliding" in self.kinds else None

    def _find_bases(self) -> list[int] | None:
        window = self._find_window_store()
        return None if window is None else list(window.bases)

    @property
    def longest_stretch(self) -> int | None:
        return 0 if "sliding" in self.kinds else super().longest_stretch  # a window packs where each pass ends

    def _make_landing(self, packed: PackedPlaces) -> Landing | None:
        if not self._is_linked:
            return None
        first, second = (tuple(map(torch.zeros_like, packed.layers[0])) for _ in range(2))
        return Landing(tuple(range(len(packed.layers))), packed.layers, (first, second))

    def _settle_steps(self) -> None:
        if "sliding" not in self.kinds:  # nothing is left behind where no step is captured
            super()._settle_steps()

    def _find_window_places(self) -> int:
        """Packed positions that a window needs: those in view, those that a trial may leave, and some to slide in."""
        slack = max(TRIAL_ROOM + self.q_group_size, self.window // _SHARE)
        in_view = self._round_up(max(0, self.window - self.residual_length)) + self.q_group_size
        most = in_view + self._round_up(slack)
        return min(most, self._places) if "full" in self.kinds else most

    @property
    def _is_linked(self) -> bool:
        """Whether packed positions lie in the host's memory, beside the GPU that reads them."""
        return self._allocate is take_linked

    def _house(self, layer: int) -> None:
        """Move a layer into the memory that was asked for; what is not packed, and little, stays beside a GPU."""
        allocate = self._allocate
        if allocate is not None:
            self._stores[layer].move(
                lambda held: allocate(tuple(held.shape), held.dtype, held.device).copy_(held) if held.numel() else held,
                with_recent=not self._is_linked,
            )

    def _find_window_store(self) -> PackedWindowStore | None:
        """One of the sliding layers: they all let go alike."""
        return next((store for store in self._stores if isinstance(store, PackedWindowStore)), None)

    # --- a forward pass ------------------------------------------------------------------------------
    def _look(self, span: Span) -> None:
        super()._look(span)
        self._near = None
        store = self._find_window_store()
        if store is None or self._view is None:
            return
        bases = self._tell_bases(store.bases, span.positions.device)
        is_fixed = self._columns is not None
        self._near = PackedView(
            list(store.num_packed),
            self._view.counts - bases,
            span.positions - bases[:, None],
            store.keys.num_positions if is_fixed else max(store.num_packed),
        )

    def _tell_bases(self, bases: list[int], device: torch.device) -> torch.Tensor:
        """The rows' bases on the device: (rows,) int32. They change when a window slides, not once a step."""
        if self._told_bases is None or self._told_bases[0] != bases or self._told_bases[1].device != device:
            self._told_bases = (list(bases), torch.tensor(bases, dtype=torch.int32, device=device))
        return self._told_bases[1]

    def _view_of(self, layer: int) -> PackedView | None:
        return self._near if self.kinds[layer] == "sliding" else self._view

    def _reserve(self, stop: int) -> None:
        super()._reserve(stop if self.room is not None else min(stop, self.max_cache_len))
        if self.room is None:
            self._check_trial(stop)

    # --- what is in view -----------------------------------------------------------------------------
    def stands_in_order(self, window: int | None) -> bool:
        return window is None or self._near is None

    def mask(self, span: Span, window: int | None = None) -> Mask:
        """For sliding layers, by the rows' own indices."""
        if window is None or self._near is None:
            return super().mask(span, window)
        queries = self._near.positions[:, None, :, None]
        keys = torch.arange(self._count_kept(), device=queries.device)
        return (keys <= queries) & (keys > queries - window)

    def key_positions(self, span: Span, window: int | None = None) -> torch.Tensor:
        if window is None or self._near is None:
            return super().key_positions(span, window)
        bases = span.positions[:, :1] - self._near.positions[:, :1]
        return bases + torch.arange(self._count_kept(), device=bases.device)

    def _count_kept(self) -> int:
        """Keys in view of sliding layers, of the row that has the most."""
        span, store = self._require_span(), self._find_window_store()
        assert store is not None
        return max(start - base for start, base in zip(span.starts, store.bases, strict=True)) + span.num_new

    # --- rows ----------------------------------------------------------------------------------------
    def truncate(self, lengths: Sequence[int]) -> None:
        self._check_lengths(lengths)
        store = self._find_window_store()
        if store is not None:
            store.check_truncation(lengths)
        self.lengths = list(lengths)
        self._roll_stores_back()

    def _join(self, other: QuantizedCache) -> None:
        assert isinstance(other, QuantizedHybridCache)
        if (other.kinds, other.window) != (self.kinds, self.window):
            raise SettingError(f"rows of windows of {other.window} positions can't join those of {self.window}")
        rooms = [[store.keys.num_positions for store in cache._stores] for cache in (self, other)]
        if self.room is None and rooms[0] != rooms[1]:
            raise SettingError(f"rows of max_cache_len={other.max_cache_len} can't join those of {self.max_cache_len}")
        super()._join(other)

    # --- copies and files ----------------------------------------------------------------------------
    def clone(self) -> Self:
        copied = super().clone()
        for layer in range(len(copied._stores)):
            copied._house(layer)
        return copied

    def find_misfit(self, shape: Any) -> str | None:
        return find_layer_misfit(self.kinds, self.window, shape) or super().find_misfit(shape)

    def _pack(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        facts, tensors = super()._pack()
        return {**facts, "kinds": list(self.kinds), "window": self.window}, tensors

    @classmethod
    def _make_like(
        cls,
        config: QuantizedCacheConfig,
        facts: dict[str, Any],
        recent: list[torch.Tensor],
        tensors: dict[str, torch.Tensor],
    ) -> Self:
        rows, _, _, heads, width = recent[0].shape
        kinds, window, room = list(facts["kinds"]), int(facts["window"]), int(facts["max_cache_len"])
        if len(kinds) != len(recent) or not set(kinds) <= {"full", "sliding"} or not 0 < window <= 2**24:
            raise ValueError(f"{len(recent)} layers of kinds {kinds[:8]} with a window of {window}")
        # Nothing is taken that the file does not hold: every layer must have the room that it says.
        for layer, kind in enumerate(kinds):
            most = tensors[f"{layer}.0"].shape[2] + config.residual_length
            if (room if kind == "full" else min(window, room if "full" in kinds else window)) > most:
                raise ValueError(f"layer {layer} does not hold what max_cache_len={room} and its window say")
        sizes = SimpleNamespace(
            num_hidden_layers=len(kinds),
            num_attention_heads=heads,
            head_dim=width,
            sliding_window=window,
            layer_types=[f"{kind}_attention" for kind in kinds],
        )
        return cls(config, sizes, rows, room, recent[0].device, recent[0].dtype)

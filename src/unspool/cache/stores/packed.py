"""Keys and values in few bits: layers of packed blocks and recent positions (KIVI, Liu et al., 2024).

A block is `q_group_size` positions. It is packed when at least `residual_length` positions come after it, once the
pass that wrote them has ended: so a pass sees its own tokens as they are, and nothing is packed during a trial.
Rolling back into a packed block unpacks what stays of it; packed again, a number may be off by another half step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from unspool.cache.places import Places
from unspool.cache.span import Mask, Span, see_positions
from unspool.cache.stores.memory import KeyFormat, Room, split, take_memory
from unspool.cache.stores.packed_layer import LayerBlocks, pack_recent
from unspool.cache.stores.packed_pass import NearView, PassView, SentNumbers
from unspool.cache.stores.packed_places import KnownPlaces
from unspool.cache.stores.packed_window import WindowBlocks
from unspool.cache.stores.quantization import QuantizedCacheConfig
from unspool.cache.stores.store import Store
from unspool.errors import SettingError
from unspool.kernels.packed_keys import PackedView
from unspool.kernels.packing import Fit

STEP_ROOM: Final = 16  # new positions that a step may bring without a detour
TRIAL_ROOM: Final = 64  # the same for memory that is taken once and can't grow during a trial
_CHUNK: Final = 256  # positions by which packed buffers grow, at least
_SHARE: Final = 32  # … or this part of what they hold, so that long texts do not copy them ever again
_WINDOW_SHARE: Final = 4  # a window has room for this part of itself more, so that it does not slide at every block


class PackedStore(Store):
    """Layers that pack what is no longer recent; those with a window let go of blocks that are out of view."""

    is_trying: bool = False

    def __init__(
        self,
        config: QuantizedCacheConfig,
        fit: Fit,
        room: Room,
        windows: Sequence[int | None] = (),  # one per layer; empty: no layer has one
        *,
        is_linked: bool = False,  # packed blocks lie in the host's memory, beside the GPU that reads them
    ) -> None:
        self.config, self.room, self.windows, self.is_linked = config, room, tuple(windows), is_linked
        self._fit, self._block = fit, config.q_group_size
        self.num_places = self._round_up(max(0, room.positions - config.residual_length))
        self.num_slots = config.residual_length + self._block + (TRIAL_ROOM if room.is_fixed else STEP_ROOM)
        self.layers: list[LayerBlocks] = []
        self._pass: PassView | None = None  # None while nothing is packed
        self._counts, self._bases = SentNumbers(room.rows), SentNumbers(room.rows)
        self._places = KnownPlaces(is_linked=is_linked)

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def add_layer(self, layer: int, rows: int, keys: KeyFormat) -> None:
        if not self._check_order(layer):
            return
        if torch.device(self.config.device).type not in ("cpu", keys.device.type):
            raise SettingError(
                f"the cache was made for device={self.config.device!r} and the keys are on {keys.device}; leave out "
                "`device`, blocks are packed where the keys are"
            )
        shape = (self.room.rows or rows, self.num_slots, 2, keys.heads, keys.width)
        recent, take = self._take_recent(shape, keys.dtype, keys.device), self.room.take
        common = (self.config.make_schemes(keys.width), self._fit, self.config.residual_length)
        window = self._find_window(layer)
        if window is None:
            self.layers.append(LayerBlocks(*common, self.num_places, recent, take))
        else:
            self.layers.append(WindowBlocks(*common, self._count_window_places(window), recent, take, window))

    def _take_recent(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for what is not packed: little, so that it stays beside a GPU."""
        return (take_memory if self.is_linked else self.room.take)(shape, dtype, device)

    def _find_window(self, layer: int) -> int | None:
        return self.windows[layer] if self.windows else None

    def _count_window_places(self, window: int) -> int:
        """Packed positions that a window needs: those in view, those that a trial may leave, and some to slide in."""
        in_view = self._round_up(max(0, window - self.config.residual_length)) + self._block
        most = in_view + self._round_up(max(TRIAL_ROOM + self._block, window // _WINDOW_SHARE))
        return min(most, self.num_places) if None in self.windows else most

    def _round_up(self, positions: int) -> int:
        return -(-positions // self._block) * self._block

    @property
    def _slider(self) -> WindowBlocks | None:
        """One of the layers with a window: they all let go alike."""
        return next((layer for layer in self.layers if isinstance(layer, WindowBlocks)), None)

    # --- a pass --------------------------------------------------------------------------------------
    def open(self, rows: int) -> None:
        if not self.room.is_fixed:
            self.layers = []  # their memory is for another number of rows
        for layer in self.layers:
            layer.restart(rows)

    def reserve(self, starts: Sequence[int], stops: Sequence[int], stop: int) -> None:
        self.catch_up(starts)
        recent = 0
        if self.is_trying and self.layers:  # nothing is packed, so everything new is recent
            recent = self._count_recent(starts, stop)
        if self.room.is_fixed:
            if recent > self.num_slots:
                raise SettingError(
                    f"a trial up to position {stop} does not fit the {self.num_slots} positions that a quantised "
                    "static cache keeps unpacked; draft fewer tokens, or use cache_implementation='quantized'"
                )
            return
        places = max(0, stop - self.config.residual_length) // self._block * self._block
        if places > self.num_places:
            self._places.forget()
            more = max(_CHUNK, self.num_places // _SHARE)
            self.num_places = self._round_up(max(places, self.num_places + more))
        for layer in self.layers:
            layer.reserve(self.num_places, max(self.num_slots, recent))

    def _count_recent(self, starts: Sequence[int], stop: int) -> int:
        """What is not packed once a pass up to `stop` has been written, of the row that has the most of it."""
        held = max(start - first for start, first in zip(starts, self.layers[0].first_recent, strict=True))
        return held + stop - max(starts)

    def begin(self, span: Span) -> None:
        for layer in self.layers:
            layer.forget_pass()
        self._pass = None
        if not self.layers:
            return
        packed, device = self.layers[0].first_recent, span.positions.device
        # Fixed buffers are read whole by every step; a prompt that is longer than those takes the detour.
        is_whole = self.room.is_fixed and self._count_recent(span.starts, span.stop) <= self.num_slots
        if not is_whole and not any(packed):
            return
        counts = self._counts.send(packed, device)
        view = PackedView(list(packed), counts, span.positions, self.num_places if is_whole else max(packed))
        near = None
        if (slider := self._slider) is not None:
            bases = self._bases.send(slider.bases, device)
            num_places = slider.keys.num_positions if is_whole else max(slider.num_packed)
            positions = span.positions - bases[:, None]
            near = NearView(
                PackedView(list(slider.num_packed), counts - bases, positions, num_places), list(slider.bases)
            )
        self._pass = PassView(view, near, span.positions - counts[:, None] if is_whole else None)

    @property
    def sees_by_position(self) -> bool:
        return self._pass is not None

    def write(self, layer: int, span: Span, kv: torch.Tensor) -> tuple[Any, Any]:
        """Store keys and values; return both as `PackedKeys`, or as plain tensors while nothing is packed."""
        self._ensure_layer(layer, kv.shape[0], kv)
        held, seen = self.layers[layer], self._pass
        if seen is None:
            return split(held.write(span, kv))
        view = seen.view if self._find_window(layer) is None else seen.near_view
        recent = held.write(span, kv, seen.columns)
        return split(recent) if view is None else held.show(recent, view)

    def append(self, layer: int, span: Span, kv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a pass of one layer alone; return all its keys and values, what was packed before unpacked."""
        self._ensure_layer(layer, kv.shape[0], kv)
        held = self.layers[layer]
        read = _read_layer(held, held.write(span, kv), span.positions, span.stop)
        held.settle([span.stop] * len(span.starts))
        return read

    def end(self, lengths: Sequence[int]) -> None:
        if not self.is_trying and self.layers and self.layers[0].is_overdue(lengths):  # layers are alike
            for layer in self.layers:
                layer.settle(lengths)

    def catch_up(self, lengths: Sequence[int]) -> None:
        for layer in self.layers:
            layer.forget_pass()
        has_windows = self._slider is not None  # windows pack where each pass ends
        if lengths and self.layers and not self.is_trying and not has_windows:
            pack_recent(self.layers, lengths)

    def count_steps(self, lengths: Sequence[int]) -> int | None:
        if any(window is not None for window in self.windows):
            return 0  # a window packs where each pass ends
        if self.is_trying or not self.layers or not lengths:
            return STEP_ROOM
        return min(STEP_ROOM, self.layers[0].count_steps(lengths))

    # --- what is in view -----------------------------------------------------------------------------
    def is_in_order(self, window: int | None) -> bool:
        return self._find_near(window) is None

    def mask(self, span: Span, window: int | None) -> Mask:
        """For layers with a window, by the rows' own indices."""
        near = self._find_near(window)
        return see_positions(span, window) if near is None or window is None else near.mask(span, window)

    def key_positions(self, span: Span, window: int | None = None) -> torch.Tensor:
        near = self._find_near(window)
        return super().key_positions(span, window) if near is None else near.key_positions(span)

    def _find_near(self, window: int | None) -> NearView | None:
        return None if window is None or self._pass is None else self._pass.near

    # --- rows ----------------------------------------------------------------------------------------
    def select(self, index: Sequence[int], lengths: Sequence[int]) -> None:  # layers know themselves
        self._places.forget()
        for layer in self.layers:
            layer.select(index, is_fixed=self.room.is_fixed)

    def take_rows(self, index: Sequence[int], lengths: Sequence[int]) -> PackedStore:
        """Some rows, in memory of their own that grows."""
        self.catch_up(lengths)
        part = PackedStore(self.config, self._fit, Room(0, take=self.room.take), self.windows)
        part.num_places, part.num_slots = self.num_places, self.num_slots
        part.layers = [layer.take_rows(index) for layer in self.layers]
        return part

    def join(self, other: PackedStore, mine: Sequence[int], theirs: Sequence[int]) -> None:
        if other.config != self.config:
            raise SettingError("rows that are packed in another way can't join; make both caches with one cache_config")
        if other.windows != self.windows:
            raise SettingError(f"rows of windows {other.windows} can't join those of {self.windows}")
        if self.windows and None not in self.windows and self._list_rooms() != other._list_rooms():
            raise SettingError("rows of another max_cache_len can't join where every layer has a window")
        self.catch_up(mine)
        other.catch_up(theirs)
        self._places.forget()
        if not self.layers:
            taken = other.take_rows(range(len(theirs)), theirs)
            self.layers, self.num_places, self.num_slots = taken.layers, taken.num_places, taken.num_slots
            return
        if not self.room.is_fixed:
            self.num_places = max(self.num_places, other.num_places)
            slots = max(layer.recent.shape[1] for layer in (*self.layers, *other.layers))
            for layer in self.layers:
                layer.reserve(self.num_places, slots)
        for layer, given in zip(self.layers, other.layers, strict=True):
            layer.join(given, len(mine), len(theirs))

    def _list_rooms(self) -> list[int]:
        return [layer.keys.num_positions for layer in self.layers]

    def begin_trial(self, lengths: Sequence[int]) -> None:
        self.catch_up(lengths)
        self.is_trying = True

    def check_truncation(self, held: Sequence[int], lengths: Sequence[int]) -> None:
        if (slider := self._slider) is not None:
            slider.check_truncation(lengths)

    def truncate(self, lengths: Sequence[int]) -> None:
        self.is_trying = False
        for layer in self.layers:
            layer.truncate(lengths)
            layer.settle(lengths)  # what a trial kept back

    def clear(self) -> None:
        self.is_trying = False
        for layer in self.layers:
            for tensor in layer.tensors():
                tensor.zero_()
            layer.restart(0)

    def clone(self) -> PackedStore:
        made = PackedStore(self.config, self._fit, self.room, self.windows, is_linked=self.is_linked)
        made.num_places, made.num_slots, made.is_trying = self.num_places, self.num_slots, self.is_trying
        made.layers = [layer.clone(self._take_recent) for layer in self.layers]
        return made

    # --- memory --------------------------------------------------------------------------------------
    @property
    def nbytes(self) -> int:
        """Bytes of packed blocks, their scales, and recent positions."""
        return sum(layer.nbytes for layer in self.layers)

    def held(self) -> list[torch.Tensor]:
        return [layer.recent for layer in self.layers]

    def places(self) -> Places | None:
        return self._places.find(self.layers, self._slider, self.num_places) if self.layers else Places([])

    def read(self, layer: int, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        held = self.layers[layer]
        recent = held.recent[:rows, : length - min(held.first_recent, default=0)]
        return _read_layer(held, recent, torch.zeros(rows, 0, dtype=torch.int64, device=recent.device), length)

    # --- files ---------------------------------------------------------------------------------------
    def pack(self) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """What a file says of the layers, and their tensors."""
        facts = {
            "config": {**self.config.to_dict(), "compute_dtype": str(self.config.compute_dtype)},
            "num_packed": [layer.num_packed for layer in self.layers],
            "bases": [layer.bases for layer in self.layers],
            "num_layers": len(self.layers),
        }
        return facts, {
            f"{number}.{place}": tensor
            for number, layer in enumerate(self.layers)
            for place, tensor in enumerate(layer.tensors())
        }

    def unpack(self, facts: dict[str, Any], tensors: dict[str, torch.Tensor], lengths: Sequence[int]) -> None:
        """Take over what `pack` gave; a ValueError says what does not belong together."""
        recent = list_recent(facts, tensors)
        if recent and not self.room.is_fixed:
            self.num_places, self.num_slots = tensors["0.0"].shape[2], recent[0].shape[1]
            for number, kv in enumerate(recent):
                self._ensure_layer(number, kv.shape[0], kv)
        counts = zip(self.layers, facts["num_packed"], facts["bases"], strict=True)
        for number, (layer, packed, bases) in enumerate(counts):
            layer.fill([tensors[f"{number}.{place}"] for place in range(len(layer.tensors()))], packed, bases, lengths)


def list_recent(facts: dict[str, Any], tensors: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The recent positions that a file holds, one tensor per layer: the last of the layer's."""
    num_layers = facts["num_layers"]
    return [tensors[f"{layer}.{len(tensors) // num_layers - 1}"] for layer in range(num_layers)]


def _read_layer(
    layer: LayerBlocks, recent: torch.Tensor, positions: torch.Tensor, stop: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """All keys and values of a layer, unpacked."""
    counts = torch.tensor(layer.num_packed, dtype=torch.int32, device=recent.device)
    view = PackedView(list(layer.num_packed), counts, positions, max(layer.num_packed))
    keys, values = layer.show(recent, view)
    kept = stop - min(layer.bases)
    return keys.unpack(kept), values.unpack(kept)

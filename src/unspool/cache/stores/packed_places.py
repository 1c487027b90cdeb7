"""Where packed layers lie in memory, for passes that find keys by address."""

from __future__ import annotations

from collections.abc import Sequence
from operator import is_

import torch

from unspool.cache.places import Landing, PackedPlaces, Places
from unspool.cache.stores.packed_layer import LayerBlocks
from unspool.cache.stores.packed_window import WindowBlocks


class KnownPlaces:
    """The places of packed layers: the same object until anything has moved."""

    def __init__(self, *, is_linked: bool) -> None:
        self._is_linked = is_linked  # packed blocks lie in the host's memory, beside the GPU that reads them
        self._known: Places | None = None

    def forget(self) -> None:
        """Let go of memory that is about to be replaced."""
        self._known = None

    def find(self, layers: Sequence[LayerBlocks], slider: WindowBlocks | None, num_places: int) -> Places:
        """Where the layers lie; `slider` is one of those with a window, which all let go alike."""
        known = self._known
        counts, bases = layers[0].first_recent, None if slider is None else list(slider.bases)
        recent = [layer.recent for layer in layers]
        if (
            known is not None
            and known.packed is not None
            and known.packed.num_packed == counts
            and known.packed.bases == bases
            and all(map(is_, known.buffers, recent))
            and all(shown[0] is layer.keys.codes for shown, layer in zip(known.packed.layers, layers, strict=True))
        ):
            return known
        blocks: list[tuple[torch.Tensor, ...]] = [layer.tensors()[:-1] for layer in layers]
        schemes = (layers[0].keys.scheme, layers[0].values.scheme)
        sliding = None if slider is None else [isinstance(layer, WindowBlocks) for layer in layers]
        packed = PackedPlaces(blocks, schemes, num_places, list(counts), sliding, bases)
        landing = known.landing if known is not None else None
        if landing is None or any(home[0] is not layer[0] for home, layer in zip(landing.homes, blocks, strict=True)):
            landing = self._make_landing(blocks)
        self._known = Places(recent, packed=packed, landing=landing)
        return self._known

    def _make_landing(self, blocks: list[tuple[torch.Tensor, ...]]) -> Landing | None:
        """Where captured steps bring packed blocks before they read them; None if they read them as they lie."""
        if not self._is_linked:
            return None
        first, second = (tuple(map(torch.zeros_like, blocks[0])) for _ in range(2))
        return Landing(tuple(range(len(blocks))), blocks, (first, second))

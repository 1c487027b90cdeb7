"""Masks and rotary factors of a pass: computed once, used by all layers of a kind."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from unspool.cache import Cache, Span
from unspool.errors import UnsupportedError
from unspool.kernels.alibi import alibi_bias
from unspool.kernels.forked import fold_mask
from unspool.kernels.ragged import Ragged
from unspool.kernels.rotary import RotaryTable
from unspool.kernels.seats import ALONE, Seats
from unspool.models.decoder.ragged import can_read_rows
from unspool.models.decoder.spec import DecoderSpec, RopeSpec
from unspool.protocols import LayerKind

_FIRST_BIAS = 512  # initial size of the table of biases, in positions


@dataclass(slots=True)
class AttentionView:
    """What layers of one kind attend to in one pass: mask, window and rotary factors."""

    first_key: int  # keys before it are outside the window
    mask: torch.Tensor | None  # additive
    is_causal: bool
    factors: torch.Tensor | None  # (rows or 1, new, 1, pairs): rope
    window: int | None = None  # if attention masks by position itself, and there is no mask
    num_forks: int = 1  # rows of the pass that read the keys of one row
    ragged: Ragged | None = None  # the pass has only its real tokens: one row of them, with factors for each
    reads_rows: bool = False  # attention over ragged rows masks by itself, and there is no mask

    def move(self, device: torch.device) -> AttentionView:
        """The same for a layer on another device; made once for each."""
        if device not in self._moved:
            mask, factors = (None if one is None else one.to(device) for one in (self.mask, self.factors))
            self._moved[device] = replace(self, mask=mask, factors=factors, _moved={})
        return self._moved[device]

    _moved: dict[torch.device, AttentionView] = field(default_factory=dict, repr=False)


class AttentionViews:
    """Makes the views of a decoder's passes, and keeps the tables that they are sliced from."""

    def __init__(self, spec: DecoderSpec, device: torch.device, dtype: torch.dtype) -> None:
        self._spec = spec
        self._device = device
        self._dtype = dtype
        self._kinds = sorted(set(spec.layer_kinds)) or ["full"]
        self._ropes: dict[str, RotaryTable] = {}
        self._bias: torch.Tensor | None = None  # ALiBi (heads, positions)
        if spec.rope is not None:
            full = self._make_table(spec.rope)
            local = self._make_table(spec.local_rope) if spec.local_rope is not None else full
            self._ropes = {"full": full, "sliding": local}

    @property
    def can_shift(self) -> bool:
        """Whether keys can be moved to other positions: with learned position embeddings they can't."""
        return self._spec.num_positions is None

    def find_turns(self, layer: int, shifts: torch.Tensor) -> torch.Tensor | None:
        """Factors (rows, 1, 1, pairs) that move a layer's keys by `shifts` (rows,) positions; None without rotation."""
        kind = self._spec.kind_of(layer)
        is_turned = kind in self._ropes and layer not in self._spec.unturned
        return self._ropes[kind].find_turns(shifts) if is_turned else None

    def _make_table(self, rope: RopeSpec) -> RotaryTable:
        return RotaryTable(rope.frequencies, rope.gain, self._device)

    def make(self, cache: Cache, span: Span, *, needs_all_keys: bool = False) -> dict[LayerKind, AttentionView]:
        """The views of one pass; with `needs_all_keys` a window is a mask even if keys could be left out."""
        views = {kind: self._make(kind, cache, span, needs_all_keys) for kind in self._kinds}
        for view in views.values():
            view.num_forks = cache.num_forks
        return views

    def make_ragged(self, cache: Cache, span: Span, ragged: Ragged) -> dict[LayerKind, AttentionView]:
        """The views of a pass of real tokens only.

        If keys are plain and nothing is added to scores, attention runs row by row; else only attention is padded.
        """
        views: dict[LayerKind, AttentionView] = {}
        for kind in self._kinds:
            window = self._spec.window if kind == "sliding" else None
            reads_rows = can_read_rows(cache, self._spec, window)
            view = AttentionView(0, None, False, None, window) if reads_rows else self._make(kind, cache, span, False)
            view.ragged, view.reads_rows = ragged, reads_rows
            if kind in self._ropes:
                table = self._ropes[kind].reserve(span.stop)
                view.factors = table[ragged.positions][None, :, None]  # (1, tokens, 1, pairs)
            views[kind] = view
        return views

    def seat(self, views: dict[LayerKind, AttentionView], seats: Seats, cache: Cache, span: Span) -> None:
        """Let the views of a pass over a whole prompt follow the places of its tokens."""
        has_groups = bool((seats.groups != ALONE).any())
        for kind, view in views.items():
            if kind in self._ropes:
                rope = self._spec.local_rope if kind == "sliding" and self._spec.local_rope else self._spec.rope
                assert rope is not None
                axes = list(rope.axes) or [0] * len(rope.frequencies)
                view.factors = self._ropes[kind].find_factors(seats.turns[..., axes])
            if has_groups:
                window = self._spec.window if kind == "sliding" else None
                view.mask = self._make_additive(self._see_groups(seats.groups, cache, span, window))
                view.first_key, view.is_causal = 0, False

    def _see_groups(self, groups: torch.Tensor, cache: Cache, span: Span, window: int | None) -> torch.Tensor:
        """What a prompt's tokens see, if those of a group see each other: (rows, 1, new, keys)."""
        if cache.sees_by_position:
            raise UnsupportedError(
                "pictures of this model are seen by all of their tokens at once, which needs a cache that keeps plain "
                "keys; use cache_implementation='dynamic', 'static' or 'paged'"
            )
        mask = cache.mask(span, window)
        if not isinstance(mask, torch.Tensor):
            mask = torch.ones(span.num_new, span.num_new, dtype=torch.bool, device=groups.device).tril()[None, None]
        if cache.stands_in_order(window):
            places = torch.arange(mask.shape[-1], device=groups.device)[None].expand(groups.shape[0], -1)
        else:
            places = cache.key_positions(span, window)
        inside = (places >= 0) & (places < span.num_new)
        others = torch.where(inside, groups.gather(1, places.clamp(0, span.num_new - 1)), ALONE)  # (rows, keys)
        own = torch.arange(span.num_new, device=groups.device)[None, :, None]
        later = (groups[:, :, None] == others[:, None]) & (groups[:, :, None] != ALONE) & (places[:, None] > own)
        return mask | later[:, None]

    def _make(self, kind: LayerKind, cache: Cache, span: Span, needs_all_keys: bool) -> AttentionView:
        window = self._spec.window if kind == "sliding" else None
        factors = self._turn(kind, span)
        if self._spec.alibi is not None:
            return AttentionView(0, self._fold(cache, self._add_bias(cache, span, window)), False, factors)
        if cache.sees_by_position and not needs_all_keys:
            return AttentionView(0, None, False, factors, window)
        if span.num_new == 1 and span.is_uniform and cache.stands_in_order(window) and not needs_all_keys:
            return AttentionView(max(0, span.stop - window) if window else 0, None, False, factors)
        mask = cache.mask(span, window)
        if isinstance(mask, str):
            return AttentionView(0, None, True, factors)
        return AttentionView(0, self._fold(cache, self._make_additive(mask)), False, factors)

    def _fold(self, cache: Cache, mask: torch.Tensor | None) -> torch.Tensor | None:
        """The mask of forks in the form that all layers use."""
        if mask is None or cache.num_forks == 1:
            return mask
        return fold_mask(mask, cache.num_forks, self._spec.num_heads, self._spec.num_kv_heads)

    def table_of(self, kind: LayerKind, stop: int) -> torch.Tensor | None:
        """The rotations of a kind of layer for positions up to at least `stop`: (positions, pairs) complex."""
        return self._ropes[kind].reserve(stop) if kind in self._ropes else None

    def _make_additive(self, mask: torch.Tensor | None) -> torch.Tensor | None:
        """Attention adds masks to scores; a boolean one would be converted again in every layer."""
        if mask is None:
            return None
        return torch.zeros_like(mask, dtype=self._dtype).masked_fill_(~mask, -torch.inf)

    def _turn(self, kind: LayerKind, span: Span) -> torch.Tensor | None:
        if kind not in self._ropes:
            return None
        table = self._ropes[kind].reserve(span.stop)
        if span.is_uniform:
            return table[None, span.starts[0] : span.stop, None]  # (1, new, 1, pairs)
        return table[span.positions].unsqueeze(2)  # (rows, new, 1, pairs)

    def _add_bias(self, cache: Cache, span: Span, window: int | None) -> torch.Tensor:
        """ALiBi for the keys in view; masked keys have minus infinity."""
        alibi = self._spec.alibi
        assert alibi is not None
        if self._bias is None or self._bias.shape[1] < span.stop:
            room = max(span.stop, 2 * self._bias.shape[1] if self._bias is not None else _FIRST_BIAS)
            made = alibi_bias(self._spec.num_heads, room, scale=alibi.scale, is_rounded=alibi.is_rounded)
            self._bias = made.to(self._device, self._dtype)
        bias = self._bias[None, :, None, : span.stop]  # (1, heads, 1, keys)
        if not cache.stands_in_order(window):
            places = cache.key_positions(span, window)
            bias = self._bias[:, places].transpose(0, 1).unsqueeze(2)  # (rows, heads, 1, keys)
        mask = cache.mask(span, window)
        if mask is None:
            return bias
        if isinstance(mask, str):
            mask = torch.ones(span.num_new, span.num_new, dtype=torch.bool, device=self._device).tril()
        return torch.where(mask, bias, -torch.inf)

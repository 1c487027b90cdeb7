"""A decoder's pass operator by operator: what the fast paths are compared with, and what runs if all of them refuse.

For a few rows on a CPU its products take half of their time to repack the weights. So steps of several rows read a
second copy, which oneDNN packed once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from unspool.cache import FLAT, Cache, PagedCache, Span
from unspool.kernels.activations import find_activation
from unspool.kernels.presence import runs_kernels
from unspool.kernels.ragged import Ragged
from unspool.kernels.rotary import rotate_
from unspool.kernels.seats import split_seats
from unspool.models.decoder.head import check_positions, read_out
from unspool.models.decoder.layers import DecoderWeights, Layer, norm_heads
from unspool.models.decoder.mixture import feed_experts
from unspool.models.decoder.ragged import Flattening
from unspool.models.decoder.reading import read_keys, read_ragged
from unspool.models.decoder.spec import DecoderSpec
from unspool.models.decoder.views import AttentionView, AttentionViews
from unspool.models.native import take_last
from unspool.models.paths.path import Pass
from unspool.models.placement import Placement
from unspool.models.weights import AnyLinear, Linear
from unspool.protocols import Forward, Want

_PACKED_ROWS: Final = 8  # the batch that packed weights are laid out for; others read them as well
_MOST_POSITIONS: Final = 64  # rows times tokens of a step that reads packed weights


@dataclass(slots=True)
class BatchLinear(Linear):
    """A matrix that oneDNN has packed for products with several rows."""

    packed: Any = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")
        return product


def can_pack(weights: DecoderWeights, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a decoder's matrices can be packed for batches: float32 on a CPU, not quantised, no experts."""
    matrices = (weights.layers[0].qkv, weights.layers[0].up, weights.head)
    return (
        device.type == "cpu"
        and all(layer.mixture is None for layer in weights.layers)
        and dtype == torch.float32
        and all(isinstance(matrix, Linear) for matrix in matrices)
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")  # torch may be built without oneDNN
    )


def pack_for_batches(weights: DecoderWeights) -> DecoderWeights:
    """The same weights with matrices that are packed for products with several rows."""
    layers = [
        replace(layer, qkv=_pack(layer.qkv), out=_pack(layer.out), up=_pack(layer.up), down=_pack(layer.down))
        for layer in weights.layers
    ]
    return replace(weights, layers=layers, head=_pack(weights.head))


def _pack(linear: AnyLinear) -> BatchLinear:
    assert isinstance(linear, Linear)  # can_pack() checked it
    packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight, _PACKED_ROWS)
    return BatchLinear(linear.weight, linear.bias, packed)


class PlainPass:
    """Runs any pass of a decoder with torch's operators."""

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        device: torch.device,
        dtype: torch.dtype,
        views: AttentionViews,
        *,
        packs: bool,
        placement: Placement | None = None,
    ) -> None:
        self._spec, self._weights, self._dtype, self._views = spec, weights, dtype, views
        self._flattening = Flattening(spec, device, dtype)
        self._activate = find_activation(spec.activation)
        self._device, self._placement = device, placement
        self._packs = packs and placement is None and can_pack(weights, device, dtype)
        self._packed: DecoderWeights | None = None  # made by the first step of several rows
        # In float32 torch's operators are kept: what they return is compared with the reference, token by token.
        self._has_kernels = dtype != torch.float32 and placement is None and runs_kernels(device)

    def run(self, new: Pass, flattens_rows: bool | None = None) -> Forward:
        """Read the tokens, and advance the cache; `flattens_rows` as `Decoder.flattens_rows`."""
        cache, span, want, early = new.cache, new.span, new.want, list[torch.Tensor]()
        is_step = self._is_step(new)
        weights = self._choose_weights(new) if is_step else self._weights
        if is_step and want.logits == "last":
            with torch.inference_mode():  # logits are computed outside, so that callers may change them
                states, _, _ = self.read(weights, new.tokens, cache, span, want, new.embeds, early)
            forward = read_out(self._spec, weights, states[:, -1], early, self._find_head(weights))
        else:
            ragged = None if self._has_seats(new) else self._find_ragged(cache, span, want, flattens_rows)
            if ragged is not None:
                return self._run_ragged(weights, ragged, new)
            states, hidden, attentions = self.read(weights, new.tokens, cache, span, want, new.embeds, early)
            read = states if want.logits == "all" else take_last(states, new.counts)
            forward = read_out(self._spec, weights, read, early, self._find_head(weights))
            forward.hidden_states, forward.attentions = hidden, attentions
        forward.last_states = states if want.last_states else None
        return forward

    def _has_seats(self, new: Pass) -> bool:
        """Whether the tokens of a prompt have places of their own, which views of filled rows follow."""
        return new.embeds is not None and new.embeds.shape[-1] > (self._spec.embedding_size or self._spec.hidden_size)

    def _is_step(self, new: Pass) -> bool:
        """Whether a pass reads one token per row after what the cache holds, or drafts: autograd need not record it."""
        want = new.want
        return (
            (new.given.shape[1] == 1 or want.logits == "all")
            and not (want.hidden_states or want.attentions)
            and new.cache.holds_buffers(self._spec.num_layers)
        )

    def _writes_blocks(self, cache: Cache) -> bool:
        """Whether a pass only writes into blocks that are there: operators take less of the host's time then if
        autograd need not know of them."""
        has_blocks = isinstance(cache, PagedCache) and FLAT in cache.can
        return has_blocks and not torch.is_grad_enabled() and cache.holds_buffers(self._spec.num_layers)

    def _choose_weights(self, new: Pass) -> DecoderWeights:
        """The weights that a step reads: packed for batches, if it is one of several rows or tokens."""
        rows, num_new = new.given.shape[:2]
        if not self._packs or not 1 < rows * num_new <= _MOST_POSITIONS:
            return self._weights
        if self._packed is None:
            self._packed = pack_for_batches(self._weights)
        return self._packed

    def _find_ragged(self, cache: Cache, span: Span, want: Want, flattens: bool | None) -> Ragged | None:
        """The pass's real tokens, if only they are computed; None if rows are padded to the longest."""
        if want.hidden_states or want.attentions or cache.num_forks > 1 or not any(span.counts):
            return None
        if self._placement is not None:
            return None
        if flattens is None:
            flattens = self._flattening.flattens(cache, span)
        return Ragged(span.starts, span.counts, span.positions) if flattens else None

    def _run_ragged(self, weights: DecoderWeights, ragged: Ragged, new: Pass) -> Forward:
        """A pass over ragged rows that computes only their real tokens."""
        want, early = new.want, list[torch.Tensor]()
        flat = ragged.take(new.given)[None]  # (1, tokens) or (1, tokens, hidden)
        tokens, embeds = (None, flat) if flat.is_floating_point() else (flat, None)
        with torch.inference_mode() if self._writes_blocks(new.cache) else nullcontext():
            found, _, _ = self.read(weights, tokens, new.cache, new.span, want, embeds, early, ragged)
        states = found[0]  # (tokens, width of the head)
        wants_all = want.logits == "all"
        made = read_out(self._spec, weights, states if wants_all else ragged.take_last(states), early, weights.head)
        if wants_all:
            made.logits = ragged.fill(made.logits)
        made.last_states = ragged.fill(states) if want.last_states else None
        return made

    def read(
        self,
        weights: DecoderWeights,
        tokens: torch.Tensor | None,
        cache: Cache,
        span: Span,
        want: Want,
        embeds: torch.Tensor | None,
        early: list[torch.Tensor] | None = None,
        ragged: Ragged | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None, tuple[torch.Tensor, ...] | None]:
        """Final states (rows, new, width of the head), and what else is wanted; early states are appended to `early`.

        Of `ragged` rows only the real tokens are given, as those of one row: (1, tokens, …).
        """
        seats = None
        if embeds is not None:
            embeds, seats = split_seats(embeds, self._spec.embedding_size or self._spec.hidden_size)
        x = self._embed(tokens, embeds, span, ragged)  # (rows, new, hidden)
        if ragged is not None:
            views = self._views.make_ragged(cache, span, ragged)
        else:
            views = self._views.make(cache, span, needs_all_keys=want.attentions)
        if seats is not None:
            self._views.seat(views, seats, cache, span)
        hidden, attentions = [], []
        for index, layer in enumerate(weights.layers[: want.exit_layer]):
            if want.hidden_states:
                hidden.append(x if self._placement is None else x.to(self._device))
            if early is not None and index in want.early:
                last = take_last(x, span.counts) if ragged is None else ragged.take_last(x[0])
                last = last if self._placement is None else last.to(self._device)
                early.append(last.clone() if span.num_new > 1 else last)  # a view would keep the whole prompt's states
            view = views[self._spec.kind_of(index)]
            if self._placement is None:
                x, seen = self._block(index, layer, x, cache, view, want.attentions)
            else:
                x, seen = self._visit(index, layer, x, cache, view, want.attentions)
            if seen is not None:
                attentions.append(seen)
        cache.end()
        x = self.finish(x)
        hidden.append(x)
        return x, tuple(hidden) if want.hidden_states else None, tuple(attentions) if want.attentions else None

    def _embed(
        self, tokens: torch.Tensor | None, embeds: torch.Tensor | None, span: Span, ragged: Ragged | None
    ) -> torch.Tensor:
        weights = self._weights
        x = weights.embedding(tokens) if tokens is not None else embeds
        assert x is not None
        x = x.to(self._dtype)
        if weights.project_in is not None:
            x = weights.project_in(x)
        if weights.positions is not None:
            positions = (span.positions if ragged is None else ragged.positions[None]) + self._spec.position_offset
            positions = positions.to(weights.positions.device)
            # What is past a short row's end is never read, so it may have any position.
            check_positions(
                self._spec,
                self._weights,
                max(start + count for start, count in zip(span.starts, span.counts, strict=True)),
            )
            x = x + weights.positions[positions.clamp(max=weights.positions.shape[0] - 1)]
        return weights.embedding_norm(x) if weights.embedding_norm is not None else x

    def _visit(
        self, index: int, layer: Layer, x: torch.Tensor, cache: Cache, view: AttentionView, want_weights: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A block on the device where it lies. States stay there for the next one; weights of attention come back."""
        assert self._placement is not None
        where = self._placement.layers[index]
        with _use_device(where):
            x, seen = self._block(index, layer, x.to(where), cache, view.move(where), want_weights)
        return x, None if seen is None else seen.to(self._device)

    def _find_head(self, weights: DecoderWeights) -> Callable[[torch.Tensor], torch.Tensor]:
        return weights.head if self._placement is None else self.apply_head

    def apply_head(self, states: torch.Tensor) -> torch.Tensor:
        """Logits of final states, wherever the head lies."""
        if self._placement is None:
            return self._weights.head(states)
        with _use_device(self._placement.head):
            return self._weights.head(states.to(self._placement.head)).to(self._device)

    def finish(self, x: torch.Tensor) -> torch.Tensor:
        """The states that the head reads, of those after a layer."""
        if self._placement is not None:
            with _use_device(self._placement.head):
                return self._finish(x.to(self._placement.head)).to(self._device)
        return self._finish(x)

    def _finish(self, x: torch.Tensor) -> torch.Tensor:
        x = self._weights.final_norm(x) if self._weights.final_norm is not None else x
        return self._weights.project_out(x) if self._weights.project_out is not None else x

    # --- a block -------------------------------------------------------------------------------------
    def _block(
        self, index: int, layer: Layer, x: torch.Tensor, cache: Cache, view: AttentionView, want_weights: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        spec, is_post = self._spec, self._spec.norm_placement == "post"
        normed = x if is_post or layer.attn_norm is None else layer.attn_norm(x)
        read, weights = self._attend(index, layer, normed, cache, view, want_weights)
        if layer.post_attn_norm is not None:
            read = layer.post_attn_norm(read)
        if spec.residual == "parallel":
            fed = self._feed(layer, layer.ffn_norm(x) if layer.ffn_norm is not None else normed)
            return fed.add_(read).add_(x), weights
        x = read.add_(x)  # in place in the new tensor, because the state before may be wanted
        if is_post:
            assert layer.attn_norm is not None and layer.ffn_norm is not None
            x = layer.attn_norm(x)
            return layer.ffn_norm(self._feed(layer, x).add_(x)), weights
        fed = self._feed(layer, x if layer.ffn_norm is None else layer.ffn_norm(x))
        if layer.post_ffn_norm is not None:
            fed = layer.post_ffn_norm(fed)
        return fed.add_(x), weights

    def _attend(
        self, index: int, layer: Layer, x: torch.Tensor, cache: Cache, view: AttentionView, want_weights: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        spec, (rows, num_new, _) = self._spec, x.shape
        heads, kv_heads = spec.num_heads, spec.num_kv_heads
        qkv = layer.qkv(x).view(rows, num_new, heads + 2 * kv_heads, spec.head_dim)
        if layer.q_norm is not None:
            queries, keys = norm_heads(spec, layer, qkv[:, :, :heads], qkv[:, :, heads : heads + kv_heads])
            qkv[:, :, :heads], qkv[:, :, heads : heads + kv_heads] = queries, keys
        if view.factors is not None and index not in spec.unturned:
            self._rotate(qkv[:, :, : heads + kv_heads], view.factors, layer.is_halved)
        kv = qkv[:, :, heads:].view(rows, num_new, 2, kv_heads, spec.head_dim)
        scale, softcap = spec.scale_of(index), spec.attention_softcap
        sinks = None if layer.sinks is None else layer.sinks[None, :, None]
        if view.ragged is not None:
            flat = read_ragged(qkv[0, :, :heads], kv[0], cache, index, view, scale=scale, softcap=softcap, sinks=sinks)
            return layer.out(flat.reshape(1, num_new, heads * spec.head_dim)), None
        keys, values = cache.write(index, kv)
        read, weights = read_keys(
            qkv[:, :, :heads].transpose(1, 2),
            keys,
            values,
            view,
            scale=scale,
            softcap=softcap,
            sinks=sinks,
            want_weights=want_weights,
        )
        return layer.out(read.transpose(1, 2).reshape(rows, num_new, heads * spec.head_dim)), weights

    def _rotate(self, heads: torch.Tensor, factors: torch.Tensor, is_halved: bool) -> None:
        if self._has_kernels and _lies_in_order(heads):
            from unspool.kernels.gpu.attention.rotating import rotate_heads_  # Triton is imported where a GPU is used

            rotate_heads_(heads, factors, is_halved=is_halved)
        else:
            rotate_(heads, factors, is_halved=is_halved)

    def _feed(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        if layer.mixture is not None:
            assert self._spec.mixture is not None
            return feed_experts(self._spec.mixture, layer.mixture, layer.up, layer.down, x, self._activate)
        up = layer.up(x)
        if not self._spec.is_gated:
            return layer.down(self._activate(up))
        if self._has_kernels and up.is_contiguous():
            from unspool.kernels.gpu.products.activations import CODES
            from unspool.kernels.gpu.products.gating import gate as gate_rows

            fed = up.new_empty((*up.shape[:-1], up.shape[-1] // 2))
            gate_rows(up.flatten(0, -2), CODES[self._spec.activation], fed.flatten(0, -2))
            return layer.down(fed)
        gate, value = up.chunk(2, dim=-1)
        return layer.down(self._activate(gate).mul_(value))


def _use_device(device: torch.device) -> AbstractContextManager[Any]:
    """Have kernels start on a GPU, if it is one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _lies_in_order(heads: torch.Tensor) -> bool:
    """Whether heads (rows, new, heads, width) lie one after the other, and rows of tokens too."""
    rows, new, _, width = heads.shape
    strides = heads.stride()
    return strides[3] == 1 and strides[2] == width and (rows == 1 or strides[0] == new * strides[1])

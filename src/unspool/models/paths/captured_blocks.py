"""The work of a captured step: nearly all blocks on fused kernels, the rest on torch's operators.

Both use the same attention kernel, which reads addresses and lengths on the device; nothing here may read a number on
the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from unspool.kernels.activations import find_activation
from unspool.kernels.alibi import alibi_slopes
from unspool.kernels.gpu.attention.carrying import Carrier
from unspool.kernels.gpu.attention.head_norms import HeadNorm, norm_heads_
from unspool.kernels.gpu.attention.packed_attention import NUM_TENSORS, PackedStepAttention
from unspool.kernels.gpu.attention.split_attention import HeadShape, SplitAttention
from unspool.kernels.gpu.attention.step_attention import StepAttention
from unspool.kernels.gpu.attention.turning import find_turns
from unspool.kernels.gpu.attention.wide_attention import WideAttention
from unspool.kernels.gpu.products.activations import CODES
from unspool.kernels.gpu.products.norms import normalise
from unspool.kernels.gpu.products.parallel_product import Branch
from unspool.kernels.gpu.products.parts import add_parts
from unspool.kernels.gpu.products.product import (
    find_order,
    multiply,
    multiply_beside,
    multiply_both,
    multiply_parts,
    takes_addends,
)
from unspool.kernels.gpu.products.result import Addend
from unspool.kernels.gpu.products.words_product import unpack_words
from unspool.kernels.gpu.sampling.tokens import LearnedPositions, embed
from unspool.kernels.key_layout import KeyLayout
from unspool.models.decoder.layers import DecoderWeights, Layer
from unspool.models.decoder.plain_block import embed as embed_plainly
from unspool.models.decoder.plain_block import finish, run_block
from unspool.models.decoder.spec import DecoderSpec, RopeSpec
from unspool.models.paths.captured_mixture import MixtureStep
from unspool.models.paths.captured_shape import PassShape
from unspool.models.weights import AnyLinear, Linear, MxLinear, Norm, WordEmbedding


@dataclass(slots=True)
class StepInputs:
    """The input buffers of a captured step, for a fixed number of rows."""

    tokens: torch.Tensor  # (rows * new,) int64
    lengths: torch.Tensor  # (rows,) int32: positions held, -1 for an absent row
    table: torch.Tensor  # int64: addresses of keys, as offsets from `base`: see `kernels.key_layout`
    base: torch.Tensor  # of the buffers' dtype
    counts: torch.Tensor  # (rows,): positions that may be offloaded: `lengths`, or the packed ones
    layout: KeyLayout
    sources: torch.Tensor  # int64: addresses of the layers' source keys, positions of a row, the sources' lengths


def can_fuse(spec: DecoderSpec) -> bool:
    """Whether a block is made of parts that the fused kernels know."""
    if spec.mixture is not None and (
        spec.norm.kind != "rms" or spec.norm_placement == "after" or spec.residual == "parallel"
    ):
        return False  # such blocks with experts were not measured
    return (
        (spec.norm_placement == "pre" or (spec.norm_placement != "post" and spec.residual == "sequential"))
        and spec.embedding_size in (None, spec.hidden_size)
        and spec.activation in CODES
    )


class Body(ABC):
    """The step for one number of rows, from the tokens to the logits."""

    states: torch.Tensor  # (new tokens * (1 + early layers), hidden): the head's input

    def __init__(
        self, spec: DecoderSpec, weights: DecoderWeights, device: torch.device, dtype: torch.dtype, form: PassShape
    ) -> None:
        self._spec, self._weights, self._shape = spec, weights, form
        self._layers = weights.layers[: form.num_layers]
        self._dtype = dtype
        shape = HeadShape(
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            width=spec.head_dim,
            softcap=spec.attention_softcap,
            window=spec.window,
            eps=spec.norm.eps,
        )
        num_tokens = form.num_tokens
        self._attend_rows = _make_attention(form, shape, device)
        self.carrier = _make_carrier(form, spec, device) if form.away else None
        self._read = torch.zeros(num_tokens, spec.num_heads * spec.head_dim, dtype=dtype, device=device)
        width = spec.embedding_size or spec.hidden_size if weights.project_out is not None else spec.hidden_size
        self.states = torch.zeros((1 + len(form.early)) * num_tokens, width, dtype=dtype, device=device)
        self._ropes = {
            kind: (
                rope,
                torch.tensor(rope.frequencies, dtype=torch.float32, device=device),
                torch.zeros(num_tokens, 2, len(rope.frequencies), dtype=torch.float32, device=device),
            )
            for kind, rope in (("full", spec.rope), ("sliding", self._local_rope))
            if rope is not None and kind in set(map(spec.kind_of, range(spec.num_layers)))
        }
        self._mixture: MixtureStep | None = None
        if spec.mixture is not None:
            has_fours = any(isinstance(layer.up, MxLinear) for layer in self._layers)
            self._mixture = MixtureStep(spec, num_tokens, device, dtype, has_fours=has_fours)
        self._slopes: torch.Tensor | None = None
        if spec.alibi is not None:
            self._slopes = (alibi_slopes(spec.num_heads) * spec.alibi.scale).to(device)

    @property
    def _local_rope(self) -> RopeSpec | None:
        return self._spec.local_rope if self._spec.local_rope is not None else self._spec.rope

    def _begin(self, inputs: StepInputs) -> None:
        """The work before the first layer: start copying offloaded keys, and compute rope's sines and cosines."""
        if self.carrier is not None:
            self.carrier.begin(inputs.base, inputs.counts)
        for rope, frequencies, turns in self._ropes.values():
            find_turns(inputs.lengths, frequencies, rope.gain, turns, is_forked=self._shape.is_forked)

    @abstractmethod
    def run(self, inputs: StepInputs, logits: torch.Tensor) -> None:
        """Launch a step's work: keys and values into the cache, logits (tokens, vocab) float32 without their cap.

        The logits of early layers follow, one layer after the other.
        """

    def _keep_early(self, index: int, x: torch.Tensor) -> None:
        """Copy a layer's input, if it is wanted."""
        if index in self._shape.early:
            first = (1 + self._shape.early.index(index)) * self._shape.num_tokens
            self.states[first : first + self._shape.num_tokens].copy_(x)

    def _attend(self, index: int, layer: Layer, qkv: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        """A layer's attention output (rows, heads * width), valid until the next layer's."""
        spec, kind = self._spec, self._spec.kind_of(index)
        if spec.norms_heads_apart:
            self._norm_heads_(layer, qkv)
        is_away = index in self._shape.away
        if self.carrier is not None and is_away:
            self.carrier.hold_for(index)
        self._attend_rows(
            qkv,
            self._read,
            inputs.base,
            inputs.table,
            inputs.lengths,
            index,
            spec.num_layers,
            scale=spec.scale_of(index),
            turns=self._ropes[kind][2] if kind in self._ropes and index not in spec.unturned else None,
            is_windowed=kind == "sliding" and spec.window is not None,
            q_norm=None if spec.norms_heads_apart else _weight_of(layer.q_norm),
            k_norm=None if spec.norms_heads_apart else _weight_of(layer.k_norm),
            slopes=self._slopes,
            sinks=layer.sinks,
            is_halved=layer.is_halved,
            layout=replace(inputs.layout, is_away=True) if is_away else inputs.layout,
        )
        if self.carrier is not None and is_away:
            self.carrier.go_on(inputs.base, inputs.counts)
        return self._read

    def _norm_heads_(self, layer: Layer, qkv: torch.Tensor) -> None:
        """Normalise queries and keys in ways that the attention kernels do not know."""
        spec = self._spec
        assert layer.q_norm is not None and layer.k_norm is not None
        q_norm, k_norm = (
            HeadNorm(norm.weight, norm.bias, norm.eps, norm.is_layer) for norm in (layer.q_norm, layer.k_norm)
        )
        norm_heads_(qkv, q_norm, k_norm, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.qk_norm_span)


class FusedBody(Body):
    """Five kernels per layer for one row: norms before and residuals after the products are part of them."""

    def __init__(
        self, spec: DecoderSpec, weights: DecoderWeights, device: torch.device, dtype: torch.dtype, shape: PassShape
    ) -> None:
        super().__init__(spec, weights, device, dtype, shape)
        self._code = CODES[spec.activation]
        self._scale = float(torch.tensor(weights.embedding.scale, dtype=dtype))  # rounded as in `Embedding`

        def make(width: int) -> torch.Tensor:
            return torch.zeros(shape.num_tokens, width, dtype=dtype, device=device)

        self._buffers = make(spec.hidden_size), make(spec.hidden_size)
        self._x, self._spare = self._buffers
        self._qkv = make((spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)
        self._inner = make(spec.ffn_size)
        self._made = make(spec.hidden_size)
        self._pending: Norm | None = None  # the norm after which `_made` is still to be added to the state
        self._parts: tuple[torch.Tensor, torch.Tensor | None] | None = None  # of a product to be added, and its bias

    def run(self, inputs: StepInputs, logits: torch.Tensor) -> None:
        weights, shape = self._weights, self._shape
        self._x, self._spare = self._buffers
        self._begin(inputs)
        self._embed(inputs)
        for index, layer in enumerate(self._layers):
            if self._spec.residual == "parallel":
                self._run_parallel(index, layer, inputs)
            else:
                self._run_sequential(index, layer, inputs)
        if not shape.early and not shape.wants_states:
            self._multiply_state(weights.head, weights.final_norm, logits)
            return
        self._settle()
        states = self.states[: shape.num_tokens]
        if weights.final_norm is None:
            states.copy_(self._x)
        else:
            _normalise(weights.final_norm, self._x, states)
        multiply(weights.head.operand, self.states, logits, bias=weights.head.bias)

    def _run_sequential(self, index: int, layer: Layer, inputs: StepInputs) -> None:
        self._multiply_state(layer.qkv, layer.attn_norm, self._qkv)
        self._keep_early(index, self._x)
        self._add(layer.out, self._attend(index, layer, self._qkv, inputs), layer.post_attn_norm)
        if layer.mixture is not None:
            self._feed_mixture(layer, inputs)
            return
        self._feed(layer, layer.ffn_norm)
        self._add(layer.down, self._inner, layer.post_ffn_norm, is_arranged=self._find_inner_order(layer) > 0)

    def _run_parallel(self, index: int, layer: Layer, inputs: StepInputs) -> None:
        """Three kernels if attention and the feed-forward share two of them."""
        if index in self._shape.early:
            self._settle()
        self._keep_early(index, self._x)
        norm = layer.ffn_norm if layer.ffn_norm is not None else layer.attn_norm
        pairs = self._pair(layer, norm) if self._shape.num_tokens == 1 else None
        if pairs is None:
            self._multiply_state(layer.qkv, layer.attn_norm, self._qkv)
            read = self._attend(index, layer, self._qkv, inputs)
            self._feed(layer, norm)
            self._add(layer.out, read, None)
            self._add(layer.down, self._inner, None, is_arranged=self._find_inner_order(layer) > 0)
            return
        qkv, up, out, down = pairs
        is_layer = norm is not None and norm.is_layer
        eps = norm.eps if norm is not None else 0.0
        multiply_beside(self._x, qkv, up, (self._qkv, self._inner), eps=eps, centres=is_layer)
        read = self._attend(index, layer, self._qkv, inputs)
        multiply_both(down, self._inner, out, read, self._x)

    def _pair(self, layer: Layer, norm: Norm | None) -> tuple[Branch, Branch, Branch, Branch] | None:
        """The four products of a block as two pairs; None if they are too different."""
        before, qkv, out, up, down = layer.attn_norm, layer.qkv, layer.out, layer.up, layer.down
        if self._spec.is_gated or before is None or norm is None:
            return None
        if (before.eps, before.weight is None, before.bias is None) != (
            norm.eps,
            norm.weight is None,
            norm.bias is None,
        ):
            return None
        if not (
            isinstance(qkv, Linear) and isinstance(out, Linear) and isinstance(up, Linear) and isinstance(down, Linear)
        ):
            return None
        return (
            Branch(qkv.weight, qkv.bias, before.weight, before.bias),
            Branch(up.weight, up.bias, norm.weight, norm.bias, self._code),
            Branch(out.weight, out.bias),
            Branch(down.weight, down.bias),
        )

    def _embed(self, inputs: StepInputs) -> None:
        """The first layer's input."""
        spec, weights, x = self._spec, self._weights, self._x
        if not isinstance(weights.embedding, WordEmbedding):
            places = None
            if weights.positions is not None:
                places = LearnedPositions(
                    weights.positions, spec.position_offset, inputs.lengths, self._shape.is_forked
                )
            embed(inputs.tokens, weights.embedding.weight, self._scale, x, places)
        else:
            unpack_words(weights.embedding.operand, x, rows=inputs.tokens, scale=self._scale)
            if weights.positions is not None:
                x.add_(weights.positions[self._find_places(inputs)])
        if weights.embedding_norm is not None:
            _normalise(weights.embedding_norm, x, x)

    def _find_places(self, inputs: StepInputs) -> torch.Tensor:
        """Rows of the table of positions; absent tokens may have any."""
        assert self._weights.positions is not None
        places = find_positions(self._shape, inputs) + self._spec.position_offset
        return places.clamp(0, self._weights.positions.shape[0] - 1)

    def _feed(self, layer: Layer, norm: Norm | None) -> None:
        """The feed-forward's inner state, in the order in which `down` reads it."""
        order = self._find_inner_order(layer)
        self._multiply_state(
            layer.up, norm, self._inner, activation=self._code, is_gated=self._spec.is_gated, order=order
        )

    def _find_inner_order(self, layer: Layer) -> int:
        """The order of the inner state, if the product that writes it can arrange it."""
        return find_order(layer.down.operand, self._inner) if find_order(layer.up.operand, self._x) else 0

    def _multiply_state(self, linear: AnyLinear, norm: Norm | None, out: torch.Tensor, **after: Any) -> None:
        """A product of the state, after a norm."""
        addend = None
        if self._pending is not None and takes_addends(linear.operand, self._shape.num_tokens):
            assert self._pending.weight is not None
            addend = Addend(self._made, self._pending.weight, self._pending.eps, self._spare)
            self._pending = None
        if self._parts is not None and norm is not None:
            parts, bias = self._parts
            self._parts = None
            order = find_order(linear.operand, self._x)
            add_parts(parts, self._x, bias=bias, adds=True, normed=self._spare, order=order, **_describe(norm))
            multiply(linear.operand, self._spare, out, bias=linear.bias, is_arranged=True, **after)
            return
        self._settle()
        before = _describe(norm) if norm is not None else {}
        multiply(linear.operand, self._x, out, bias=linear.bias, addend=addend, **before, **after)
        if addend is not None:
            self._x, self._spare = self._spare, self._x

    def _feed_mixture(self, layer: Layer, inputs: StepInputs) -> None:
        """Add the experts' output to the state, normalised if the block has a norm there."""
        assert self._mixture is not None
        self._settle()
        if layer.post_ffn_norm is None:
            self._mixture.feed(layer, self._x, self._x, inputs.lengths, norm=layer.ffn_norm, adds=True)
            return
        self._mixture.feed(layer, self._x, self._made, inputs.lengths, norm=layer.ffn_norm)
        self._pending = layer.post_ffn_norm

    def _add(self, linear: AnyLinear, y: torch.Tensor, norm: Norm | None, *, is_arranged: bool = False) -> None:
        """Add a product to the state, normalised if the block has a norm there: by the product that reads it next."""
        self._settle()
        if norm is None:
            parts = multiply_parts(linear.operand, y, is_arranged=is_arranged)
            if parts is not None:
                self._parts = parts, linear.bias
            else:
                multiply(linear.operand, y, self._x, bias=linear.bias, adds=True, is_arranged=is_arranged)
            return
        multiply(linear.operand, y, self._made, bias=linear.bias, is_arranged=is_arranged)
        self._pending = norm
        if norm.is_layer:
            self._settle()

    def _settle(self) -> None:
        """Add what is still to be added to the state."""
        if self._parts is not None:
            parts, bias = self._parts
            self._parts = None
            add_parts(parts, self._x, bias=bias, adds=True)
        if self._pending is not None:
            _normalise(self._pending, self._made, self._x, adds=True)
            self._pending = None


class PlainBody(Body):
    """Any block of the configurable decoder, operator by operator, as `Decoder` runs it."""

    def __init__(
        self, spec: DecoderSpec, weights: DecoderWeights, device: torch.device, dtype: torch.dtype, shape: PassShape
    ) -> None:
        super().__init__(spec, weights, device, dtype, shape)
        self._activate = find_activation(spec.activation)

    def run(self, inputs: StepInputs, logits: torch.Tensor) -> None:
        shape, weights = self._shape, self._weights
        self._begin(inputs)
        places = find_positions(shape, inputs)
        x = embed_plainly(self._spec, weights, inputs.tokens.clamp(min=0), places, self._dtype)
        for index, layer in enumerate(self._layers):
            self._keep_early(index, x)
            attend = partial(self._attend, index, layer, inputs=inputs)
            feed = partial(self._feed_mixture, layer, inputs) if layer.mixture is not None else None
            x = run_block(self._spec, layer, x, attend, self._activate, feed)
        self.states[: shape.num_tokens].copy_(finish(weights, x))
        logits.copy_(weights.head(self.states))

    def _feed_mixture(self, layer: Layer, inputs: StepInputs, x: torch.Tensor) -> torch.Tensor:
        """The experts' output for normalised states."""
        assert self._mixture is not None
        made = torch.zeros_like(x)
        self._mixture.feed(layer, x, made, inputs.lengths)
        return made


def _make_attention(form: PassShape, shape: HeadShape, device: torch.device) -> SplitAttention:
    """The attention kernel for a pass's cache."""
    if form.packing is not None:
        return PackedStepAttention(form.rows, shape, form.packing, device)
    if form.num_new == 1:
        return StepAttention(form.rows, shape, device)
    return WideAttention(form.rows, form.num_new, shape, device, is_forked=form.is_forked)


def _make_carrier(form: PassShape, spec: DecoderSpec, device: torch.device) -> Carrier:
    """The carrier of offloaded keys: whole layers, or their packed part."""
    away = form.away if form.num_layers is None else [layer for layer in form.away if layer < form.num_layers]
    if form.packing is not None:
        block = form.packing[0].block
        return Carrier(away, form.rows, device, num_tensors=NUM_TENSORS, chunks=spec.num_kv_heads, positions=block)
    windows = {layer: spec.window for layer in away if spec.kind_of(layer) == "sliding" and spec.window is not None}
    return Carrier(away, form.rows, device, windows=windows)


def make_body(
    spec: DecoderSpec, weights: DecoderWeights, device: torch.device, dtype: torch.dtype, shape: PassShape
) -> Body:
    """The fastest body that a model's blocks allow."""
    return (FusedBody if can_fuse(spec) else PlainBody)(spec, weights, device, dtype, shape)


def find_positions(shape: PassShape, inputs: StepInputs) -> torch.Tensor:
    """The position of each token of a pass: (tokens,)."""
    if shape.num_new == 1:
        return inputs.lengths
    ahead = torch.arange(shape.num_new, device=inputs.lengths.device) * (0 if shape.is_forked else 1)
    return (inputs.lengths[:, None] + ahead).flatten()


def _describe(norm: Norm) -> dict[str, Any]:
    """A norm as kernels take it."""
    return {"norm": norm.weight, "eps": norm.eps, "centres": norm.is_layer, "shift": norm.bias}


def _normalise(norm: Norm, x: torch.Tensor, out: torch.Tensor, *, adds: bool = False) -> None:
    normalise(x, norm.weight, norm.eps, out, adds=adds, centres=norm.is_layer, shift=norm.bias)


def _weight_of(norm: Norm | None) -> torch.Tensor | None:
    return None if norm is None else norm.weight

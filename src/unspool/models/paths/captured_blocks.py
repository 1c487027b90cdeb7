"""The work of a captured step: blocks of Llama's shape on fused kernels, all others on torch's operators.

Both use the same attention kernel, which reads addresses and lengths on the device; nothing here may read a number on
the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from functools import partial

import torch

from unspool.kernels.activations import find_activation
from unspool.kernels.alibi import alibi_slopes
from unspool.kernels.gpu.attention.carrying import Carrier
from unspool.kernels.gpu.attention.packed_attention import NUM_TENSORS, PackedStepAttention
from unspool.kernels.gpu.attention.split_attention import HeadShape, SplitAttention
from unspool.kernels.gpu.attention.step_attention import StepAttention
from unspool.kernels.gpu.attention.turning import find_turns
from unspool.kernels.gpu.attention.wide_attention import WideAttention
from unspool.kernels.gpu.products.activations import CODES
from unspool.kernels.gpu.products.norms import normalise
from unspool.kernels.gpu.products.product import multiply
from unspool.kernels.gpu.products.words_product import unpack_words
from unspool.kernels.gpu.sampling.tokens import embed
from unspool.kernels.key_layout import KeyLayout
from unspool.models.decoder.layers import DecoderWeights, Layer, norm_heads
from unspool.models.decoder.plain_block import embed as embed_plainly
from unspool.models.decoder.plain_block import finish, run_block
from unspool.models.decoder.spec import DecoderSpec, RopeSpec
from unspool.models.paths.captured_mixture import MixtureStep
from unspool.models.paths.captured_shape import PassShape
from unspool.models.weights import AnyLinear, Norm, WordEmbedding


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
    """Whether a block is of Llama's shape, with or without Gemma's outer norms."""
    return (
        spec.norm.kind == "rms"
        and spec.norm_placement in ("pre", "sandwich")
        and spec.residual == "sequential"
        and spec.num_positions is None
        and not spec.has_embedding_norm
        and spec.embedding_size in (None, spec.hidden_size)
        and spec.has_final_norm
        and spec.activation in CODES
        and not spec.norms_heads_apart
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
        self._mixture = MixtureStep(spec, num_tokens, device, dtype) if spec.mixture is not None else None
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
            qkv = self._norm_heads(layer, qkv)
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
            layout=replace(inputs.layout, is_away=True) if is_away else inputs.layout,
        )
        if self.carrier is not None and is_away:
            self.carrier.go_on(inputs.base, inputs.counts)
        return self._read

    def _norm_heads(self, layer: Layer, qkv: torch.Tensor) -> torch.Tensor:
        """Queries, keys and values with norms that the attention kernel does not know."""
        heads, kv_heads, width = self._spec.num_heads, self._spec.num_kv_heads, self._spec.head_dim
        by_head = qkv.view(-1, heads + 2 * kv_heads, width)
        queries, keys, values = torch.split(by_head, [heads, kv_heads, kv_heads], dim=1)
        return torch.cat((*norm_heads(self._spec, layer, queries, keys), values), dim=1).view(qkv.shape)


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

        self._x = make(spec.hidden_size)
        self._qkv = make((spec.num_heads + 2 * spec.num_kv_heads) * spec.head_dim)
        self._inner = make(spec.ffn_size)
        self._made = make(spec.hidden_size)

    def run(self, inputs: StepInputs, logits: torch.Tensor) -> None:
        spec, weights, x, eps = self._spec, self._weights, self._x, self._spec.norm.eps
        self._begin(inputs)
        if isinstance(weights.embedding, WordEmbedding):
            unpack_words(weights.embedding.operand, x, rows=inputs.tokens, scale=self._scale)
        else:
            embed(inputs.tokens, weights.embedding.weight, self._scale, x)
        for index, layer in enumerate(self._layers):
            self._keep_early(index, x)
            multiply(layer.qkv.operand, x, self._qkv, norm=_weight_of(layer.attn_norm), eps=eps, bias=layer.qkv.bias)
            self._add(layer.out, self._attend(index, layer, self._qkv, inputs), layer.post_attn_norm)
            if layer.mixture is not None:
                self._feed_mixture(layer, inputs)
                continue
            multiply(
                layer.up.operand,
                x,
                self._inner,
                norm=_weight_of(layer.ffn_norm),
                eps=eps,
                bias=layer.up.bias,
                activation=self._code,
                is_gated=spec.is_gated,
            )
            self._add(layer.down, self._inner, layer.post_ffn_norm)
        final = _weight_of(weights.final_norm)
        if not self._shape.early and not self._shape.wants_states:
            multiply(weights.head.operand, x, logits, norm=final, eps=eps, bias=weights.head.bias)
            return
        assert final is not None
        normalise(x, final, eps, self.states[: self._shape.num_tokens])
        multiply(weights.head.operand, self.states, logits, bias=weights.head.bias)

    def _feed_mixture(self, layer: Layer, inputs: StepInputs) -> None:
        """Add the experts' output to the state, normalised if the block has a norm there."""
        assert self._mixture is not None
        norm = layer.post_ffn_norm
        if norm is None:
            self._mixture.feed(layer, self._x, self._x, inputs.lengths, norm=layer.ffn_norm, adds=True)
            return
        assert norm.weight is not None
        self._mixture.feed(layer, self._x, self._made, inputs.lengths, norm=layer.ffn_norm)
        normalise(self._made, norm.weight, norm.eps, self._x, adds=True)

    def _add(self, linear: AnyLinear, y: torch.Tensor, norm: Norm | None) -> None:
        """Add a product to the state, normalised if the block has a norm there."""
        if norm is None:
            multiply(linear.operand, y, self._x, bias=linear.bias, adds=True)
            return
        assert norm.weight is not None
        multiply(linear.operand, y, self._made, bias=linear.bias)
        normalise(self._made, norm.weight, norm.eps, self._x, adds=True)


class PlainBody(Body):
    """Any block of the configurable decoder, operator by operator, as `Decoder` runs it."""

    def __init__(
        self, spec: DecoderSpec, weights: DecoderWeights, device: torch.device, dtype: torch.dtype, shape: PassShape
    ) -> None:
        super().__init__(spec, weights, device, dtype, shape)
        ahead = torch.arange(shape.num_new, device=device) * (0 if shape.is_forked else 1)
        self._ahead = ahead.repeat(shape.rows)  # a token's offset from its row's end
        self._activate = find_activation(spec.activation)

    def run(self, inputs: StepInputs, logits: torch.Tensor) -> None:
        shape, weights = self._shape, self._weights
        self._begin(inputs)
        places = inputs.lengths
        if shape.num_new > 1:
            places = places.repeat_interleave(shape.num_new, output_size=shape.num_tokens) + self._ahead
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


def _weight_of(norm: Norm | None) -> torch.Tensor | None:
    return None if norm is None else norm.weight

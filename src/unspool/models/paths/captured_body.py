"""What the bodies of captured steps share: their inputs, rope, attention by address, offloaded keys.

The attention kernels read addresses and lengths on the device; nothing here may read a number on the host.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace

import torch

from unspool.kernels.alibi import alibi_slopes
from unspool.kernels.gpu.attention.carrying import Carrier
from unspool.kernels.gpu.attention.head_norms import HeadNorm, norm_heads_
from unspool.kernels.gpu.attention.packed_attention import NUM_TENSORS, PackedStepAttention
from unspool.kernels.gpu.attention.split_attention import HeadShape, SplitAttention
from unspool.kernels.gpu.attention.step_attention import StepAttention
from unspool.kernels.gpu.attention.turning import find_turns
from unspool.kernels.gpu.attention.wide_attention import WideAttention
from unspool.kernels.gpu.sampling.sketch import HeadInput
from unspool.kernels.key_layout import KeyLayout
from unspool.models.decoder.layers import DecoderWeights, Layer
from unspool.models.decoder.spec import DecoderSpec, RopeSpec
from unspool.models.paths.captured_mixture import MixtureStep
from unspool.models.paths.captured_shape import PassShape
from unspool.models.weights import MxLinear, Norm


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


class Body(ABC):
    """The step for one number of rows, from the tokens to the logits."""

    states: torch.Tensor  # (new tokens * (1 + early layers), hidden): the head's input
    gives_head_input = False  # whether there is a `run_to_head`
    starts_alone = False  # whether nothing of a step is loaded before all earlier kernels have ended

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

    def run_to_head(self, inputs: StepInputs) -> HeadInput:
        """Launch a step's work but for the head's: what that reads, valid until the next step."""
        raise NotImplementedError(f"a {type(self).__name__} multiplies by the head itself; ask `gives_head_input`")

    def _keep_early(self, index: int, x: torch.Tensor) -> None:
        """Copy a layer's input, if it is wanted."""
        if index in self._shape.early:
            first = (1 + self._shape.early.index(index)) * self._shape.num_tokens
            self.states[first : first + self._shape.num_tokens].copy_(x)

    def _attend(self, index: int, layer: Layer, qkv: torch.Tensor, inputs: StepInputs, order: int = 0) -> torch.Tensor:
        """A layer's attention output (rows, heads * width) in an order of `arranging`, valid until the next layer's."""
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
            order=order,
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


def find_positions(shape: PassShape, inputs: StepInputs) -> torch.Tensor:
    """The position of each token of a pass: (tokens,)."""
    if shape.num_new == 1:
        return inputs.lengths
    ahead = torch.arange(shape.num_new, device=inputs.lengths.device) * (0 if shape.is_forked else 1)
    return (inputs.lengths[:, None] + ahead).flatten()


def _weight_of(norm: Norm | None) -> torch.Tensor | None:
    return None if norm is None else norm.weight

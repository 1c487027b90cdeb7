"""The work of an encoder-decoder's captured step.

The attention kernels read addresses and lengths on the device; nothing here may read a number on the host.
"""

from __future__ import annotations

import torch
import triton

from unspool.kernels.activations import find_activation
from unspool.kernels.gpu.attention.cross_attention import CrossAttention as CrossKernel
from unspool.kernels.gpu.attention.split_attention import HeadShape
from unspool.kernels.gpu.attention.step_attention import StepAttention
from unspool.models.decoder.layers import Layer
from unspool.models.paths.captured_blocks import Body, StepInputs
from unspool.models.paths.captured_pair import PairParts
from unspool.models.paths.captured_shape import PassShape
from unspool.models.weights import Norm


class PairBody(Body):
    """A decoder's step with cross-attention, operator by operator as `EncoderDecoder` runs it."""

    def __init__(self, parts: PairParts, device: torch.device, dtype: torch.dtype, form: PassShape) -> None:
        spec = parts.spec.describe_decoder()
        super().__init__(spec, parts.own, device, dtype, form)
        self._parts, self._pair = parts, parts.spec
        shape = HeadShape(heads=spec.num_heads, kv_heads=spec.num_heads, width=spec.head_dim)
        if parts.biases:
            self._attend_rows = StepAttention(form.rows, shape, device, distances=parts.biases[0].shape[1])
        num_sources = triton.cdiv(form.rows, form.rows_each)
        self._attend_sources = CrossKernel(num_sources, form.rows_each * form.num_new, shape, device)
        self._across = torch.zeros(form.num_tokens, spec.num_heads * spec.head_dim, dtype=dtype, device=device)
        ahead = torch.arange(form.num_new, device=device) * (0 if form.is_forked else 1)
        self._ahead = ahead.repeat(form.rows)  # a token's offset from its row's end
        self._activate = find_activation(spec.activation)

    def run(self, inputs: StepInputs, logits: torch.Tensor) -> None:
        shape, weights, parts = self._shape, self._weights, self._parts
        self._begin(inputs)
        x = self._embed(inputs)
        for index, (layer, cross) in enumerate(zip(weights.layers, parts.crosses, strict=True)):
            assert layer.attn_norm is not None and layer.ffn_norm is not None
            read = self._attend_back(index, layer, layer.qkv(self._enter(layer.attn_norm, x)), inputs)
            x = self._leave(layer.attn_norm, x, layer.out(read))
            read = self._attend_across(index, cross.q(self._enter(cross.norm, x)), inputs)
            x = self._leave(cross.norm, x, cross.out(read))
            x = self._leave(layer.ffn_norm, x, self._feed(layer, self._enter(layer.ffn_norm, x)))
        x = weights.final_norm(x) if weights.final_norm is not None else x
        self.states[: shape.num_tokens].copy_(x)
        scale = self._pair.head_scale
        logits.copy_(weights.head(self.states if scale == 1.0 else self.states * scale))

    def _embed(self, inputs: StepInputs) -> torch.Tensor:
        shape, table, positions = self._shape, self._parts.positions, self._pair.decoder.positions
        x = self._weights.embedding(inputs.tokens.clamp(min=0)).to(self._dtype)
        if table is not None and positions is not None:
            places = inputs.lengths
            if shape.num_new > 1:
                places = places.repeat_interleave(shape.num_new, output_size=shape.num_tokens) + self._ahead
            x = x + table[(places + positions.offset).clamp(0, table.shape[0] - 1)]  # absent rows may have any
        norm = self._weights.embedding_norm
        return norm(x) if norm is not None else x

    def _attend_back(self, index: int, layer: Layer, qkv: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        biases = self._parts.biases
        self._slopes = biases[min(index, len(biases) - 1)] if biases else None
        return self._attend(index, layer, qkv, inputs)

    def _attend_across(self, index: int, queries: torch.Tensor, inputs: StepInputs) -> torch.Tensor:
        spec, scale = self._spec, self._pair.decoder.attention_scale
        self._attend_sources(queries, self._across, inputs.base, inputs.sources, index, spec.num_layers, scale)
        return self._across

    def _enter(self, norm: Norm, x: torch.Tensor) -> torch.Tensor:
        """What a part of a block reads."""
        return norm(x) if self._pair.is_norm_first else x

    def _leave(self, norm: Norm, x: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        """The states after a part of a block."""
        return x + made if self._pair.is_norm_first else norm(x + made)

    def _feed(self, layer: Layer, x: torch.Tensor) -> torch.Tensor:
        up = layer.up(x)
        if self._pair.is_gated:
            gate, value = up.chunk(2, dim=-1)
            return layer.down(self._activate(gate) * value)
        return layer.down(self._activate(up))


def make_pair_body(parts: PairParts, device: torch.device, dtype: torch.dtype, shape: PassShape) -> Body:
    """The work of a step."""
    return PairBody(parts, device, dtype, shape)

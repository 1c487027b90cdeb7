"""The work of an encoder-decoder's captured step: of one or two tokens on fused kernels, or on torch's operators.

The attention kernels read addresses and lengths on the device; nothing here may read a number on the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton

from unspool.kernels.activations import find_activation
from unspool.kernels.gpu.attention.cross_attention import CrossAttention
from unspool.kernels.gpu.attention.output_parts import Parts
from unspool.kernels.gpu.attention.parted_attention import PartedAttention
from unspool.kernels.gpu.attention.split_attention import HeadShape
from unspool.kernels.gpu.attention.step_attention import StepAttention
from unspool.kernels.gpu.products.activations import CODES
from unspool.kernels.gpu.products.parts_product import multiply_parts
from unspool.kernels.gpu.products.product import multiply, multiply_small
from unspool.kernels.gpu.sampling.sketch import HeadInput
from unspool.kernels.gpu.sampling.tokens import LearnedPositions, embed
from unspool.models.decoder.layers import Layer
from unspool.models.encoder_decoder.layers import CrossWeights
from unspool.models.paths.captured_body import Body, StepInputs
from unspool.models.paths.captured_norms import describe_head_input, norm_arguments, normalise_by
from unspool.models.paths.captured_pair_parts import PairParts
from unspool.models.paths.captured_shape import PassShape
from unspool.models.weights import AnyLinear, Embedding, Norm


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
        self._attend_sources = CrossAttention(num_sources, form.rows_each * form.num_new, shape, device)
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


class FusedPairBody(PairBody):
    """Eight kernels per layer for a few tokens: norms, biases, activations and residuals are part of the products.

    If norms come after the sums, a product that reads a sum normalises it and writes the result, to which the next
    product adds: the two take turns in two buffers.
    """

    def __init__(
        self,
        parts: PairParts,
        device: torch.device,
        dtype: torch.dtype,
        form: PassShape,
        *,
        small: Sequence[AnyLinear] = (),  # those of the blocks' products that are of `multiply_small`
    ) -> None:
        super().__init__(parts, device, dtype, form)
        self._small = {id(linear) for linear in small}
        spec = self._spec
        self._code = CODES[spec.activation]
        self._scale = float(torch.tensor(parts.own.embedding.scale, dtype=dtype))  # rounded as in `Embedding`

        def make(width: int) -> torch.Tensor:
            return torch.zeros(form.num_tokens, width, dtype=dtype, device=device)

        self._buffers = make(spec.hidden_size), make(spec.hidden_size)
        self._x, self._spare = self._buffers
        self._queries = make(spec.num_heads * spec.head_dim)
        self._qkv = make(3 * spec.num_heads * spec.head_dim)
        self._inner = make(spec.ffn_size)
        self._late: Norm | None = None  # the norm that the state has still to go through

    gives_head_input = True

    def run(self, inputs: StepInputs, logits: torch.Tensor) -> None:
        self._run_blocks(inputs)
        self._read_out(logits)

    def run_to_head(self, inputs: StepInputs) -> HeadInput:
        self._run_blocks(inputs)
        return describe_head_input(self._x, self._find_final(), self._pair.head_scale)

    def _find_final(self) -> Norm | None:
        """The norm that the head reads the state through."""
        return self._late if self._late is not None else self._weights.final_norm

    def _run_blocks(self, inputs: StepInputs) -> None:
        """Launch all but the final norm and the head."""
        weights, parts = self._weights, self._parts
        self._x, self._spare = self._buffers
        self._late = None
        self._begin(inputs)
        self._embed_states(inputs)
        for index, (layer, cross) in enumerate(zip(weights.layers, parts.crosses, strict=True)):
            assert layer.attn_norm is not None and layer.ffn_norm is not None
            self._multiply_state(layer.qkv, layer.attn_norm, self._qkv)
            self._add_own(index, layer, inputs)
            self._multiply_state(cross.q, cross.norm, self._queries)
            self._add_read(index, cross, inputs)
            up = {"activation": self._code, "is_gated": self._pair.is_gated}
            self._multiply_state(layer.up, layer.ffn_norm, self._inner, **up)
            self._add(layer.down, layer.ffn_norm, self._inner)

    def _read_out(self, logits: torch.Tensor) -> None:
        """The logits of the state, and the states themselves if they are wanted."""
        weights = self._weights
        final = self._find_final()
        scale = self._pair.head_scale
        if not self._shape.wants_states and scale == 1.0:
            before = norm_arguments(final) if final is not None else {}
            multiply(weights.head.operand, self._x, logits, bias=weights.head.bias, **before)
            return
        if final is None:
            self.states.copy_(self._x)
        else:
            normalise_by(final, self._x, self.states)
        given = self.states if scale == 1.0 else self.states * scale
        multiply(weights.head.operand, given, logits, bias=weights.head.bias)

    def _embed_states(self, inputs: StepInputs) -> None:
        weights = self._weights
        if not isinstance(weights.embedding, Embedding):
            self._x.copy_(self._embed(inputs))
            return
        embed(inputs.tokens, weights.embedding.weight, self._scale, self._x, self._find_places(inputs))
        norm = weights.embedding_norm
        if norm is None:
            return
        if self._pair.is_norm_first:
            normalise_by(norm, self._x, self._x)
        else:
            self._late = norm

    def _find_places(self, inputs: StepInputs) -> LearnedPositions | None:
        table, positions = self._parts.positions, self._pair.decoder.positions
        if table is None or positions is None:
            return None
        return LearnedPositions(table, positions.offset, inputs.lengths, self._shape.is_forked)

    def _find_product(self, linear: AnyLinear) -> Callable[..., None]:
        """The kernels for a matrix of a block."""
        return multiply_small if id(linear) in self._small else multiply

    def _multiply_state(self, linear: AnyLinear, norm: Norm, out: torch.Tensor, **after: Any) -> None:
        """A product of the state, after the norm that comes before it."""
        product = self._find_product(linear)
        if self._pair.is_norm_first:
            product(linear.operand, self._x, out, bias=linear.bias, **norm_arguments(norm), **after)
            return
        late, self._late = self._late, None
        before = {"kept": self._spare, **norm_arguments(late)} if late is not None else {}
        product(linear.operand, self._x, out, bias=linear.bias, **before, **after)
        if late is not None:
            self._x, self._spare = self._spare, self._x

    def _add_own(self, index: int, layer: Layer, inputs: StepInputs) -> None:
        """Add what the token reads from its row's keys."""
        assert layer.attn_norm is not None
        self._add(layer.out, layer.attn_norm, self._attend_back(index, layer, self._qkv, inputs))

    def _add_read(self, index: int, cross: CrossWeights, inputs: StepInputs) -> None:
        """Add what the token reads from its source's keys."""
        self._add(cross.out, cross.norm, self._attend_across(index, self._queries, inputs))

    def _add(self, linear: AnyLinear, norm: Norm, y: torch.Tensor) -> None:
        """Add a product to the state, which goes through a norm next if norms come after."""
        product = self._find_product(linear)
        product(linear.operand, y, self._x, bias=linear.bias, adds=True)
        if not self._pair.is_norm_first:
            self._late = norm


class PartedPairBody(FusedPairBody):
    """A fused step of one token a row, whose attentions leave their outputs in parts to the products that follow."""

    def __init__(
        self,
        parts: PairParts,
        device: torch.device,
        dtype: torch.dtype,
        form: PassShape,
        *,
        small: Sequence[AnyLinear] = (),
    ) -> None:
        super().__init__(parts, device, dtype, form, small=small)
        shape = shape_heads(parts)
        distances = parts.biases[0].shape[1] if parts.biases else 0
        self._attend_own = PartedAttention(shape, device, dtype, writes=True, rows=form.rows, distances=distances)
        self._attend_source = PartedAttention(
            shape,
            device,
            dtype,
            writes=False,
            rows=form.rows,
            rows_each=form.rows_each,
            is_sound=parts.spec.features is not None,
        )

    def _add_own(self, index: int, layer: Layer, inputs: StepInputs) -> None:
        biases = self._parts.biases
        found = self._attend_own(
            self._qkv,
            inputs.base,
            inputs.table,
            inputs.lengths,
            index,
            self._spec.num_layers,
            self._spec.scale_of(index),
            biases=biases[min(index, len(biases) - 1)] if biases else None,
        )
        self._add_parts(layer.out, layer.attn_norm, found)

    def _add_read(self, index: int, cross: CrossWeights, inputs: StepInputs) -> None:
        num_layers = self._spec.num_layers
        found = self._attend_source(
            self._queries,
            inputs.base,
            inputs.sources,
            inputs.sources[num_layers + 1 :],
            index,
            num_layers,
            self._pair.decoder.attention_scale,
        )
        self._add_parts(cross.out, cross.norm, found)

    def _add_parts(self, linear: AnyLinear, norm: Norm | None, parts: Parts) -> None:
        weight = linear.operand
        assert isinstance(weight, torch.Tensor)
        if id(linear) in self._small:
            multiply_small(weight, parts, self._x, bias=linear.bias, adds=True)
        else:
            multiply_parts(weight, parts, self._x, linear.bias)
        if not self._pair.is_norm_first:
            self._late = norm


def shape_heads(parts: PairParts) -> HeadShape:
    """The decoder's heads."""
    decoder = parts.spec.decoder
    return HeadShape(heads=decoder.num_heads, kv_heads=decoder.num_heads, width=decoder.head_dim)

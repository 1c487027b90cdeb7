"""Captured steps on fused kernels: nearly all blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from unspool.kernels.gpu.products.activations import CODES
from unspool.kernels.gpu.products.parallel_product import Branch
from unspool.kernels.gpu.products.parts import add_parts
from unspool.kernels.gpu.products.product import (
    find_few_tiling,
    find_order,
    find_parts_tiling,
    multiply,
    multiply_beside,
    multiply_both,
    multiply_parts,
    multiply_small,
    takes_addends,
)
from unspool.kernels.gpu.products.result import Addend
from unspool.kernels.gpu.products.rows_tilings import MOST_SPLITS
from unspool.kernels.gpu.products.words_product import unpack_words
from unspool.kernels.gpu.sampling.sketch import HeadInput
from unspool.kernels.gpu.sampling.tokens import LearnedPositions, embed
from unspool.models.decoder.layers import DecoderWeights, Layer
from unspool.models.decoder.spec import DecoderSpec
from unspool.models.paths.captured_body import Body, StepInputs, find_positions
from unspool.models.paths.captured_norms import describe_head_input, norm_arguments, normalise_by
from unspool.models.paths.captured_shape import PassShape
from unspool.models.weights import AnyLinear, Linear, Norm, WordEmbedding, WordLinear

# Rows whose queries, keys and values are left in parts, where that was measured to be faster, and in how many.
PARTED_WORDS: Final = range(2, 65)
PARTED_NUMBERS: Final = (*range(3, 9), *range(17, 65))
MOST_PARTS_OF_NUMBERS: Final = 2
SMALL_ROWS: Final = range(2, 9)  # tokens that small matrices are multiplied with by a kernel of their own


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


def are_small(layers: Sequence[Layer], num_tokens: int, spec: DecoderSpec) -> bool:
    """Whether all matrices of the blocks are so small that `few_product` multiplies so many tokens by them."""

    def find(linear: AnyLinear, *, has_norm: bool = False, is_gated: bool = False) -> bool:
        tiling = find_few_tiling(linear.operand, num_tokens, has_norm=has_norm, is_gated=is_gated)
        return isinstance(linear, Linear) and tiling is not None

    return all(
        layer.mixture is None
        and find(layer.qkv, has_norm=layer.attn_norm is not None)
        and find(layer.up, has_norm=layer.ffn_norm is not None, is_gated=spec.is_gated)
        and find(layer.out)
        and find(layer.down)
        for layer in layers
    )


class FusedBody(Body):
    """Five kernels per layer for one row, and for a few if matrices are small: norms before and residuals after the
    products are part of them."""

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
        self._are_small = shape.num_tokens in SMALL_ROWS and are_small(self._layers, shape.num_tokens, spec)

    gives_head_input = True

    def run(self, inputs: StepInputs, logits: torch.Tensor) -> None:
        self._run_blocks(inputs)
        self._read_out(logits)

    def run_to_head(self, inputs: StepInputs) -> HeadInput:
        self._run_blocks(inputs)
        self._settle()
        return describe_head_input(self._x, self._weights.final_norm)

    def _run_blocks(self, inputs: StepInputs) -> None:
        """Launch all but the final norm and the head."""
        self._x, self._spare = self._buffers
        self._begin(inputs)
        self._embed(inputs)
        for index, layer in enumerate(self._layers):
            if self._spec.residual == "parallel":
                self._run_parallel(index, layer, inputs)
            else:
                self._run_sequential(index, layer, inputs)

    def _read_out(self, logits: torch.Tensor) -> None:
        """The logits of the state, and of the states of early layers."""
        weights, shape = self._weights, self._shape
        if not shape.early and not shape.wants_states:
            self._multiply_state(weights.head, weights.final_norm, logits)
            return
        self._settle()
        states = self.states[: shape.num_tokens]
        if weights.final_norm is None:
            states.copy_(self._x)
        else:
            normalise_by(weights.final_norm, self._x, states)
        multiply(weights.head.operand, self.states, logits, bias=weights.head.bias)

    def _run_sequential(self, index: int, layer: Layer, inputs: StepInputs) -> None:
        qkv = self._multiply_qkv(layer)
        self._keep_early(index, self._x)
        self._add_attention(index, layer, qkv, inputs)
        if layer.mixture is not None:
            self._feed_mixture(layer, inputs)
            return
        self._feed(layer, layer.ffn_norm)
        self._add(layer.down, self._inner, layer.post_ffn_norm, is_arranged=self._find_inner_order(layer) > 0)

    def _add_attention(self, index: int, layer: Layer, qkv: torch.Tensor, inputs: StepInputs) -> None:
        """Add what the tokens read from their rows' keys."""
        order = self._find_read_order(layer)
        read = self._attend(index, layer, qkv, inputs, order)
        self._add(layer.out, read, layer.post_attn_norm, is_arranged=order > 0)

    def _run_parallel(self, index: int, layer: Layer, inputs: StepInputs) -> None:
        """Three kernels if attention and the feed-forward share two of them."""
        if index in self._shape.early:
            self._settle()
        self._keep_early(index, self._x)
        norm = layer.ffn_norm if layer.ffn_norm is not None else layer.attn_norm
        pairs = self._pair(layer, norm) if self._shape.num_tokens == 1 else None
        if pairs is None:
            self._multiply_state(layer.qkv, layer.attn_norm, self._qkv)
            order = self._find_read_order(layer)
            read = self._attend(index, layer, self._qkv, inputs, order)
            self._feed(layer, norm)
            self._add(layer.out, read, None, is_arranged=order > 0)
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
            normalise_by(weights.embedding_norm, x, x)

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

    def _find_read_order(self, layer: Layer) -> int:
        """The order of what the attention reads, if it can arrange it."""
        return find_order(layer.out.operand, self._read) if self._attend_rows.arranges else 0

    def _find_inner_order(self, layer: Layer) -> int:
        """The order of the inner state, if the product that writes it can arrange it."""
        return find_order(layer.down.operand, self._inner) if find_order(layer.up.operand, self._x) else 0

    def _multiply_state(self, linear: AnyLinear, norm: Norm | None, out: torch.Tensor, **after: Any) -> None:
        """A product of the state, after a norm."""
        if self._are_small and linear is not self._weights.head:
            self._settle()
            before = norm_arguments(norm) if norm is not None else {}
            after.pop("order", None)  # of packed numbers
            multiply_small(linear.operand, self._x, out, bias=linear.bias, **before, **after)
            return
        addend = None
        if self._pending is not None and takes_addends(linear.operand, self._shape.num_tokens):
            assert self._pending.weight is not None
            addend = Addend(self._made, self._pending.weight, self._pending.eps, self._spare)
            self._pending = None
        if self._parts is not None and norm is not None:
            multiply(linear.operand, self._norm_state(linear, norm), out, bias=linear.bias, is_arranged=True, **after)
            return
        self._settle()
        before = norm_arguments(norm) if norm is not None else {}
        multiply(linear.operand, self._x, out, bias=linear.bias, addend=addend, **before, **after)
        if addend is not None:
            self._x, self._spare = self._spare, self._x

    def _norm_state(self, linear: AnyLinear, norm: Norm) -> torch.Tensor:
        """The state after a norm, in the order in which a product reads it."""
        order = find_order(linear.operand, self._x)
        if self._parts is None:
            self._settle()
            normalise_by(norm, self._x, self._spare, order=order)
        else:
            parts, bias = self._parts
            self._parts = None
            add_parts(parts, self._x, bias=bias, adds=True, normed=self._spare, order=order, **norm_arguments(norm))
        return self._spare

    def _multiply_qkv(self, layer: Layer) -> torch.Tensor:
        """Queries, keys and values; for a few rows in parts, which the attention adds up."""
        linear, norm = layer.qkv, layer.attn_norm
        is_packed = isinstance(linear, WordLinear)
        most = MOST_SPLITS if is_packed else MOST_PARTS_OF_NUMBERS
        is_parted = (
            self._attend_rows.takes_parts
            and not self._are_small
            and self._shape.num_tokens in (PARTED_WORDS if is_packed else PARTED_NUMBERS)
            and linear.bias is None
            and not self._spec.norms_heads_apart
            and find_parts_tiling(linear.operand, self._x, most) is not None
        )
        if is_parted and norm is not None:
            parts = multiply_parts(linear.operand, self._norm_state(linear, norm), is_arranged=True, most=most)
            assert parts is not None
            return parts
        self._multiply_state(linear, norm, self._qkv)
        return self._qkv

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
            parts = None if self._are_small else multiply_parts(linear.operand, y, is_arranged=is_arranged)
            if parts is not None:
                self._parts = parts, linear.bias
            else:
                self._multiply(linear, y, self._x, adds=True, is_arranged=is_arranged)
            return
        self._multiply(linear, y, self._made, is_arranged=is_arranged)
        self._pending = norm
        if norm.is_layer:
            self._settle()

    def _multiply(
        self, linear: AnyLinear, y: torch.Tensor, out: torch.Tensor, *, is_arranged: bool, **after: Any
    ) -> None:
        """A product of a block that reads no norm."""
        if self._are_small:
            multiply_small(linear.operand, y, out, bias=linear.bias, **after)
        else:
            multiply(linear.operand, y, out, bias=linear.bias, is_arranged=is_arranged, **after)

    def _settle(self) -> None:
        """Add what is still to be added to the state."""
        if self._parts is not None:
            parts, bias = self._parts
            self._parts = None
            add_parts(parts, self._x, bias=bias, adds=True)
        if self._pending is not None:
            normalise_by(self._pending, self._made, self._x, adds=True)
            self._pending = None

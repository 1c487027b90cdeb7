"""A step of one row whose attention leaves its output in parts to the product that follows: heads that share keys.

A graph is made for a number of keys at most, because with few of them few programs are the fastest.
"""

from __future__ import annotations

import torch

from unspool.kernels.gpu.attention.output_parts import Turning
from unspool.kernels.gpu.attention.parted_attention import PartedAttention, list_shared_tilings
from unspool.kernels.gpu.attention.split_attention import HeadShape
from unspool.kernels.gpu.products.parts_product import MOST_NUMBERS, multiply_parts
from unspool.kernels.gpu.products.product import find_few_tiling, multiply_small
from unspool.models.decoder.layers import DecoderWeights, Layer
from unspool.models.decoder.spec import DecoderSpec
from unspool.models.paths.captured_body import StepInputs
from unspool.models.paths.captured_fused import FusedBody, can_fuse
from unspool.models.paths.captured_shape import PassShape
from unspool.models.weights import Linear


def list_limits(spec: DecoderSpec, weights: DecoderWeights, dtype: torch.dtype) -> tuple[int, ...]:
    """Up to how many keys there are steps of this kind, rising; none if they would not be a model's fastest."""
    tilings = list_shared_tilings(_shape_heads(spec), dtype)
    is_plain = not (spec.attention_softcap or spec.alibi or spec.has_sinks or spec.norms_heads_apart)
    has_norms = any(layer.q_norm is not None for layer in weights.layers)
    is_turned = spec.rope is not None and not (spec.unturned and has_norms)  # norms are a part of turning there
    is_block = spec.norm_placement == "pre" and spec.residual == "sequential" and can_fuse(spec)
    if not (is_plain and is_turned and is_block and tilings):
        return ()
    for layer in weights.layers:
        if not isinstance(layer.out, Linear) or layer.out.weight.numel() > MOST_NUMBERS:
            return ()
    return tuple(limit for limit in tilings if spec.window is None or limit <= spec.window)


class PartedBody(FusedBody):
    """Five kernels per layer, as of its base."""

    def __init__(
        self, spec: DecoderSpec, weights: DecoderWeights, device: torch.device, dtype: torch.dtype, shape: PassShape
    ) -> None:
        super().__init__(spec, weights, device, dtype, shape)
        heads = _shape_heads(spec)
        tiling = list_shared_tilings(heads, dtype)[shape.most_keys]
        self._attend_parted = PartedAttention(heads, device, dtype, writes=True, tiling=tiling)

    def _add_attention(self, index: int, layer: Layer, qkv: torch.Tensor, inputs: StepInputs) -> None:
        spec = self._spec
        parts = self._attend_parted(
            qkv,
            inputs.base,
            inputs.table,
            inputs.lengths,
            index,
            spec.num_layers,
            spec.scale_of(index),
            turning=self._find_turning(index, layer),
        )
        weight = layer.out.operand
        assert isinstance(weight, torch.Tensor)
        self._settle()
        if find_few_tiling(weight, 1) is not None:
            multiply_small(weight, parts, self._x, bias=layer.out.bias, adds=True)
        else:
            multiply_parts(weight, parts, self._x, layer.out.bias)

    def _find_turning(self, index: int, layer: Layer) -> Turning | None:
        spec = self._spec
        if index in spec.unturned:
            return None
        turns = self._ropes[spec.kind_of(index)][2]
        q_norm, k_norm = (None if norm is None else norm.weight for norm in (layer.q_norm, layer.k_norm))
        return Turning(turns, layer.is_halved, q_norm, k_norm, spec.norm.eps)


def _shape_heads(spec: DecoderSpec) -> HeadShape:
    return HeadShape(heads=spec.num_heads, kv_heads=spec.num_kv_heads, width=spec.head_dim)

"""Which body an encoder-decoder's captured step has."""

from __future__ import annotations

from typing import Final

import torch

from unspool.kernels.gpu.attention.parted_attention import takes_parts
from unspool.kernels.gpu.products.activations import CODES
from unspool.kernels.gpu.products.product import takes_addends
from unspool.kernels.gpu.products.rows_tilings import starts_early
from unspool.models.paths.captured_body import Body
from unspool.models.paths.captured_pair_blocks import FusedPairBody, PairBody, PartedPairBody, shape_heads
from unspool.models.paths.captured_pair_parts import PairParts
from unspool.models.paths.captured_pair_rows import RowsPairBody
from unspool.models.paths.captured_shape import PassShape

FEW: Final = 2  # tokens that our product kernels read a matrix for
MANY: Final = 64  # tokens up to which our kernels on the tensor cores are faster than cuBLAS and operators around it


def make_pair_body(parts: PairParts, device: torch.device, dtype: torch.dtype, shape: PassShape) -> Body:
    """The fastest body for a number of tokens."""
    if _can_fuse(parts, shape):
        return (PartedPairBody if _can_part(parts, shape) else FusedPairBody)(parts, device, dtype, shape)
    if _can_fuse_rows(parts, dtype, shape):
        return RowsPairBody(parts, device, dtype, shape)
    return PairBody(parts, device, dtype, shape)


def _can_fuse(parts: PairParts, shape: PassShape) -> bool:
    if shape.num_tokens > FEW or parts.spec.activation not in CODES:
        return False
    return parts.spec.is_norm_first or takes_addends(parts.own.layers[0].qkv.operand, shape.num_tokens)


def _can_fuse_rows(parts: PairParts, dtype: torch.dtype, shape: PassShape) -> bool:
    """Whether our kernels multiply so many tokens on the tensor cores, which know no exact float32."""
    return dtype != torch.float32 and shape.num_tokens <= MANY and parts.spec.activation in CODES and starts_early()


def _can_part(parts: PairParts, shape: PassShape) -> bool:
    """Whether both attentions of a fused step can leave their outputs in parts."""
    if shape.num_tokens > 1 or shape.packing is not None or shape.away or shape.num_layers is not None:
        return False
    outs = [*(layer.out.operand for layer in parts.own.layers), *(cross.out.operand for cross in parts.crosses)]
    return takes_parts(shape_heads(parts), shape.layout) and all(isinstance(out, torch.Tensor) for out in outs)

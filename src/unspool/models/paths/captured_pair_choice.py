"""Which body an encoder-decoder's captured step has."""

from __future__ import annotations

from typing import Final

import torch

from unspool.kernels.gpu.attention.parted_attention import takes_parts
from unspool.kernels.gpu.products.activations import CODES
from unspool.kernels.gpu.products.product import find_few_tiling, takes_addends
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
    is_small = _is_small(parts, shape)
    if is_small or _can_fuse(parts, shape):
        kind = PartedPairBody if _can_part(parts, shape) else FusedPairBody
        return kind(parts, device, dtype, shape, is_small=is_small)
    if _can_fuse_rows(parts, dtype, shape):
        return RowsPairBody(parts, device, dtype, shape)
    return PairBody(parts, device, dtype, shape)


def _is_small(parts: PairParts, shape: PassShape) -> bool:
    """Whether a block's matrices are small enough for `multiply_small`, and it is the fastest.

    Steps on an H200, 2026-11-18: of four beams 0.80 to 0.86 of the time of others (BART-large, OPUS-MT, T5-large,
    Whisper-large-v3), of one row 0.85 with norms of squares (T5-large); with layer norms one row gains nothing.
    """
    spec, layers = parts.spec, parts.own.layers
    if spec.activation not in CODES or (shape.num_tokens == 1 and any(one.norm.is_layer for one in parts.crosses)):
        return False
    gated = [layer.up for layer in layers] if spec.is_gated else []
    normed = [*(layer.qkv for layer in layers), *(cross.q for cross in parts.crosses)]
    normed += [] if spec.is_gated else [layer.up for layer in layers]
    added = [*(one for layer in layers for one in (layer.out, layer.down)), *(cross.out for cross in parts.crosses)]
    if not spec.is_norm_first and (gated or any(one.operand.shape[0] < one.operand.shape[1] for one in normed)):
        return False  # who normalises a sum also writes it, each program as many numbers as it has outputs
    kinds = [(normed, True, False), (gated, True, True), (added, False, False)]
    return all(
        find_few_tiling(linear.operand, shape.num_tokens, has_norm=has_norm, is_gated=is_gated) is not None
        for linears, has_norm, is_gated in kinds
        for linear in linears
    )


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

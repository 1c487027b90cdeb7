"""Which body an encoder-decoder's captured step has."""

from __future__ import annotations

from typing import Final

import torch

from unspool.kernels.gpu.attention.parted_attention import holds_keys, takes_parts
from unspool.kernels.gpu.products.activations import CODES
from unspool.kernels.gpu.products.product import find_few_tiling, takes_addends
from unspool.kernels.gpu.products.rows_tilings import starts_early
from unspool.models.paths.captured_body import Body
from unspool.models.paths.captured_pair_blocks import FusedPairBody, PairBody, PartedPairBody, shape_heads
from unspool.models.paths.captured_pair_parts import PairParts
from unspool.models.paths.captured_pair_resident import ResidentPairBody, can_reside
from unspool.models.paths.captured_pair_rows import RowsPairBody
from unspool.models.paths.captured_shape import PassShape
from unspool.models.weights import AnyLinear

FEW: Final = 2  # tokens that our product kernels read a matrix for
SHORT: Final = 2048  # numbers of a row of the last matrix: one row of the input gains from this on
MOST_NUMBERS_OF_ONE: Final = 1 << 22  # of a matrix that gains with one row and layer norms
MANY: Final = 64  # tokens up to which our kernels on the tensor cores are faster than cuBLAS and operators around it


def make_pair_body(parts: PairParts, device: torch.device, dtype: torch.dtype, shape: PassShape) -> Body:
    """The fastest body for a number of tokens."""
    small = choose_small(parts, shape)
    are_all_small = _are_all(parts, small)
    if shape.num_tokens == 1 and _can_part(parts, dtype, shape, are_all_small) and can_reside(parts, dtype):
        return ResidentPairBody(parts, device, dtype, shape)
    if are_all_small or _can_fuse(parts, shape):
        kind = PartedPairBody if _can_part(parts, dtype, shape, are_all_small) else FusedPairBody
        return kind(parts, device, dtype, shape, small=small)
    if _can_fuse_rows(parts, dtype, shape):
        return RowsPairBody(parts, device, dtype, shape)
    return PairBody(parts, device, dtype, shape)


def is_fused(parts: PairParts, dtype: torch.dtype, shape: PassShape) -> bool:
    """Whether the fastest body for a number of tokens is one of fused kernels."""
    if _can_fuse(parts, shape) or _can_fuse_rows(parts, dtype, shape):
        return True
    return _are_all(parts, choose_small(parts, shape))


def _are_all(parts: PairParts, small: list[AnyLinear]) -> bool:
    """Whether these are all products of the blocks."""
    return len(small) == sum(map(len, _list_products(parts).values()))


def choose_small(parts: PairParts, shape: PassShape) -> list[AnyLinear]:
    """The products of the blocks that are the fastest by `multiply_small`: all or none, or for one row some.

    Steps on an H200, 2026-11-18: of four beams 0.80 to 0.86 of the time of others (BART-large, OPUS-MT, T5-large,
    Whisper-large-v3), of one row 0.85 with norms of squares (T5-large). With layer norms one row gains nothing by all
    of them, but by some (BART-large, NLLB, OPUS-MT; Whisper-large-v3 by those of what attentions read).
    """
    products = _list_products(parts)
    names = {name for name, linears in products.items() if _can_be_small(name, linears, parts, shape)}
    if shape.num_tokens > 1 or not any(cross.norm.is_layer for cross in parts.crosses):
        names = names if len(names) == len(products) else set()
    else:
        names = {name for name in names - {"state"} if _have_few_numbers(products[name])}
        if products["down"][0].operand.shape[1] <= SHORT:
            names.discard("down")
    return [linear for name in names for linear in products[name]]


def _list_products(parts: PairParts) -> dict[str, list[AnyLinear]]:
    """The products of all blocks: of the state for an attention, of what an attention reads, and of the feed-forward's
    two sides."""
    layers, crosses = parts.own.layers, parts.crosses
    return {
        "state": [*(layer.qkv for layer in layers), *(cross.q for cross in crosses)],
        "read": [*(layer.out for layer in layers), *(cross.out for cross in crosses)],
        "up": [layer.up for layer in layers],
        "down": [layer.down for layer in layers],
    }


def _can_be_small(name: str, linears: list[AnyLinear], parts: PairParts, shape: PassShape) -> bool:
    """Whether there is a tiling of `multiply_small` for some products."""
    spec, has_norm, is_gated = parts.spec, name in ("state", "up"), name == "up" and parts.spec.is_gated
    shapes = [linear.operand.shape for linear in linears]
    if spec.activation not in CODES:
        return False
    if has_norm and not spec.is_norm_first and (is_gated or any(outputs < inputs for outputs, inputs in shapes)):
        return False  # who normalises a sum also writes it, each program as many numbers as it has outputs
    return all(
        find_few_tiling(linear.operand, shape.num_tokens, has_norm=has_norm, is_gated=is_gated) is not None
        for linear in linears
    )


def _have_few_numbers(linears: list[AnyLinear]) -> bool:
    return all(linear.operand.shape[0] * linear.operand.shape[1] <= MOST_NUMBERS_OF_ONE for linear in linears)


def _can_fuse(parts: PairParts, shape: PassShape) -> bool:
    if shape.num_tokens > FEW or parts.spec.activation not in CODES:
        return False
    return parts.spec.is_norm_first or takes_addends(parts.own.layers[0].qkv.operand, shape.num_tokens)


def _can_fuse_rows(parts: PairParts, dtype: torch.dtype, shape: PassShape) -> bool:
    """Whether our kernels multiply so many tokens on the tensor cores, which know no exact float32."""
    return dtype != torch.float32 and shape.num_tokens <= MANY and parts.spec.activation in CODES and starts_early()


def _can_part(parts: PairParts, dtype: torch.dtype, shape: PassShape, are_all_small: bool) -> bool:
    """Whether both attentions of a fused step can leave their outputs in parts, which small products add up."""
    if shape.num_new > 1 or shape.packing is not None or shape.away or shape.num_layers is not None:
        return False
    if shape.rows > 1:
        is_even = shape.rows % shape.rows_each == 0
        if not (are_all_small and is_even and holds_keys(shape_heads(parts), dtype)):
            return False
    are_plain = all(isinstance(linear.operand, torch.Tensor) for linear in _list_products(parts)["read"])
    return takes_parts(shape_heads(parts), shape.layout) and are_plain

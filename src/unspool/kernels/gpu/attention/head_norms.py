"""Norms of queries and keys before attention, in place: layer norms, weights of each head, norms over all heads.

The most common kind, one of root mean squares per head, is part of the attention kernels. The reference is
`models.decoder.layers.norm_heads`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch
import triton
import triton.language as tl

from unspool.kernels.gpu.launching import launch, launch_options, let_next_start, wait_for_input
from unspool.kernels.gpu.products.norms import find_moments

_MANY: Final = 2048  # numbers of a norm

Span = Literal["head", "each", "whole"]


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """The norm of queries or of keys."""

    weight: torch.Tensor | None  # (width,), or (heads * width,) for other spans than "head"
    shift: torch.Tensor | None
    eps: float
    is_layer: bool


@triton.jit
def _norm_heads(
    QKV, Q_WEIGHT, K_WEIGHT, Q_SHIFT, K_SHIFT, eps,
    Q_PARTS: tl.constexpr, Q_WIDTH: tl.constexpr, K_WIDTH: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
    IS_LAYER: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_SHIFT: tl.constexpr, HAS_OWN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    is_query = part < Q_PARTS
    nth = tl.where(is_query, part, part - Q_PARTS)
    width = tl.where(is_query, Q_WIDTH, K_WIDTH)
    at = tl.arange(0, BLOCK)
    is_there = at < width
    own = at
    if HAS_OWN:
        own += nth * width
    # No kernel writes the weights: they are loaded before the queries are there.
    weight, shift = 1.0, 0.0
    if HAS_WEIGHT:
        weight = tl.load(Q_WEIGHT + own, mask=is_there & is_query, other=0.0).to(tl.float32)
        weight += tl.load(K_WEIGHT + own, mask=is_there & (part >= Q_PARTS), other=0.0).to(tl.float32)
    if HAS_SHIFT:
        shift = tl.load(Q_SHIFT + own, mask=is_there & is_query, other=0.0).to(tl.float32)
        shift += tl.load(K_SHIFT + own, mask=is_there & (part >= Q_PARTS), other=0.0).to(tl.float32)
    let_next_start(PDL)
    wait_for_input(PDL)
    first = QKV + row * STRIDE + tl.where(is_query, 0, Q_PARTS * Q_WIDTH) + nth * width
    x = tl.load(first + at, mask=is_there, other=0.0).to(tl.float32)
    if IS_LAYER:
        pivot = tl.load(first).to(tl.float32)
        less = tl.where(is_there, x - pivot, 0.0)
        mean, root = find_moments(less, less * less, pivot, eps, width)
        x = (x - mean) * root
    else:
        x *= tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(first + at, (x * weight + shift).to(QKV.dtype.element_ty), mask=is_there)


def norm_heads_(
    qkv: torch.Tensor,  # (tokens, (heads + 2 * kv_heads) * width)
    q_norm: HeadNorm,
    k_norm: HeadNorm,
    heads: int,
    kv_heads: int,
    width: int,
    span: Span,
) -> None:
    """Normalise queries and keys where they are; both norms are of one kind."""
    is_whole = span == "whole"
    parts, q_width, k_width = (1, heads * width, kv_heads * width) if is_whole else (heads, width, width)
    block = triton.next_power_of_2(max(q_width, k_width))
    shifts = [norm.shift if norm.shift is not None else qkv for norm in (q_norm, k_norm)]
    weights = [norm.weight if norm.weight is not None else qkv for norm in (q_norm, k_norm)]
    launch(
        _norm_heads,
        (qkv.shape[0], 2 if is_whole else heads + kv_heads),
        qkv,
        *weights,
        *shifts,
        q_norm.eps,
        Q_PARTS=parts,
        Q_WIDTH=q_width,
        K_WIDTH=k_width,
        STRIDE=qkv.shape[1],
        BLOCK=block,
        IS_LAYER=q_norm.is_layer,
        HAS_WEIGHT=q_norm.weight is not None,
        HAS_SHIFT=q_norm.shift is not None,
        HAS_OWN=span == "each",
        num_warps=8 if block >= _MANY else 4 if block >= 512 else 1,
        **launch_options(),
    )

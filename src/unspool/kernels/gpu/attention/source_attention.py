"""Attention of whole sources over themselves, both ways: an online softmax over tiles of keys (FlashAttention).

The reference is `F.scaled_dot_product_attention` with a mask of the keys beyond each row's length, and T5's biases by
distance. A program has some queries of one head; tiles are copied by Hopper's copy engine. Lengths are read on the
device, so that a captured pass serves all of them. Of a program beyond its row's length the output is zero.

Biases are the same along the diagonals of a tile, and a tile has as many keys as queries: so there are few different
tiles of them, which lie in memory as they are added (`lay_out_biases`). Keys beyond those have one bias a side.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from unspool.kernels.gpu.attention.prompt_attention import PromptTiling
from unspool.kernels.gpu.launching import launch

_LOG2_E: Final = 1.4426950408889634
SOURCES: Final = PromptTiling(64, 64, 4, 2, 168)  # found on an H200, 2026-11-17


@triton.jit
def _see_keys(
    q, K, V, BIASES, row, head, start, length, first, scale, highest, total, read,
    D: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr, IS_NEAR: tl.constexpr, IS_LAST: tl.constexpr,
):  # fmt: skip
    """Continue the softmax over a tile of keys; those that are `near` have biases of their own."""
    k = tl.reshape(K.load([row, head, start, 0]), (BN, D))
    scores = tl.dot(q, tl.trans(k)) * scale
    place = start + tl.arange(0, BN)
    if TILES > 0:
        ahead = tl.minimum(tl.maximum((start - first) // BN, -(TILES // 2)), TILES // 2)
        at = BIASES + (head * TILES + TILES // 2 + ahead) * BN * BN
        if IS_NEAR:
            query = tl.arange(0, BN)
            scores += tl.load(at + query[:, None] * BN + query[None, :])
        else:  # all numbers of the outer tiles are one
            scores += tl.load(at)
    if IS_LAST:
        scores = tl.where((place < length)[None, :], scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 1))
    weights = tl.exp2(scores - higher[:, None])
    fade = tl.exp2(highest - higher)
    total = total * fade + tl.sum(weights, 1)
    read = read * fade[:, None]
    v = tl.reshape(V.load([row, head, start, 0]), (BN, D))
    read = tl.dot(weights.to(v.dtype), v, read)
    return higher, total, read


@triton.jit(do_not_specialize=["T"])
def _attend_source(
    Q, K, V, OUT, LENGTHS, BIASES, T, scale,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, TILES: tl.constexpr, HAS_LENGTHS: tl.constexpr,
):  # fmt: skip
    first, head, row = tl.program_id(0) * BM, tl.program_id(1), tl.program_id(2)
    length = T
    if HAS_LENGTHS:
        length = tl.minimum(tl.load(LENGTHS + row), T)
    if first < length:
        q = tl.reshape(Q.load([row, head, first, 0]), (BM, D))
        highest = tl.full((BM,), float("-inf"), tl.float32)
        total = tl.zeros((BM,), tl.float32)
        read = tl.zeros((BM, D), tl.float32)
        whole = length // BN * BN
        near, beyond = 0, 0
        if TILES > 0:  # keys before `near` and from `beyond` on are farther than biases tell apart
            near = tl.minimum(tl.maximum(first - (TILES // 2 - 1) * BN, 0), whole)
            beyond = tl.minimum(first + TILES // 2 * BN, whole)
            for start in tl.range(0, near, BN):
                highest, total, read = _see_keys(
                    q, K, V, BIASES, row, head, start, length, first, scale, highest, total, read,
                    D, BN, TILES, False, False,
                )  # fmt: skip
            for start in tl.range(near, beyond, BN):
                highest, total, read = _see_keys(
                    q, K, V, BIASES, row, head, start, length, first, scale, highest, total, read,
                    D, BN, TILES, True, False,
                )  # fmt: skip
        for start in tl.range(beyond, whole, BN):
            highest, total, read = _see_keys(
                q, K, V, BIASES, row, head, start, length, first, scale, highest, total, read,
                D, BN, TILES, False, False,
            )  # fmt: skip
        if whole < length:
            highest, total, read = _see_keys(
                q, K, V, BIASES, row, head, whole, length, first, scale, highest, total, read,
                D, BN, TILES, True, True,
            )  # fmt: skip
        y = (read / total[:, None]).to(OUT.dtype)
        OUT.store([row, head, first, 0], tl.reshape(y, (1, 1, BM, D)))
    else:
        OUT.store([row, head, first, 0], tl.zeros((1, 1, BM, D), OUT.dtype))


def lay_out_biases(biases: torch.Tensor, size: int = SOURCES.keys) -> torch.Tensor:
    """Biases (heads, 2 * far + 1) of keys `far` places before a query to `far` after it, as the kernel adds them:
    tiles (heads, tiles, size, size) float32, the middle one on the diagonal, the outer ones of one number."""
    far, place = biases.shape[1] // 2, torch.arange(size, device=biases.device)
    side = -(-(far + size - 1) // size)  # tiles from the diagonal to the one of keys that are all far
    tiles = torch.arange(-side, side + 1, device=biases.device)
    ahead = tiles[:, None, None] * size + place - place[:, None]
    return (biases.float() * _LOG2_E)[:, ahead.clamp(-far, far) + far].contiguous()


def attend_source(
    queries: torch.Tensor,  # (rows, heads, tokens, width), 16-bit floats
    keys: torch.Tensor,  # likewise
    values: torch.Tensor,
    scale: float,
    *,
    lengths: torch.Tensor | None = None,  # (rows,) int32: how many keys a row has; None: all
    biases: torch.Tensor | None = None,  # of `lay_out_biases`
    tiling: PromptTiling = SOURCES,
) -> torch.Tensor:
    """Every token sees all tokens of its row: (rows, heads, tokens, width)."""
    rows, heads, tokens, width = queries.shape
    assert biases is None or tiling.queries == tiling.keys == biases.shape[-1], "tiles of biases are those of scores"
    out = torch.empty(rows, tokens, heads, width, dtype=queries.dtype, device=queries.device).transpose(1, 2)

    def describe(x: torch.Tensor, size: int) -> TensorDescriptor:
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, size, width])

    launch(
        _attend_source,
        (triton.cdiv(tokens, tiling.queries), heads, rows),
        describe(queries, tiling.queries),
        describe(keys, tiling.keys),
        describe(values, tiling.keys),
        describe(out, tiling.queries),
        lengths if lengths is not None else queries,
        biases if biases is not None else queries,
        tokens,
        scale * _LOG2_E,
        D=width,
        BM=tiling.queries,
        BN=tiling.keys,
        TILES=biases.shape[1] if biases is not None else 0,
        HAS_LENGTHS=lengths is not None,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        maxnreg=tiling.registers,
    )
    return out

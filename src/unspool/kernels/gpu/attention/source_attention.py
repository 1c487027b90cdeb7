"""Attention of whole sources over themselves, both ways: an online softmax over tiles of keys (FlashAttention).

The reference is `F.scaled_dot_product_attention` with a mask of the keys beyond each row's length, and T5's biases by
distance. A program has some queries of one head; tiles are copied by Hopper's copy engine. Lengths are read on the
device, so that a captured pass serves all of them. Of a program beyond its row's length the output is zero.
"""

from __future__ import annotations

from typing import Final

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from unspool.kernels.gpu.attention.prompt_attention import USUAL, PromptTiling
from unspool.kernels.gpu.launching import launch

_LOG2_E: Final = 1.4426950408889634


@triton.jit
def _see_keys(
    q, K, V, BIASES, row, head, start, length, first, scale, highest, total, read,
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FAR: tl.constexpr, IS_NEAR: tl.constexpr,
    IS_LAST: tl.constexpr,
):  # fmt: skip
    """Continue the softmax over a tile of keys; those that are `near` have biases of their own."""
    k = tl.reshape(K.load([row, head, start, 0]), (BN, D))
    scores = tl.dot(q, tl.trans(k)) * scale
    place = start + tl.arange(0, BN)
    if FAR > 0:
        at = BIASES + head * (2 * FAR + 1) + FAR
        if IS_NEAR:
            ahead = place[None, :] - (first + tl.arange(0, BM))[:, None]
            scores += tl.load(at + tl.minimum(tl.maximum(ahead, -FAR), FAR))
        else:
            scores += tl.load(at + tl.where(start > first, FAR, -FAR))
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
    D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, FAR: tl.constexpr, HAS_LENGTHS: tl.constexpr,
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
        if FAR > 0:  # keys before `near` and from `beyond` on are farther from all queries than biases tell apart
            near = tl.minimum(tl.maximum(first - FAR, 0) // BN * BN, whole)
            beyond = tl.minimum(tl.cdiv(first + BM + FAR, BN) * BN, whole)
            for start in tl.range(0, near, BN):
                highest, total, read = _see_keys(
                    q, K, V, BIASES, row, head, start, length, first, scale, highest, total, read,
                    D, BM, BN, FAR, False, False,
                )  # fmt: skip
            for start in tl.range(near, beyond, BN):
                highest, total, read = _see_keys(
                    q, K, V, BIASES, row, head, start, length, first, scale, highest, total, read,
                    D, BM, BN, FAR, True, False,
                )  # fmt: skip
        for start in tl.range(beyond, whole, BN):
            highest, total, read = _see_keys(
                q, K, V, BIASES, row, head, start, length, first, scale, highest, total, read,
                D, BM, BN, FAR, False, False,
            )  # fmt: skip
        if whole < length:
            highest, total, read = _see_keys(
                q, K, V, BIASES, row, head, whole, length, first, scale, highest, total, read,
                D, BM, BN, FAR, True, True,
            )  # fmt: skip
        y = (read / total[:, None]).to(OUT.dtype)
        OUT.store([row, head, first, 0], tl.reshape(y, (1, 1, BM, D)))
    else:
        OUT.store([row, head, first, 0], tl.zeros((1, 1, BM, D), OUT.dtype))


def attend_source(
    queries: torch.Tensor,  # (rows, heads, tokens, width), 16-bit floats
    keys: torch.Tensor,  # likewise
    values: torch.Tensor,
    scale: float,
    *,
    lengths: torch.Tensor | None = None,  # (rows,) int32: how many keys a row has; None: all
    biases: torch.Tensor
    | None = None,  # (heads, 2 * far + 1) float32 times log2(e): of keys `far` before … `far` after
    tiling: PromptTiling = USUAL,
) -> torch.Tensor:
    """Every token sees all tokens of its row: (rows, heads, tokens, width)."""
    rows, heads, tokens, width = queries.shape
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
        FAR=(biases.shape[1] - 1) // 2 if biases is not None else 0,
        HAS_LENGTHS=lengths is not None,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        maxnreg=tiling.registers,
    )
    return out

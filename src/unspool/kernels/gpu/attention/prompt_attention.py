"""Attention of whole prompts over themselves: an online softmax over tiles of keys (FlashAttention; Dao, 2023).

The reference is `F.scaled_dot_product_attention` with `is_causal`. A program has some queries of one head, those of the
last tokens first, which see most keys. It begins with the keys that only some of its queries see. Tiles are copied by
Hopper's copy engine, which fills what is beyond the prompt with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from unspool.kernels.gpu.launching import is_hopper, launch

_LOG2_E: Final = 1.4426950408889634
WIDTHS: Final = (64, 128)  # numbers per head
_ALIGNED: Final = 16  # bytes: what the copy engine takes


@dataclass(frozen=True, slots=True)
class PromptTiling:
    """Queries of a program, keys at a time, its warps and stages, and the most registers of a thread."""

    queries: int
    keys: int
    warps: int
    stages: int
    registers: int


# Two programs fit into a multiprocessor: one multiplies while the other has its softmax.
USUAL: Final = PromptTiling(128, 64, 8, 2, 128)


@triton.jit
def _see_keys(
    q, K, V, row, head, start, places, scale, highest, total, read,
    D: tl.constexpr, BN: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Continue the softmax over a tile of keys."""
    k = tl.reshape(K.load([row, head, start, 0]), (BN, D))
    scores = tl.dot(q, tl.trans(k))
    if IS_MASKED:
        scores = tl.where(places[:, None] >= (start + tl.arange(0, BN))[None, :], scores, float("-inf"))
    higher = tl.maximum(highest, tl.max(scores, 1) * scale)
    weights = tl.exp2(scores * scale - higher[:, None])
    fade = tl.exp2(highest - higher)
    total = total * fade + tl.sum(weights, 1)
    read = read * fade[:, None]
    v = tl.reshape(V.load([row, head, start, 0]), (BN, D))
    read = tl.dot(weights.to(v.dtype), v, read)
    return higher, total, read


@triton.jit(do_not_specialize=["T"])
def _attend_prompt(
    Q, K, V, OUT, T, scale, G: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    head, row = tl.program_id(0), tl.program_id(2)
    first = (tl.num_programs(1) - 1 - tl.program_id(1)) * BM
    last = tl.minimum(first + BM, T)
    places = first + tl.arange(0, BM)
    q = tl.reshape(Q.load([row, head, first, 0]), (BM, D))
    highest = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    read = tl.zeros((BM, D), tl.float32)
    # A loop that might run no round would wait for every step of the tensor cores.
    tl.assume(first < last)
    for start in tl.range(first, last, BN):
        highest, total, read = _see_keys(
            q, K, V, row, head // G, start, places, scale, highest, total, read, D, BN, True
        )
    if first > 0:
        tl.assume(first > 0)
        for start in tl.range(0, first, BN):
            highest, total, read = _see_keys(
                q, K, V, row, head // G, start, places, scale, highest, total, read, D, BN, False
            )
    y = (read / total[:, None]).to(OUT.dtype)
    OUT.store([row, head, first, 0], tl.reshape(y, (1, 1, BM, D)))


def can_attend_prompt(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> bool:
    """Whether the kernel takes these, on a GPU for which it was measured."""
    return (
        is_hopper()
        and queries.dtype in (torch.bfloat16, torch.float16)
        and queries.dtype == keys.dtype == values.dtype
        and queries.shape[2:] == keys.shape[2:]
        and keys.shape == values.shape
        and queries.shape[3] in WIDTHS
        and all(map(_lies_well, (queries, keys, values)))
    )


def _lies_well(x: torch.Tensor) -> bool:
    """Whether the copy engine takes a tensor's addresses."""
    steps = [step * x.element_size() for step in x.stride()[:3]]
    return x.stride(3) == 1 and not any(at % _ALIGNED for at in (x.data_ptr(), *steps))


def attend_prompt(
    queries: torch.Tensor,  # (rows, heads, tokens, width)
    keys: torch.Tensor,  # (rows, kv_heads, tokens, width)
    values: torch.Tensor,
    scale: float,
    tiling: PromptTiling = USUAL,
) -> torch.Tensor:
    """Every token sees those before it and itself: (rows, heads, tokens, width)."""
    rows, heads, tokens, width = queries.shape
    assert tiling.queries % tiling.keys == 0, "tiles of keys end where a program's queries begin"
    out = torch.empty(rows, tokens, heads, width, dtype=queries.dtype, device=queries.device).transpose(1, 2)

    def describe(x: torch.Tensor, size: int) -> TensorDescriptor:
        return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, size, width])

    launch(
        _attend_prompt,
        (heads, triton.cdiv(tokens, tiling.queries), rows),
        describe(queries, tiling.queries),
        describe(keys, tiling.keys),
        describe(values, tiling.keys),
        describe(out, tiling.queries),
        tokens,
        scale * _LOG2_E,
        G=heads // keys.shape[1],
        D=width,
        BM=tiling.queries,
        BN=tiling.keys,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        maxnreg=tiling.registers,
    )
    return out

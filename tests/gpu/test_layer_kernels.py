"""Gates, norms, embeddings and the end of a step: Triton kernels beside their torch references, on random inputs.

They run on a GPU, or slowly in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/gpu/test_layer_kernels.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.gpu.kernel_checks import DEVICE, DTYPES, check, pytestmark, random

from unspool.kernels.activations import find_activation
from unspool.kernels.norms import layer_norm, rms_norm

__all__ = ["pytestmark"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["silu", "relu", "gelu", "gelu_new", "quick_gelu", "relu2"])
def test_gating(dtype: torch.dtype, name: str) -> None:
    from unspool.kernels.gpu.products.activations import CODES
    from unspool.kernels.gpu.products.gating import gate

    up, out = random(3, 2 * 1500, dtype=dtype), torch.full((3, 1500), torch.nan, device=DEVICE, dtype=dtype)
    gate(up, CODES[name], out)
    wide = up.double()
    check(out, find_activation(name)(wide[:, :1500]) * wide[:, 1500:], dtype)
    gate(up[:, :1500].contiguous(), CODES[name], out)
    check(out, find_activation(name)(wide[:, :1500]), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("adds", [False, True])
def test_norms(dtype: torch.dtype, adds: bool) -> None:
    from unspool.kernels.gpu.products.norms import normalise

    x, weight, out = random(3, 600, dtype=dtype), random(600, dtype=dtype), random(3, 600, dtype=dtype)
    expected = rms_norm(x.double(), weight.double(), 1e-6) + (out.double() if adds else 0.0)
    normalise(x, weight, 1e-6, out, adds=adds)
    check(out, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_weights", [False, True])
def test_layer_norms(dtype: torch.dtype, has_weights: bool) -> None:
    """In place, and of numbers far from zero."""
    from unspool.kernels.gpu.products.norms import normalise

    x, weight, shift = random(3, 600, dtype=dtype) + 50.0, random(600, dtype=dtype), random(600, dtype=dtype)
    weights = (weight, shift) if has_weights else (None, None)
    expected = layer_norm(x.double(), *(part.double() if part is not None else None for part in weights), 1e-6)
    normalise(x, weights[0], 1e-6, x, centres=True, shift=weights[1])
    check(x, expected, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("is_layer", [False, True], ids=["rms", "layer"])
@pytest.mark.parametrize("span", ["head", "each", "whole"])
def test_norms_of_heads(dtype: torch.dtype, is_layer: bool, span: Any) -> None:
    from unspool.kernels.gpu.attention.head_norms import HeadNorm, norm_heads_

    heads, kv_heads, width = 6, 2, 24
    qkv = random(3, (heads + 2 * kv_heads) * width, dtype=dtype)
    parts = qkv.double().split([heads * width, kv_heads * width, kv_heads * width], dim=1)
    norms, expected = [], []
    for part, count in zip(parts[:2], (heads, kv_heads), strict=True):
        size = width if span == "head" else count * width
        weight, shift = random(size, dtype=dtype), random(size, dtype=dtype) if is_layer else None
        norms.append(HeadNorm(weight, shift, 1e-5, is_layer))
        by_part = part.view(3, 1 if span == "whole" else count, -1)
        normed = (
            F.layer_norm(by_part, by_part.shape[-1:], eps=1e-5)
            if is_layer
            else rms_norm(by_part, torch.ones(by_part.shape[-1], dtype=torch.float64, device=DEVICE), 1e-5)
        )
        normed = normed * weight.double().view(-1, by_part.shape[-1])
        expected.append((normed + (shift.double().view(-1, by_part.shape[-1]) if shift is not None else 0)).flatten(1))
    norm_heads_(qkv, *norms, heads, kv_heads, width, span)
    check(qkv, torch.cat((*expected, parts[2]), 1), dtype)


@pytest.mark.parametrize("is_forked", [False, True])
def test_learned_positions(is_forked: bool) -> None:
    from unspool.kernels.gpu.sampling.tokens import LearnedPositions, embed

    tokens, table, positions = torch.tensor([3, 9, 0, 5], device=DEVICE), random(10, 1200), random(20, 1200)
    lengths, out = torch.tensor([16, 4], device=DEVICE, dtype=torch.int32), torch.full((4, 1200), torch.nan)
    out = out.to(DEVICE)
    embed(tokens, table, 2.0, out, LearnedPositions(positions, 2, lengths, is_forked))
    places = [18, 18, 6, 6] if is_forked else [18, 19, 6, 7]
    torch.testing.assert_close(out, 2.0 * table[tokens] + positions[places])


@pytest.mark.parametrize("vocab", [50, 4096, 9000])
def test_the_ends_of_a_step(vocab: int) -> None:
    from unspool.kernels.gpu.sampling.tokens import count_tiles, embed, take_highest

    tokens = torch.tensor([7, 0, vocab - 1, -1, 3], device=DEVICE)
    table, out = random(vocab, 1100), torch.full((5, 1100), torch.nan, device=DEVICE)
    embed(tokens, table, 1.5, out)
    torch.testing.assert_close(out, 1.5 * table[tokens.clamp(min=0)])
    logits = random(5, vocab)
    logits[1, [vocab // 2, vocab - 1]] = 50.0  # the first of equals
    logits[2] = -torch.inf  # none is possible
    logits[3, 5] = torch.nan
    lengths = torch.tensor([4, 0, 9, -1, 3], device=DEVICE, dtype=torch.int32)
    tops = torch.empty(5, count_tiles(vocab), device=DEVICE)
    given = logits.clone()
    take_highest(logits, tops, tokens, lengths, None)
    assert tokens.tolist() == [int(given[0].argmax()), vocab // 2, -1, -1, int(given[4].argmax())]
    assert lengths.tolist() == [5, 1, 10, -1, 4]
    take_highest(logits, tops, tokens, lengths, 30.0)
    torch.testing.assert_close(logits[[0, 4]], torch.tanh(given[[0, 4]] / 30.0) * 30.0)

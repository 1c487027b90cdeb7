"""Forks of a row attend to its keys as if each held a copy of them."""

from __future__ import annotations

import pytest
import torch

from unspool.kernels.attention import attend
from unspool.kernels.forked import attend_forked, fold_mask


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("mask_heads", [False, True])
@pytest.mark.parametrize("mask_rows", [False, True])
@pytest.mark.parametrize("want_weights", [False, True])
def test_equals_attention_over_copies(
    heads: int, kv_heads: int, softcap: float | None, mask_heads: bool, mask_rows: bool, want_weights: bool
) -> None:
    torch.manual_seed(heads)
    rows, forks, num_keys, width = 2, 3, 7, 8
    queries = torch.randn(rows * forks, heads, 1, width)
    keys, values = torch.randn(2, rows, kv_heads, num_keys, width)
    mask = torch.randn((rows if mask_rows else 1) * forks, heads if mask_heads else 1, 1, num_keys)
    mask[..., 3] = -torch.inf
    folded = fold_mask(mask, forks, heads, kv_heads)
    read, weights = attend_forked(
        queries, keys, values, num_forks=forks, scale=0.3, mask=folded, softcap=softcap, want_weights=want_weights
    )
    expected, expected_weights = attend(
        queries,
        keys.repeat_interleave(forks, 0),
        values.repeat_interleave(forks, 0),
        scale=0.3,
        mask=mask if mask_rows else mask.repeat(rows, 1, 1, 1),
        softcap=softcap,
        want_weights=True,
    )
    torch.testing.assert_close(read, expected)
    assert (weights is not None) == want_weights
    if weights is not None:
        torch.testing.assert_close(weights, expected_weights)

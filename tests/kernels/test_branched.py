"""Branches over a shared prompt attend as if each held a copy of it."""

from __future__ import annotations

import pytest
import torch

from unspool.kernels.attention import attend
from unspool.kernels.branched import attend_branches


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("new", [1, 3])
@pytest.mark.parametrize("is_masked", [True, False])
def test_equals_attention_over_copies(
    heads: int, kv_heads: int, softcap: float | None, new: int, is_masked: bool
) -> None:
    torch.manual_seed(heads * 10 + new)
    prompts, branches, shared, own, width = 2, 3, 7, 4, 8
    rows = prompts * branches
    queries = torch.randn(rows, heads, new, width)
    shared_keys, shared_values = torch.randn(2, prompts, kv_heads, shared, width)
    own_keys, own_values = torch.randn(2, rows, kv_heads, own, width)
    mask = torch.rand(rows, 1, new, shared + own) > 0.3
    mask[..., -1] = True
    mask = mask if is_masked else None  # without one, both parts are read where they lie and merged
    read, weights = attend_branches(
        queries, shared_keys, shared_values, own_keys, own_values, scale=0.3, mask=mask, softcap=softcap
    )
    keys = torch.cat((shared_keys.repeat_interleave(branches, 0), own_keys), dim=2)
    values = torch.cat((shared_values.repeat_interleave(branches, 0), own_values), dim=2)
    expected, expected_weights = attend(queries, keys, values, scale=0.3, mask=mask, softcap=softcap, want_weights=True)
    torch.testing.assert_close(read, expected)
    if weights is not None:
        torch.testing.assert_close(weights, expected_weights)
    assert (weights is None) == (not is_masked and softcap is None)

"""Attention of prompts over themselves beside torch's in float64: Hopper."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from unspool.kernels.attention import attend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
DEVICE = torch.device("cuda")


def make_prompt(
    rows: int, tokens: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries among keys and values, and keys in buffers with room for more, as a cache has them."""
    queries = torch.randn(rows, tokens, heads + 3, width, device=DEVICE).to(dtype)[:, :, :heads]
    kept = torch.full((rows, tokens + 77, 2, kv_heads, width), torch.nan, device=DEVICE, dtype=dtype)
    kept[:, :tokens] = torch.randn(rows, tokens, 2, kv_heads, width, device=DEVICE).to(dtype)
    keys, values = (kept[:, :tokens, part].transpose(1, 2) for part in range(2))
    return queries.transpose(1, 2), keys, values


def find_reference(queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float) -> torch.Tensor:
    q, k, v = (part.double() for part in (queries, keys, values))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("rows", "tokens", "heads", "kv_heads", "width"),
    [(1, 1, 2, 2, 64), (2, 127, 4, 2, 128), (1, 128, 2, 1, 64), (3, 129, 6, 2, 128), (1, 1000, 8, 8, 64)],
)
def test_prompts(dtype: torch.dtype, rows: int, tokens: int, heads: int, kv_heads: int, width: int) -> None:
    """Lengths around a program's share; what lies beyond a prompt (NaN) is not read into it."""
    from unspool.kernels.gpu.attention.prompt_attention import attend_prompt, can_attend_prompt

    given = make_prompt(rows, tokens, heads, kv_heads, width, dtype)
    assert can_attend_prompt(*given)
    found, expected = attend_prompt(*given, 0.3), find_reference(*given, 0.3)
    assert (found.double() - expected).norm() < 4e-3 * expected.norm()


def test_long_prompts_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    import unspool.kernels.gpu.attention.prompt_attention as kernel

    taken, run = [], kernel.attend_prompt

    def note(queries: torch.Tensor, *rest: Any) -> torch.Tensor:
        taken.append(queries.shape[2])
        return run(queries, *rest)

    monkeypatch.setattr(kernel, "attend_prompt", note)
    for tokens in (1023, 1300):
        given = make_prompt(1, tokens, 4, 2, 128, torch.bfloat16)
        found, _ = attend(*given, scale=0.2, is_causal=True)
        expected = find_reference(*given, 0.2)
        assert (found.double() - expected).norm() < 4e-3 * expected.norm()
    assert taken == [1300]

"""Attention of a new token over keys that heads share, beside the plain one in float64.

`test_few_product.py` and `test_captured_pairs.py` have heads with keys of their own, and sources.
"""

from __future__ import annotations

import pytest
import torch
from tests.gpu.kernel_checks import HAS_GPU, check, needs_gpu, random

IS_HOPPER = HAS_GPU and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, needs_gpu, pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")]


def turn(heads: torch.Tensor, turns: torch.Tensor, norm: torch.Tensor | None, *, is_halved: bool) -> torch.Tensor:
    """Heads (heads, width) after their norm and rope, in float64; the pairs that are turned are neighbours then."""
    pairs, x = turns.shape[1], heads.double()
    if norm is not None:
        x = x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * norm.double()
    front, rest = x[:, : 2 * pairs], x[:, 2 * pairs :]
    one, two = front.chunk(2, dim=1) if is_halved else (front[:, ::2], front[:, 1::2])
    cos, sin = turns.double()
    turned = torch.stack((one * cos - two * sin, one * sin + two * cos), -1).flatten(1)
    return torch.cat((turned, rest), dim=1)


# heads, those of keys, their width; pairs that are turned
SHARED = [(8, 4, 64, 32), (32, 8, 64, 32), (16, 2, 128, 64), (9, 3, 64, 16), (14, 2, 64, 8), (16, 8, 128, 20)]


@pytest.mark.parametrize("length", [0, 1, 100, 256, 700])
@pytest.mark.parametrize(("heads", "kv_heads", "width", "pairs"), SHARED)
@pytest.mark.parametrize("is_halved", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(("block", "splits", "warps"), [(128, 4, 8), (64, 16, 4)])
def test_heads_that_share_keys(
    length: int, heads: int, kv_heads: int, width: int, pairs: int, is_halved: bool, has_norm: bool,
    block: int, splits: int, warps: int,
) -> None:  # fmt: skip
    """Queries and the new key are normalised and turned, the key is written, and a product adds the parts up."""
    from unspool.kernels.gpu.attention.output_parts import PartedTiling, Turning
    from unspool.kernels.gpu.attention.parted_attention import PartedAttention
    from unspool.kernels.gpu.attention.split_attention import HeadShape
    from unspool.kernels.gpu.products.few_product import choose_few_tiling, multiply_few
    from unspool.kernels.gpu.products.parts_product import multiply_parts

    dtype, inputs = torch.bfloat16, heads * width
    qkv = random(1, inputs + 2 * kv_heads * width, dtype=dtype)
    keys = random(1, length + 1, 2, kv_heads, width, dtype=dtype)
    angles = random(pairs).double()
    turns = torch.stack((angles.cos(), angles.sin())).float()
    norms = [random(width, dtype=dtype) if has_norm else None for _ in range(2)]
    shape, split = HeadShape(heads, kv_heads, width), PartedTiling(block, splits, warps)
    attend_one = PartedAttention(shape, keys.device, dtype, writes=True, tiling=split)
    table = torch.tensor([0, length + 1], device=keys.device)
    held = torch.tensor([length], dtype=torch.int32, device=keys.device)
    turning = Turning(turns[None], is_halved, norms[0], norms[1], 1e-5)
    before = keys.clone()
    parts = attend_one(qkv, keys, table, held, 0, 1, 0.1, turning=turning)
    q, k, v = qkv[0].split([inputs, kv_heads * width, kv_heads * width])
    q, k = q.view(heads, width), k.view(kv_heads, width)
    q, k = turn(q, turns, norms[0], is_halved=is_halved), turn(k, turns, norms[1], is_halved=is_halved)
    assert torch.equal(keys[0, :length], before[0, :length])
    assert torch.equal(keys[0, length, 1].flatten(), v)
    check(keys[0, length, 0], k, dtype)
    ks, vs = (one.repeat_interleave(heads // kv_heads, 1) for one in keys[0].double().unbind(1))
    scores = 0.1 * torch.einsum("hd,shd->hs", q, ks)
    read = torch.einsum("hs,shd->hd", torch.softmax(scores, dim=1), vs).flatten()
    weight, out = random(32, inputs, dtype=dtype), random(1, 32, dtype=dtype)
    so_far = out.clone()
    tiling = choose_few_tiling(weight, 1, has_norm=False, is_gated=False)
    if tiling is not None:
        multiply_few(weight, parts, out, tiling, adds=True)
    else:
        multiply_parts(weight, parts, out)
    largest = float(scores.abs().max()) * 2.0**15  # queries are rounded to 16 bits
    check(out, so_far.double() + read[None] @ weight.double().T, dtype, largest_score=largest)

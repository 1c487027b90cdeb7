"""Attention over few keys, where programs share a head, beside plain torch.

The kernels run on a GPU, or slowly in Triton's interpreter: `TRITON_INTERPRET=1 pytest
tests/gpu/test_whole_attention.py`.
"""

from __future__ import annotations

import math
import os
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from unspool.kernels.key_layout import PLAIN, KeyLayout

HAS_GPU = torch.cuda.is_available()
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # the interpreter counts with numpy
    pytest.mark.skipif(not HAS_GPU and not IS_INTERPRETED, reason="needs a CUDA device or Triton's interpreter"),
]
ROOM, SCALE, EPS = 640, 0.2, 1e-6
LENGTHS = (0, 1, 100, 256, 257, 400, 512, 513)  # with more the keys are split
PARTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norms": {"norms": True},
    "rope": {"pairs": 16},
    "half of a head turned": {"pairs": 8, "norms": True},
    "halves": {"pairs": 16, "is_halved": True, "norms": True},
    "cap": {"softcap": 5.0, "pairs": 16},
    "window": {"window": 70, "pairs": 16},
    "slopes": {"slopes": True},
    "sinks": {"sinks": True, "window": 300},
}


def attend_plainly(
    qkv: torch.Tensor, keys: torch.Tensor, length: int, heads: int, kv_heads: int, width: int, **parts: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The output (heads, width), and the new key and value (kv_heads, width), in float64."""
    q, k, v = qkv.double()[0].view(-1, width).split([heads, kv_heads, kv_heads])
    if parts.get("is_halved"):
        pairs = parts["pairs"]
        place = torch.arange(width)
        place[: 2 * pairs] = place[: 2 * pairs] % 2 * pairs + place[: 2 * pairs] // 2
        q, k = q[:, place], k[:, place]
    if (norms := parts.get("weights")) is not None:
        order = place if parts.get("is_halved") else torch.arange(width)
        q, k = (
            x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * norm.double()[order]
            for x, norm in zip((q, k), norms, strict=True)
        )
    if (turns := parts.get("turns")) is not None:
        cos, sin = turns.double()[0]
        q, k = (turn(x, cos, sin) for x in (q, k))
    k = k.to(keys.dtype).double()
    q = q.to(keys.dtype).double()
    held = keys.double()[0, :length].view(length, 2, kv_heads, width)
    all_keys, values = torch.cat((held[:, 0], k[None])), torch.cat((held[:, 1], v[None]))
    group = heads // kv_heads
    scores = torch.einsum("hd,nhd->hn", q, all_keys.repeat_interleave(group, 1)) * SCALE
    if (softcap := parts.get("softcap")) is not None:
        scores = softcap * (scores / softcap).tanh()
    if (slopes := parts.get("slopes")) is not None:
        scores = scores + slopes.double()[:, None] * torch.arange(length + 1)
    if (window := parts.get("window")) is not None:
        scores[:, : max(0, length + 1 - window)] = -math.inf
    if (sinks := parts.get("sinks")) is not None:
        scores = torch.cat((scores, sinks.double()[:, None]), 1)
    weights = scores.softmax(-1)[:, : length + 1]
    return torch.einsum("hn,nhd->hd", weights, values.repeat_interleave(group, 1)), k, v


def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    even, odd = x[:, : 2 * len(cos) : 2], x[:, 1 : 2 * len(cos) : 2]
    turned = x.clone()
    turned[:, : 2 * len(cos) : 2], turned[:, 1 : 2 * len(cos) : 2] = even * cos - odd * sin, odd * cos + even * sin
    return turned


def run(
    shape: tuple[int, int, int], length: int, dtype: torch.dtype, page: int = 0, **given: Any
) -> tuple[torch.Tensor, ...]:
    """The kernel's output and new entries, and the reference's."""
    from unspool.kernels.gpu.attention.split_attention import HeadShape
    from unspool.kernels.gpu.attention.step_attention import StepAttention

    heads, kv_heads, width = shape
    generator = torch.Generator().manual_seed(length + heads)

    def random(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator)

    qkv, keys = random(1, (heads + 2 * kv_heads) * width).to(dtype), random(1, ROOM, 2 * kv_heads * width).to(dtype)
    parts = {name: given[name] for name in ("softcap", "window", "pairs", "is_halved") if name in given}
    if given.get("norms"):
        parts["weights"] = (random(width) + 1).to(dtype), (random(width) + 1).to(dtype)
    if "pairs" in given:
        angles = random(1, given["pairs"])
        parts["turns"] = torch.stack((angles.cos(), angles.sin()), 1)
    if given.get("slopes"):
        parts["slopes"] = random(heads).abs() * 0.05
    if given.get("sinks"):
        parts["sinks"] = random(heads).to(dtype)
    expected = attend_plainly(qkv, keys, length, heads, kv_heads, width, **parts)

    held, layout, entries, order = keys[0], PLAIN, [0, ROOM], torch.arange(ROOM)
    lengths = torch.zeros(1 + ROOM // max(1, page) + 1, dtype=torch.int32)
    lengths[0] = length
    if page:  # blocks in any order; block 0 is nobody's
        blocks = torch.randperm(ROOM // page, generator=generator) + 1
        held = torch.zeros(ROOM + page, keys.shape[2], dtype=dtype)
        order = (blocks[:, None] * page + torch.arange(page)).flatten()
        held[order] = keys[0]
        lengths[1 : 1 + len(blocks)] = blocks.int()
        layout, entries = KeyLayout(0, page), [0, page, 1, len(blocks)]
    there = held.to(DEVICE).contiguous()
    lengths = lengths.to(DEVICE)
    table = torch.tensor(entries, dtype=torch.int64, device=DEVICE)
    attention = StepAttention(
        1,
        HeadShape(heads, kv_heads, width, softcap=given.get("softcap"), window=given.get("window"), eps=EPS),
        DEVICE,
    )
    assert attention._count_shares(layout) > 0
    out = torch.full((1, heads * width), math.nan, dtype=dtype, device=DEVICE)
    q_norm, k_norm = parts.get("weights", (None, None))
    on = {name: parts[name].to(DEVICE) for name in ("turns", "slopes", "sinks") if name in parts}
    attention(
        qkv.to(DEVICE),
        out,
        there.view(-1),
        table,
        lengths,
        0,
        1,
        scale=SCALE,
        is_windowed="window" in given,
        q_norm=None if q_norm is None else q_norm.to(DEVICE),
        k_norm=None if k_norm is None else k_norm.to(DEVICE),
        is_halved=given.get("is_halved", False),
        layout=layout,
        **on,
    )
    after = there.cpu()[order].view(ROOM, 2, kv_heads, width)
    before = keys[0].view(ROOM, 2, kv_heads, width)
    is_old = torch.arange(ROOM) != length
    assert torch.equal(after[is_old], before[is_old])  # nothing else is written
    return (out.cpu().double().view(heads, width), *after[length].double(), *expected)


@pytest.mark.parametrize("length", LENGTHS if HAS_GPU else (1, 100, 400))
@pytest.mark.parametrize("name", PARTS)
@pytest.mark.parametrize("shape", [(4, 2, 64), (3, 3, 40), (2, 1, 128)] if HAS_GPU else [(4, 2, 64)])
def test_output_and_new_keys(shape: tuple[int, int, int], name: str, length: int) -> None:
    for dtype in (torch.float32, torch.bfloat16) if HAS_GPU else (torch.float32,):
        near = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2e-2, "atol": 2e-2}
        out, k, v, *expected = run(shape, length, dtype, **PARTS[name])
        torch.testing.assert_close(out, expected[0], **near)
        torch.testing.assert_close(k, expected[1], **near)
        torch.testing.assert_close(v, expected[2], rtol=0.0, atol=0.0)


@pytest.mark.parametrize("length", (5, 300, 512))
@pytest.mark.parametrize("window", [None, 90])
def test_blocks(length: int, window: int | None) -> None:
    parts: dict[str, Any] = {"pairs": 16} if window is None else {"pairs": 16, "window": window}
    out, k, v, *expected = run((4, 2, 64), length, torch.float32, page=32, **parts)
    for own, theirs in zip((out, k, v), expected, strict=True):
        torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-4)

"""Attention of steps: Triton kernels beside their torch references, on random inputs.

They run on a GPU, or slowly in Triton's interpreter: `TRITON_INTERPRET=1 pytest tests/gpu/test_attention.py`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.gpu.attention_checks import find_new, make_rope, tell_addresses
from tests.gpu.kernel_checks import DEVICE, DTYPES, check, pytestmark, random

from unspool.kernels.alibi import alibi_slopes
from unspool.kernels.attention import attend
from unspool.kernels.rotary import RotaryTable, rotate_

__all__ = ["pytestmark"]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "pairs"),
    [(4, 2, 16, 8), (8, 8, 64, 32), (32, 8, 128, 64), (6, 2, 80, 16), (4, 1, 96, 48), (8, 4, 256, 128), (4, 4, 32, 0)],
    ids=str,
)
@pytest.mark.parametrize("manner", ["plain", "window", "softcap and norm", "slopes"])
def test_attention(dtype: torch.dtype, heads: int, kv_heads: int, width: int, pairs: int, manner: str) -> None:
    """Ragged rows from nothing held to many splits; one of them is not there."""
    check_attention(dtype, heads, kv_heads, width, pairs, manner)


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0), reason="no clusters")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "pairs"),
    [(4, 2, 16, 8), (8, 8, 64, 0), (8, 2, 64, 32), (6, 2, 80, 16), (4, 2, 128, 64), (4, 1, 256, 128)],
    ids=str,
)
@pytest.mark.parametrize("manner", ["plain", "window", "softcap and norm", "slopes"])
@pytest.mark.parametrize(
    "tiling",
    [
        (64, 64, 256, 4, 2, None, 4),
        (64, 64, 256, 4, 2, None, 8),
        (32, 32, 256, 4, 1, None, 8, True),
        (64, 64, 256, 8, 1, None, 8, True),
    ],
    ids=str,
)
def test_attention_of_clusters(
    dtype: torch.dtype, heads: int, kv_heads: int, width: int, pairs: int, manner: str, tiling: tuple[Any, ...]
) -> None:
    """The same with parts that are combined in shared memory, in another way, and in none."""
    check_attention(dtype, heads, kv_heads, width, pairs, manner, tiling)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "pairs"), [(4, 2, 16, 8), (32, 8, 64, 32), (32, 8, 128, 64), (6, 2, 80, 16)], ids=str
)
@pytest.mark.parametrize("manner", ["plain", "softcap and norm"])
@pytest.mark.parametrize("num_parts", [2, 4])
def test_attention_of_a_product_in_parts(
    dtype: torch.dtype, heads: int, kv_heads: int, width: int, pairs: int, manner: str, num_parts: int
) -> None:
    """What the product would have added up by itself."""
    check_attention(dtype, heads, kv_heads, width, pairs, manner, num_parts=num_parts)


@pytest.mark.parametrize("order", [4, 8])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 16), (8, 2, 64), (12, 4, 32)], ids=str)
def test_an_arranged_output(order: int, heads: int, kv_heads: int, width: int) -> None:
    """The numbers of the output as it is, in the order in which a product with words reads them."""
    from unspool.kernels.gpu.attention.split_attention import HeadShape
    from unspool.kernels.gpu.attention.step_attention import StepAttention
    from unspool.kernels.gpu.products.arranging import arrange_plainly

    held, dtype = [0, 5, 300], torch.float16
    buffers = [random(3, 320, 2, kv_heads, width, dtype=dtype)]
    base = torch.zeros(16, device=DEVICE, dtype=dtype)
    table = torch.tensor(tell_addresses(base, buffers), device=DEVICE)
    lengths = torch.tensor(held, device=DEVICE, dtype=torch.int32)
    qkv = random(3, (heads + 2 * kv_heads) * width, dtype=dtype)
    step = StepAttention(3, HeadShape(heads, kv_heads, width, width**-0.5), DEVICE)
    outs = [torch.full((3, heads * width), torch.nan, device=DEVICE, dtype=dtype) for _ in range(2)]
    for out, its_order in zip(outs, (0, order), strict=True):
        step(qkv, out, base, table, lengths, 0, 1, order=its_order)
    assert torch.equal(outs[1], arrange_plainly(outs[0], order))


def part_product(product: torch.Tensor, num_parts: int) -> torch.Tensor:
    """Float32 parts (parts, …) whose sum a product is."""
    parts = torch.randn(num_parts, *product.shape, device=product.device)
    parts[-1] = (product.double() - parts[:-1].double().sum(0)).float()
    return parts


def check_attention(
    dtype: torch.dtype,
    heads: int,
    kv_heads: int,
    width: int,
    pairs: int,
    manner: str,
    tiling: tuple[Any, ...] | None = None,
    num_parts: int = 1,
) -> None:
    """Attention over ragged rows equals the reference."""
    from unspool.kernels.gpu.attention.split_attention import HeadShape
    from unspool.kernels.gpu.attention.step_attention import StepAttention
    from unspool.kernels.gpu.attention.step_tilings import AttentionTiling
    from unspool.kernels.gpu.attention.turning import find_turns

    if not torch.cuda.is_available() and width > 80:
        pytest.skip("too slow in the interpreter")
    held = [0, 1, 63, 64, 130, 700, -1]
    rows, capacity, window, eps = len(held), 720, 100, 1e-6
    has_norm, softcap = manner == "softcap and norm", 5.0 if manner == "softcap and norm" else None
    scale = width**-0.5
    buffers = [random(rows, capacity, 2, kv_heads, width, dtype=dtype) for _ in range(2)]
    expected_buffer = buffers[1].clone()
    qkv = random(rows, (heads + 2 * kv_heads) * width, dtype=dtype)
    given = qkv.clone()
    if num_parts > 1:
        qkv = part_product(qkv, num_parts)
    norms = (random(width, dtype=dtype), random(width, dtype=dtype)) if has_norm else (None, None)
    slopes = alibi_slopes(heads).to(DEVICE) if manner == "slopes" else None
    shape = HeadShape(heads, kv_heads, width, scale, softcap, window if manner == "window" else None, eps)
    step = StepAttention(rows, shape, DEVICE, AttentionTiling(*tiling) if tiling is not None else None)
    base = torch.zeros(16, device=DEVICE, dtype=dtype)
    table = torch.tensor(tell_addresses(base, buffers), device=DEVICE)
    lengths = torch.tensor(held, device=DEVICE, dtype=torch.int32)
    out = torch.full((rows, heads * width), torch.nan, device=DEVICE, dtype=dtype)
    rope, frequencies = make_rope(width, pairs)
    turns = torch.empty(rows, 2, pairs, device=DEVICE) if pairs else None
    if turns is not None:
        find_turns(lengths, frequencies, 1.0, turns)
    for _ in range(2):  # what is left behind must not matter
        step(
            qkv, out, base, table, lengths, 1, 2,
            turns=turns, is_windowed=manner == "window",
            q_norm=norms[0], k_norm=norms[1], slopes=slopes,
        )  # fmt: skip
    for row, length in enumerate(held):
        if length < 0:
            assert out[row].isnan().all() and torch.equal(buffers[1][row], expected_buffer[row])
            continue
        split = find_new(given[row], shape, norms, rope if pairs else None, length)
        keys = expected_buffer[row, :length].float()
        keys = (
            torch.cat((keys, split[:, :, heads:].view(1, 2, kv_heads, width)))[max(0, length + 1 - window) :]
            if manner == "window"
            else torch.cat((keys, split[:, :, heads:].view(1, 2, kv_heads, width)))
        )
        mask = None
        if slopes is not None:
            mask = (slopes[:, None] * torch.arange(keys.shape[0], device=DEVICE))[None, :, None].double()
        k, v = (part.transpose(0, 1)[None].double() for part in keys.unbind(1))
        read, _ = attend(split[:, :, :heads].transpose(1, 2).double(), k, v, scale=scale, mask=mask, softcap=softcap)
        check(out[row], read.reshape(-1), dtype, largest_score=0.0 if mask is None else float(mask.max()))
        check(buffers[1][row, length], split[:, :, heads:].reshape(2, kv_heads, width), dtype)
        rest = [at for at in range(capacity) if at != length]
        assert torch.equal(buffers[1][row, rest], expected_buffer[row, rest])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_over_keys_that_were_brought(dtype: torch.dtype) -> None:
    """What was brought is read and left alone; the new key goes to where the layer lives."""
    from unspool.kernels.gpu.attention.split_attention import HeadShape
    from unspool.kernels.gpu.attention.step_attention import StepAttention
    from unspool.kernels.key_layout import KeyLayout

    heads, kv_heads, width, held = 4, 2, 16, [3, 40]
    brought = [random(2, 64, 2, kv_heads, width, dtype=dtype) for _ in range(2)]
    homes = [torch.zeros_like(buffer) for buffer in brought]
    before = [buffer.clone() for buffer in brought]
    qkv, base = random(2, (heads + 2 * kv_heads) * width, dtype=dtype), torch.zeros(16, device=DEVICE, dtype=dtype)
    table = torch.tensor([*tell_addresses(base, brought), *tell_addresses(base, homes)[:-1]], device=DEVICE)
    lengths = torch.tensor(held, device=DEVICE, dtype=torch.int32)
    step = StepAttention(2, HeadShape(heads, kv_heads, width, 0.25), DEVICE)
    found = []
    for layout in (KeyLayout(is_away=True), KeyLayout()):  # the second writes into what was brought
        out = torch.full((2, heads * width), torch.nan, device=DEVICE, dtype=dtype)
        step(qkv, out, base, table, lengths, 1, 2, layout=layout)
        found.append(out)
        if layout.is_away:
            assert all(map(torch.equal, brought, before)) and not homes[0].any()
    check(found[0], found[1], dtype)
    for row, length in enumerate(held):
        assert torch.equal(homes[1][row, length], brought[1][row, length])
        assert int(homes[1][row].flatten(1).any(1).sum()) == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 100])
def test_attention_of_branches(dtype: torch.dtype, window: int | None) -> None:
    """Rows share their prompt's keys, and find their own at the rows that wrote them."""
    from unspool.kernels.gpu.attention.split_attention import HeadShape
    from unspool.kernels.gpu.attention.step_attention import StepAttention
    from unspool.kernels.key_layout import KeyLayout

    heads, kv_heads, width, branches, prompts = 8, 2, 64, 3, [5, 200]
    num_own, capacity, rows = 70, 90, branches * len(prompts)
    own = [random(rows, capacity, 2, kv_heads, width, dtype=dtype) for _ in range(2)]
    shared = [random(len(prompts), 256, 2, kv_heads, width, dtype=dtype) for _ in range(2)]
    ancestry = torch.stack(
        [torch.randint(row // branches * branches, row // branches * branches + branches, (96,)) for row in range(rows)]
    ).to(DEVICE, torch.int32)
    qkv = random(rows, (heads + 2 * kv_heads) * width, dtype=dtype)
    base = torch.zeros(16, device=DEVICE, dtype=dtype)
    firsts = [prompts[row // branches] for row in range(rows)]
    lengths = torch.tensor([first + num_own for first in firsts], device=DEVICE, dtype=torch.int32)
    from_lengths = (ancestry.data_ptr() - lengths.data_ptr()) // 4
    told = [*tell_addresses(base, own, shared), from_lengths, ancestry.shape[1], *firsts]
    table = torch.tensor(told, device=DEVICE)
    before = own[0].clone()
    out = torch.full((rows, heads * width), torch.nan, device=DEVICE, dtype=dtype)
    step = StepAttention(rows, HeadShape(heads, kv_heads, width, 0.1, None, window), DEVICE)
    step(
        qkv, out, base, table, lengths, 0, 2,
        is_windowed=window is not None, layout=KeyLayout(branches),
    )  # fmt: skip
    for row, first in enumerate(firsts):
        new = qkv[row].view(1, -1, width)
        mine = before[ancestry[row, :num_own].long(), torch.arange(num_own, device=DEVICE)]
        kv = torch.cat((shared[0][row // branches, :first], mine, new[:, heads:].view(1, 2, kv_heads, width)))
        kv = kv[-window:] if window else kv
        k, v = (part.transpose(0, 1)[None].double() for part in kv.unbind(1))
        read, _ = attend(new[:, :heads].transpose(0, 1)[None].double(), k, v, scale=0.1)
        check(out[row], read.reshape(-1), dtype)
        assert torch.equal(own[0][row, num_own].view(-1), qkv[row, heads * width :])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "new", "is_shared"), [(1, 70, False), (3, 5, False), (4, 9, True)])
def test_rotated_heads(dtype: torch.dtype, rows: int, new: int, is_shared: bool) -> None:
    from unspool.kernels.gpu.attention.rotating import rotate_heads_

    heads, kv_heads, width = 12, 4, 32
    qkv = random(rows, new, heads + 2 * kv_heads, width, dtype=dtype)
    table = RotaryTable([10000.0 ** (-2 * place / 24) for place in range(12)], 1.5, DEVICE).reserve(500)  # 24 of 32
    positions = torch.randint(0, 500, (1 if is_shared else rows, new), device=DEVICE)
    factors = table[positions].unsqueeze(2)
    expected = qkv.float()
    rotate_(expected[:, :, : heads + kv_heads], factors)
    rotate_heads_(qkv[:, :, : heads + kv_heads], factors)
    check(qkv, expected, dtype)
    torch.testing.assert_close(
        qkv[:, :, heads + kv_heads :].float(), expected[:, :, heads + kv_heads :], rtol=0, atol=0
    )

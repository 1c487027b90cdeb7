"""Products of one to eight rows with small matrices, with what stands around them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.gpu.kernel_checks import check, needs_gpu, random

pytestmark = [pytest.mark.gpu, needs_gpu]

SIZES = [(272, 256), (48, 384), (48, 512), (64, 1280), (1040, 1024), (48, 2816), (48, 5120)]
NORMS = ["none", "squares", "layer", "bare layer"]


def multiply(weight: torch.Tensor, x: Any, out: torch.Tensor, **around: Any) -> None:
    from unspool.kernels.gpu.products.few_product import choose_few_tiling, multiply_few
    from unspool.kernels.gpu.products.rows_tilings import starts_early

    if not starts_early():
        pytest.skip("needs a Hopper GPU and Triton's Gluon")
    has_norm = around.get("norm") is not None or around.get("centres", False)
    tiling = choose_few_tiling(weight, out.shape[0], has_norm=has_norm, is_gated=around.get("is_gated", False))
    assert tiling is not None
    multiply_few(weight, x, out, tiling, **around)


@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize("rows", [1, 2, 5, 8])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("is_gated", [False, True])
def test_a_product_with_what_stands_around_it(outputs: int, inputs: int, rows: int, norm: str, is_gated: bool) -> None:
    """Rows around a mean of their own, many times as large as they differ."""
    dtype = torch.bfloat16
    height = 2 * outputs if is_gated else outputs
    centres = norm.endswith("layer")
    weight, x = random(height, inputs, dtype=dtype), random(rows, inputs, dtype=torch.float32)
    x = (x + 9 * torch.arange(1, rows + 1, device=x.device)[:, None] * centres).to(dtype)
    scale, shift = random(inputs, dtype=dtype), random(inputs, dtype=dtype)
    before = {
        "none": {},
        "squares": {"norm": scale, "eps": 1e-5},
        "layer": {"norm": scale, "shift": shift, "eps": 1e-5, "centres": True},
        "bare layer": {"eps": 1e-5, "centres": True},
    }[norm]
    bias, out = random(height, dtype=dtype), random(rows, outputs, dtype=dtype)
    held, is_wide = out.clone(), outputs >= inputs
    kept = random(rows, inputs, dtype=dtype) if norm == "layer" and is_wide else None
    multiply(weight, x, out, bias=bias, activation=2, is_gated=is_gated, adds=True, kept=kept, **before)
    given = x.double()
    if norm == "squares":
        given = F.rms_norm(given, (inputs,), scale.double(), 1e-5)
    elif centres:
        weights = (scale.double(), shift.double()) if norm == "layer" else (None, None)
        given = F.layer_norm(given, (inputs,), *weights, 1e-5)
    if kept is not None:
        check(kept, given, dtype)
    first, *second = F.linear(given, weight.double(), bias.double()).split(outputs, dim=1)
    made = held.double() + first.relu() * (second[0] if second else 1.0)
    check(out, made, dtype, factors=2 if is_gated else 1)


@pytest.mark.parametrize(("outputs", "inputs"), [(32, 256), (48, 384), (64, 1280)])
@pytest.mark.parametrize("rows", [1, 3])
def test_a_plain_product_in_float16(outputs: int, inputs: int, rows: int) -> None:
    weight, x = random(outputs, inputs, dtype=torch.float16), random(rows, inputs, dtype=torch.float16)
    out = torch.full((rows, outputs), torch.nan, dtype=torch.float16, device=x.device)
    multiply(weight, x, out)
    check(out, x.double() @ weight.double().T, torch.float16)


def test_what_it_is_not_written_for() -> None:
    from unspool.kernels.gpu.products.few_product import choose_few_tiling

    def choose(outputs: int, inputs: int, rows: int = 1, dtype: torch.dtype = torch.bfloat16, **around: bool) -> Any:
        weight = torch.empty(outputs, inputs, dtype=dtype, device="meta")
        return choose_few_tiling(weight, rows, **{"has_norm": False, "is_gated": False, **around})

    assert choose(64, 512) is not None and choose(64, 512, dtype=torch.float16) is not None
    assert choose(64, 512, has_norm=True) is not None and choose(64, 512, rows=8, is_gated=True) is not None
    assert choose(64, 512, dtype=torch.float16, has_norm=True) is None  # w * x may overflow
    assert choose(64, 512, dtype=torch.float32) is None and choose(64, 512, rows=9) is None
    assert choose(40, 512) is None and choose(48, 512, is_gated=True) is None  # outputs of a program
    assert choose(64, 300) is None and choose(50_272, 512) is None and choose(10_240, 2048, is_gated=True) is None


def attend(
    queries: torch.Tensor,  # (rows, heads * width), or with a new key and value each
    keys: torch.Tensor,  # (sets, room, 2, heads, width): a new key and value are written
    lengths: list[int],
    tiling: Any,
    *,
    writes: bool,
    biases: torch.Tensor | None = None,
) -> Any:
    from unspool.kernels.gpu.attention.parted_attention import PartedAttention
    from unspool.kernels.gpu.attention.split_attention import HeadShape

    sets, room, _, heads, width = keys.shape
    rows = {"rows": queries.shape[0], "rows_each": queries.shape[0] // sets}
    distances = 0 if biases is None else biases.shape[1]
    made = PartedAttention(
        HeadShape(heads, heads, width),
        keys.device,
        keys.dtype,
        writes=writes,
        distances=distances,
        tiling=tiling,
        **rows,
    )
    table, held = torch.tensor([0, room], device=keys.device), torch.tensor(lengths, device=keys.device)
    return made(queries, keys, table, held, 0, 1, 0.3, biases=biases)


def read_plainly(query: torch.Tensor, keys: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What a query (heads, width) reads from keys and values (keys, 2, heads, width)."""
    ks, vs = keys.double().unbind(1)
    scores = 0.3 * torch.einsum("hd,shd->hs", query.double(), ks)
    scores = scores if bias is None else scores + bias.double()
    return torch.einsum("hs,shd->hd", torch.softmax(scores, dim=1), vs).flatten()


@pytest.mark.parametrize("length", [0, 1, 60, 300])
@pytest.mark.parametrize(("heads", "width", "splits"), [(16, 64, 4), (20, 64, 6), (8, 32, 4)])
@pytest.mark.parametrize("block", [32, 64])
def test_an_attention_in_parts(length: int, heads: int, width: int, splits: int, block: int) -> None:
    from unspool.kernels.gpu.attention.output_parts import PartedTiling

    dtype, inputs = torch.bfloat16, heads * width
    queries, keys = random(1, 3 * inputs, dtype=dtype), random(1, length + 1, 2, heads, width, dtype=dtype)
    parts = attend(queries, keys, [length], PartedTiling(block, splits, 4), writes=True)
    q, *new = (one.reshape(heads, width) for one in queries[0].split(inputs))
    assert torch.equal(keys[0, length], torch.stack(new))
    weight, out = random(32, inputs, dtype=dtype), random(1, 32, dtype=dtype)
    so_far = out.clone()
    multiply(weight, parts, out, adds=True)
    check(out, so_far.double() + read_plainly(q, keys[0])[None] @ weight.double().T, dtype)


# rows, sets of keys; heads, their width; keys a tile, splits
SEVERAL = [
    (4, 1, 4, 64, 128, 4),
    (8, 1, 20, 64, 256, 6),
    (6, 2, 8, 32, 64, 4),
    (5, 5, 4, 64, 64, 4),
    (3, 1, 2, 128, 64, 4),
]


@pytest.mark.parametrize(("rows", "sets", "heads", "width", "block", "splits"), SEVERAL)
@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_several_rows_of_an_attention_in_parts(
    rows: int, sets: int, heads: int, width: int, block: int, splits: int, writes: bool, dtype: torch.dtype
) -> None:
    """Each row reads what it reads alone, to the bit; and a product adds its parts up."""
    from unspool.kernels.gpu.attention.output_parts import PartedTiling

    if writes:
        sets = rows
    tiling, inputs = PartedTiling(block, splits, 4), heads * width
    lengths = [0, 700, 40, 257, 64][:sets] if writes else [1500, 1, 65, 512, 300][:sets]
    lengths += [90] * (sets - len(lengths))
    keys = random(sets, 1510, 2, heads, width, dtype=dtype)
    biases = random(heads, 33) if writes else None
    queries = random(rows, (3 if writes else 1) * inputs, dtype=dtype)
    held = keys.clone()
    parts = attend(queries, keys, lengths, tiling, writes=writes, biases=biases)
    weight, out = random(48, inputs, dtype=dtype), random(rows, 48, dtype=dtype)
    bias, expected = random(48, dtype=dtype), []
    for row in range(rows):
        own = row * sets // rows
        length, query = lengths[own], queries[row, :inputs].view(heads, width)
        alone_in = held[own : own + 1].clone()
        alone = attend(queries[row : row + 1], alone_in, [length], tiling, writes=writes, biases=biases)
        assert torch.equal(alone_in[0], keys[own])
        used = max(1, -(-length // (max(1, -(-length // splits // block)) * block)))
        used = min(used, splits)
        assert torch.equal(alone.values[0, :used], parts.values[row, :used])
        assert torch.equal(alone.stats[0, :, :used], parts.stats[row, :, :used])
        seen = keys[own, : length + writes]
        back = (length - torch.arange(length + 1, device=keys.device)).clamp(max=32)
        expected.append(read_plainly(query, seen, None if biases is None else biases[:, back]))
    so_far = out.double()
    multiply(weight, parts, out, bias=bias, adds=True)
    check(out, so_far + torch.stack(expected) @ weight.double().T + bias.double(), dtype)

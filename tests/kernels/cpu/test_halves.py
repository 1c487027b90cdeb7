"""Products and attention in half precision by the CPU library, beside torch's in float32 and double."""

from __future__ import annotations

import platform

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unspool.errors import SettingError
from unspool.kernels.cpu import BLOCK, Library
from unspool.kernels.cpu.operators import multiply_halves_plainly, multiply_traced_halves

HALVES = (torch.bfloat16, torch.float16)
dtypes = pytest.mark.parametrize("dtype", HALVES, ids=["bfloat16", "float16"])


def as_multiplied(numbers: torch.Tensor) -> torch.Tensor:
    """On x86 floats that are too small for all their digits are zeros while the library multiplies."""
    flushes = platform.machine() in {"x86_64", "AMD64"}
    return torch.where(numbers.abs() < 2.0**-126, 0.0, numbers) if flushes else numbers


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def assert_rounded_once(made: torch.Tensor, exact: torch.Tensor, error: float) -> None:
    """Every number is the nearest of its dtype to one within `error` of the exact one."""
    assert ((made >= (exact - error).to(made.dtype)) & (made <= (exact + error).to(made.dtype))).all()


def assert_same(made: torch.Tensor, expected: torch.Tensor) -> None:
    """The same numbers, infinities and places without one."""
    torch.testing.assert_close(made, expected, rtol=0, atol=0, equal_nan=True)


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from(HALVES),
    rows=st.integers(1, 60),
    columns=st.integers(1, 200),
    num_rows=st.integers(1, 20),
    seed=st.integers(0, 1000),
    has_bias=st.booleans(),
    threads=st.integers(1, 3),
)
def test_products_are_float32_sums_rounded_once(
    library: Library,
    dtype: torch.dtype,
    rows: int,
    columns: int,
    num_rows: int,
    seed: int,
    has_bias: bool,
    threads: int,
) -> None:
    weight, x = draw(seed, rows, columns).to(dtype), draw(seed + 1, num_rows, columns).to(dtype)
    bias = draw(seed + 2, rows).to(dtype) if has_bias else None
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    library.threads = threads
    for name in library.available:
        library.use_instructions(name)
        made = library.multiply_halves(x, weight, bias)
        assert made.dtype == dtype
        assert_rounded_once(made, exact, 1e-4)
    assert_rounded_once(multiply_halves_plainly(x, weight, bias), exact, 1e-4)


@dtypes
@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_alone_is_a_row_in_a_batch(library: Library, dtype: torch.dtype, threads: int) -> None:
    """To the bit, at a matrix's uneven ends too."""
    weight, bias, x = draw(0, 93, 197).to(dtype), draw(1, 93).to(dtype), draw(2, 41, 197).to(dtype)
    library.threads = threads
    for name in library.available:
        library.use_instructions(name)
        alone = torch.cat([library.multiply_halves(row[None], weight, bias) for row in x])
        for count in (*range(2, 19), 41):
            assert torch.equal(library.multiply_halves(x[:count], weight, bias), alone[:count]), (name, count)


@dtypes
def test_every_number_is_read_and_rounded_as_torch_does(library: Library, dtype: torch.dtype) -> None:
    """All 65,536 of them, by a product with one; and numbers between two of them, by the bias."""
    numbers = torch.arange(-(1 << 15), 1 << 15).to(torch.int16).view(dtype)
    between = torch.tensor([1.0, 257 / 256, 3.0, 2.0**-24, 2.0**-25, 65504.0, 3e38, -1.0]).to(dtype)
    for name in library.available:
        library.use_instructions(name)
        assert_same(library.widen(numbers), numbers.float())
        alone = library.multiply_halves(numbers[:, None], torch.ones(1, 1, dtype=dtype), None)[:, 0]
        assert_same(alone, as_multiplied(numbers.float()).to(dtype))
        halves = torch.tensor([0.5, 0.75, 2.0**-9, 2.0**-12]).to(dtype)
        for one in halves:
            product = as_multiplied(as_multiplied(numbers[:, None].float()) * one.float())
            exact = as_multiplied(product + as_multiplied(between.float()))
            scaled = library.multiply_halves(numbers[:, None], one.expand(len(between), 1).contiguous(), between)
            assert_same(scaled, exact.to(dtype))


@dtypes
def test_a_traced_product_is_the_librarys(library: Library, dtype: torch.dtype) -> None:
    weight, bias, x = draw(0, 40, 64).to(dtype), draw(1, 40).to(dtype), draw(2, 2, 3, 64).to(dtype)
    expected = library.multiply_halves(x.view(6, 64), weight, bias).view(2, 3, 40)
    assert torch.equal(multiply_traced_halves(x, weight, bias), expected)
    torch.library.opcheck(multiply_traced_halves, (x, weight, bias), test_utils=("test_schema", "test_faketensor"))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    dtype=st.sampled_from(HALVES),
    rows=st.integers(1, 3),
    heads=st.integers(1, 3),
    asked=st.integers(1, 9),
    num_keys=st.integers(1, 150),
    blocks=st.integers(1, 4),
    masked=st.sampled_from(["", "rows", "all"]),
    seed=st.integers(0, 1000),
    threads=st.integers(1, 3),
)
def test_attention_is_rounded_once(
    library: Library,
    dtype: torch.dtype,
    rows: int,
    heads: int,
    asked: int,
    num_keys: int,
    blocks: int,
    masked: str,
    seed: int,
    threads: int,
) -> None:
    """Keys and values lie as a cache has them, and what is not seen may be no number."""
    width = blocks * BLOCK
    queries = draw(seed, rows, heads, asked, width).to(dtype)
    kv = draw(seed + 1, rows, num_keys + 3, 2, heads, width).to(dtype)
    keys, values = kv[:, :num_keys, 0].transpose(1, 2), kv[:, :num_keys, 1].transpose(1, 2)
    mask = None
    if masked:
        mask = draw(seed + 2, rows if masked == "rows" else 1, num_keys) > 0
        mask[:, -1] = True
    seen = None if mask is None else mask[:, None, None]
    exact = F.scaled_dot_product_attention(queries.double(), keys.double(), values.double(), seen, scale=0.2)
    if mask is not None:
        kv[:, :num_keys][~mask.expand(rows, num_keys)] = torch.nan
    library.threads = threads
    for name in library.available:
        library.use_instructions(name)
        made = library.attend_halves(queries, keys, values, mask, 0.2)
        assert made.dtype == dtype
        assert_rounded_once(made, exact, 1e-5)


def test_queries_that_see_nothing_read_zeros(library: Library) -> None:
    queries, kv = draw(0, 1, 2, 3, 32).bfloat16(), draw(1, 1, 2, 5, 32).bfloat16()
    for name in library.available:
        library.use_instructions(name)
        made = library.attend_halves(queries, kv, kv, torch.zeros(1, 5, dtype=torch.bool), 1.0)
        assert torch.equal(made, torch.zeros_like(queries)), name


def test_other_numbers_are_refused(library: Library) -> None:
    x, weight = draw(0, 2, 32), draw(1, 4, 32)
    with pytest.raises(SettingError, match="can't meet"):
        library.multiply_halves(x, weight, None)
    with pytest.raises(SettingError, match="can't meet"):
        library.multiply_halves(x.half(), weight[:, :16].half(), None)
    with pytest.raises(SettingError, match="can't meet"):
        library.multiply_halves(x.half(), weight.half(), torch.zeros(3).half())
    with pytest.raises(SettingError, match="widened"):
        library.widen(x)
    four = x.view(1, 1, 2, 32).half()
    for keys, mask in ((four.float(), None), (four[..., :16], None), (four, torch.ones(1, 3, dtype=torch.bool))):
        with pytest.raises(SettingError, match="can't read keys"):
            library.attend_halves(four, keys, keys, mask, 1.0)

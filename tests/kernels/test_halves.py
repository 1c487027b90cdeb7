"""Half precision where torch has no fast products of it: on every machine, because the choice is made for the tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from unspool.kernels import halves
from unspool.kernels.attention import attend
from unspool.kernels.branched import attend_branches
from unspool.kernels.cpu.operators import multiply_halves_plainly

HALVES = (torch.bfloat16, torch.float16)
dtypes = pytest.mark.parametrize("dtype", HALVES, ids=["bfloat16", "float16"])
with_and_without_library = pytest.mark.parametrize("has_library", [True, False])


@pytest.fixture(autouse=True)
def is_slow_everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(halves, "lacks_products", lambda dtype: dtype in HALVES)


@pytest.fixture
def choose_library(monkeypatch: pytest.MonkeyPatch) -> Callable[[bool], None]:
    def choose(is_there: bool) -> None:
        if not is_there:
            monkeypatch.setattr(halves, "find_library", lambda: None)

    return choose


def draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def near(made: torch.Tensor, exact: torch.Tensor) -> bool:
    """Within one unit in the last place, which float32's own rounding may move."""
    assert made.dtype in HALVES
    return bool(((made.double() - exact).abs() <= torch.finfo(made.dtype).eps * exact.abs() + 1e-4).all())


@dtypes
@with_and_without_library
@pytest.mark.parametrize("num_rows", [1, 7, 33, 70])  # the library's product, and torch's of widened parts
def test_a_product_is_rounded_once(
    dtype: torch.dtype, has_library: bool, num_rows: int, choose_library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    choose_library(has_library)
    monkeypatch.setattr(halves, "_WIDENED", 64 * 20)  # parts of 20 rows
    weight, bias, x = draw(0, 90, 64).to(dtype), draw(1, 90).to(dtype), draw(2, 1, num_rows, 64).to(dtype)
    for some, whole in ((weight, weight), (weight[:, ::2], weight[:, ::2].contiguous())):
        given = x[..., : some.shape[1]]
        for added in (bias, None):
            exact = F.linear(given.double(), whole.double(), None if added is None else added.double())
            made = halves.multiply_rows(given, some, added)
            assert made.shape == exact.shape and near(made, exact)
            assert near(multiply_halves_plainly(given, some, added), exact)


def test_other_products_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = draw(0, 3, 8), draw(1, 5, 8)
    assert torch.equal(halves.multiply_rows(x, weight, None), F.linear(x, weight))
    with pytest.raises(RuntimeError, match="dtype"):
        halves.multiply_rows(x, weight.half(), None)
    monkeypatch.setattr(halves, "lacks_products", lambda _: False)
    monkeypatch.setattr(halves, "multiply_halves", lambda *_: pytest.fail("torch is fast"))
    assert halves.multiply_rows(x.bfloat16(), weight.bfloat16(), None).dtype == torch.bfloat16


@dtypes
@with_and_without_library
@pytest.mark.parametrize("num_new", [1, 2, 6])
@pytest.mark.parametrize("settings", ["plain", "causal", "boolean", "additive", "softcap", "sinks", "weights"])
def test_attention_is_rounded_once(
    dtype: torch.dtype, has_library: bool, num_new: int, settings: str, choose_library: Any
) -> None:
    choose_library(has_library)
    num_keys = num_new if settings == "causal" else 11
    queries = draw(0, 2, 4, num_new, 32).to(dtype)
    keys, values = draw(1, 2, 2, num_keys, 32).to(dtype), draw(2, 2, 2, num_keys, 32).to(dtype)
    seen = draw(3, 2, 1, 1, num_keys) > -0.5
    seen[..., 0] = True
    given: dict[str, Any] = {
        "plain": {},
        "causal": {"is_causal": True},
        "boolean": {"mask": seen},
        "additive": {"mask": draw(4, 2, 4, num_new, num_keys).to(dtype)},
        "softcap": {"softcap": 5.0},
        "sinks": {"sinks": draw(5, 1, 4, 1)},
        "weights": {"want_weights": True},
    }[settings]
    made, weights = attend(queries, keys, values, scale=0.3, **given)
    wide = {
        name: value.float() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in given.items()
    }
    exact, exact_weights = attend(queries.float(), keys.float(), values.float(), scale=0.3, **wide)
    assert near(made, exact.double())
    assert (weights is None) == (exact_weights is None)
    if weights is not None and exact_weights is not None:
        assert weights.dtype == dtype and near(weights, exact_weights.double())


@dtypes
def test_branches_read_as_in_float32(dtype: torch.dtype) -> None:
    parts = [
        draw(0, 6, 4, 1, 32),
        draw(1, 2, 2, 9, 32),
        draw(2, 2, 2, 9, 32),
        draw(3, 6, 2, 3, 32),
        draw(4, 6, 2, 3, 32),
    ]
    made, _ = attend_branches(*(part.to(dtype) for part in parts), scale=0.3)
    exact, _ = attend_branches(*(part.to(dtype).float() for part in parts), scale=0.3)
    assert near(made, exact.double())


@dtypes
@with_and_without_library
def test_convolutions_are_rounded_once(dtype: torch.dtype, has_library: bool, choose_library: Any) -> None:
    choose_library(has_library)
    x, weight, bias = draw(0, 2, 5, 20).to(dtype), draw(1, 7, 5, 3).to(dtype), draw(2, 7).to(dtype)
    for stride in (1, 2):
        exact = F.conv1d(x.double(), weight.double(), bias.double(), stride=stride, padding=1)
        assert near(halves.convolve(x, weight, bias, stride), exact)


@dtypes
def test_a_compiled_product_is_the_same(dtype: torch.dtype) -> None:
    weight, bias, x = draw(0, 40, 64).to(dtype), draw(1, 40).to(dtype), draw(2, 3, 64).to(dtype)
    compiled = torch.compile(halves.multiply_rows, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, weight, bias), halves.multiply_rows(x, weight, bias))

"""Products of one row whose matrix waits in shared memory and in registers, beside their reference: Hopper."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tests.gpu.kernel_checks import DEVICE, check, random

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [torch.float32, None], ids=["float32", "the same"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("sizes", [(2, 2, 2, 6), (4, 4, 1, 0), (1, 1, 20, 0), (2, 1, 3, 17)], ids=str)
def test_products_that_are_added(
    dtype: torch.dtype, kind: torch.dtype | None, has_bias: bool, sizes: tuple[int, int, int, int]
) -> None:
    """All of a row before the input, and parts of it; every output once, however often it is run."""
    from unspool.kernels.gpu.products.staged_product import StagedTiling, multiply_staged

    outputs, inputs = 36, 5120
    weight, x, out = random(outputs, inputs, dtype=dtype), random(1, inputs, dtype=dtype), random(1, outputs)
    out = out.to(kind or dtype)
    bias = random(outputs, dtype=dtype) if has_bias else None
    product = F.linear(x.double(), weight.double(), bias.double() if bias is not None else None)
    for _ in range(2):
        expected = product + out.double()
        multiply_staged(weight, x, out, StagedTiling(*sizes, registers=128), bias=bias)
        check(out, expected, dtype)


def test_measured_shapes_as_a_step_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from unspool.kernels.gpu.products import product, staged_product

    calls: list[tuple[int, ...]] = []
    multiply_staged = staged_product.multiply_staged

    def record(weight: torch.Tensor, *args: object, **settings: object) -> None:
        calls.append(tuple(weight.shape))
        multiply_staged(weight, *args, **settings)

    monkeypatch.setattr(staged_product, "multiply_staged", record)
    for shape in staged_product.MEASURED:
        weight, x = random(*shape, dtype=torch.bfloat16), random(1, shape[1], dtype=torch.bfloat16)
        out = random(1, shape[0])
        expected = F.linear(x.double(), weight.double()) + out.double()
        product.multiply(weight, x, out, adds=True)
        check(out, expected, torch.bfloat16)
        again, normed = torch.zeros_like(out), torch.ones(shape[1], dtype=torch.bfloat16, device=DEVICE)
        product.multiply(weight, x, again, norm=normed, eps=1e-5, adds=True)  # another kernel's
    assert calls == list(staged_product.MEASURED)

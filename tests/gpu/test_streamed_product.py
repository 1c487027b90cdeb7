"""Products of one row whose matrix is streamed through shared memory, beside their reference: Hopper."""

from __future__ import annotations

import pytest
import torch
from tests.gpu.kernel_checks import DEVICE, check, random
from tests.gpu.test_products import MANNERS, surround

from unspool.kernels.norms import rms_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs a Hopper GPU"
    ),
]
TILINGS = [(4, 3, 2, 4, 1), (8, 1, 1, 2, 2), (2, 9, 4, 1, 4)]  # held in turns, all at once, columns among warps


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", TILINGS)
@pytest.mark.parametrize(("outputs", "inputs"), [(96, 256), (72, 1152), (83, 2056)], ids=["even", "part", "odd"])
@pytest.mark.parametrize("manner", MANNERS)
def test_streamed_products(
    dtype: torch.dtype, sizes: tuple[int, int, int, int, int], outputs: int, inputs: int, manner: str
) -> None:
    from unspool.kernels.gpu.products.streamed_product import StreamTiling, multiply_streamed

    weight = random(outputs * (2 if manner == "gated" else 1), inputs, dtype=dtype)
    x, out = random(1, inputs, dtype=dtype), random(1, outputs, dtype=dtype)
    settings, expected = surround(manner, weight.double(), x, out)
    multiply_streamed(weight, x, out, StreamTiling(*sizes), **settings)
    check(out, expected, dtype)


@pytest.mark.parametrize("sizes", TILINGS)
@pytest.mark.parametrize("inputs", [200, 1152])
@pytest.mark.parametrize("manner", ["norm and bias", "gated", "plain"])
def test_a_streamed_product_adds_to_its_input(sizes: tuple[int, int, int, int, int], inputs: int, manner: str) -> None:
    """The sum is rounded as it is written, and the product is that of the rounded sum."""
    from unspool.kernels.gpu.products.result import Addend
    from unspool.kernels.gpu.products.streamed_product import StreamTiling, multiply_streamed

    weight = random(48 * (2 if manner == "gated" else 1), inputs, dtype=torch.bfloat16)
    x, made, norm = (random(*shape, dtype=torch.bfloat16) for shape in ((1, inputs), (1, inputs), (inputs,)))
    into, out = torch.full_like(x, torch.nan), random(1, 48, dtype=torch.bfloat16)
    whole = x.double() + rms_norm(made.double(), norm.double(), 1e-3)
    settings, expected = surround(manner, weight.double(), whole.to(torch.bfloat16), out)
    multiply_streamed(weight, x, out, StreamTiling(*sizes), addend=Addend(made, norm, 1e-3, into), **settings)
    check(into, whole, torch.bfloat16)
    check(out, expected, torch.bfloat16)


def test_one_after_the_other() -> None:
    """Kernels that begin before the ones they read from have ended: a chain gives what its parts give."""
    from unspool.kernels.gpu.products.streamed_product import StreamTiling, multiply_streamed

    weights = [random(1024, 1024, dtype=torch.bfloat16) / 32 for _ in range(24)]
    states = [random(1, 1024, dtype=torch.bfloat16)] + [torch.full((1, 1024), torch.nan, device=DEVICE).bfloat16()] * 24
    states = [states[0], *(state.clone() for state in states[1:])]
    for weight, before, after in zip(weights, states, states[1:], strict=False):
        multiply_streamed(weight, before, after, StreamTiling(4, 2, 2, 4))
    for weight, before, after in zip(weights, states, states[1:], strict=False):
        check(after, before.double() @ weight.double().T, torch.bfloat16)

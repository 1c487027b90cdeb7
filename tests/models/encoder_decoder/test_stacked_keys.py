"""All layers' keys and values by one product, beside a product for each."""

from __future__ import annotations

import pytest
import torch

from unspool.models.encoder_decoder.stacked_keys import StackedKeys
from unspool.models.weights import Linear


def make_linears(has_bias: bool) -> list[Linear]:
    whole = Linear(torch.randn(3 * 16, 8), torch.randn(3 * 16) if has_bias else None)
    return [whole.part(layer, 3) for layer in range(3)]


@pytest.mark.parametrize("has_bias", [False, True])
def test_one_product_is_those_of_the_layers(has_bias: bool) -> None:
    linears = make_linears(has_bias)
    stacked, states = StackedKeys.find(linears), torch.randn(2, 5, 8)
    assert stacked is not None and stacked.weight.data_ptr() == linears[0].weight.data_ptr()
    found = stacked.multiply(states, num_heads=4)
    assert found.shape == (3, 2, 5, 2, 4, 2)
    for layer, linear in zip(found, linears, strict=True):
        torch.testing.assert_close(layer.flatten(2), linear(states))


def test_matrices_that_lie_elsewhere_are_not_taken() -> None:
    linears = make_linears(True)
    assert StackedKeys.find([linears[0], linears[2], linears[1]]) is None
    linears[1].weight = linears[1].weight.clone()
    assert StackedKeys.find(linears) is None
    assert StackedKeys.find([]) is None

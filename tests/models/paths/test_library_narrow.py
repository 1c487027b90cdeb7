"""Copies of float32 matrices in bfloat16: only exact ones, with the same bits, and none older than its matrix."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from unspool.kernels.cpu import find_library, why_missing
from unspool.kernels.cpu.structures import describe_matrix
from unspool.models.decoder.model import Decoder
from unspool.models.paths.library import LibraryPath
from unspool.models.paths.library_narrow import NarrowCopies
from unspool.models.weights import iterate_tensors

pytestmark = pytest.mark.skipif(find_library() is None, reason=f"no CPU library: {why_missing()}")
BFLOATS = 7  # US_BF16
TOKENS = torch.tensor([[5, 9, 31, 7], [8, 3, 44, 60]])


def make(pair: Any, *, is_exact: bool = True, packs: bool = True) -> Decoder:
    weights = copy.deepcopy(pair.native.weights)
    for tensor in iterate_tensors(weights) if is_exact else ():
        tensor.copy_(tensor.bfloat16())
    model = Decoder(pair.native.spec, weights, pair.config, pair.native.device, pair.native.dtype)
    model.packs_for_batches = packs
    return model


def read(model: Decoder) -> torch.Tensor:
    """Logits of a prompt of two rows, and of a step."""
    cache = model.new_cache("dynamic", rows=2)
    first = model.forward(TOKENS, cache)
    second = model.forward(TOKENS[:, :1], cache)
    assert first.path == second.path == "library"
    return torch.stack((first.logits, second.logits))


def list_kinds(model: Decoder) -> set[int]:
    library = model.find_path("library")
    assert isinstance(library, LibraryPath)
    layers = library._calls._described._layers
    return {getattr(layer, name).kind for layer in layers for name in ("qkv", "out", "up", "down")}


@pytest.mark.parametrize("name", ["llama", "llama-tied-biased", "gemma3", "gpt2", "phi", "mixtral"])
def test_copies_give_the_same_bits(pair_of: Callable[[str], Any], name: str) -> None:
    model, plain = make(pair_of(name)), make(pair_of(name), packs=False)
    assert torch.equal(read(model), read(plain))
    assert list_kinds(model) == {BFLOATS} and list_kinds(plain) == {0}
    rounded = make(pair_of(name), is_exact=False)
    read(rounded)
    assert list_kinds(rounded) == {0}


def test_a_changed_matrix_has_no_copy(pair_of: Callable[[str], Any]) -> None:
    model, plain = make(pair_of("llama")), make(pair_of("llama"), packs=False)
    before = read(model)
    for changed in (model, plain):
        changed.weights.layers[1].down.weight.mul_(1.7)
    after = read(model)
    assert torch.equal(after, read(plain)) and not torch.equal(after, before)
    assert list_kinds(model) == {0}


@pytest.mark.parametrize("kind", ["late", "random", "float64", "turned", "inference"])
def test_what_has_no_copy(pair_of: Callable[[str], Any], kind: str) -> None:
    model = make(pair_of("llama"))
    layer = model.weights.layers[1].down
    if kind == "late":  # only its last number is none of bfloat16
        layer.weight[-1, -1] = 1.0001
    elif kind == "random":
        layer.weight.copy_(torch.randn(layer.weight.shape))
    elif kind == "turned":
        layer.weight = layer.weight.t().contiguous().t()
    elif kind == "inference":  # whoever writes to it is not noticed
        with torch.inference_mode():
            layer.weight = layer.weight.clone()
    else:
        layer.weight = layer.weight.double()
    copies = NarrowCopies(model.weights)
    assert copies.find(layer.weight) is None
    others = [model.weights.layers[0].down, model.weights.layers[1].up, model.weights.head]
    for other in others:
        copy = copies.find(other.weight)
        assert copy is not None and copy.dtype == torch.bfloat16 and torch.equal(copy.float(), other.weight)
    assert copies.is_current()
    others[1].weight.add_(1)
    assert not copies.is_current()


@pytest.mark.parametrize("columns", [1, 33, 96, 1000])
def test_products_have_the_bits_of_float32(columns: int) -> None:
    library = find_library()
    assert library is not None
    generator = torch.Generator().manual_seed(columns)
    halves, bias = torch.randn(21, columns, generator=generator).bfloat16(), torch.randn(21, generator=generator)
    wide = halves.float()
    own = library.instructions
    for name in library.available:
        library.use_instructions(name)
        for rows in (1, 2, 5, 9):
            x = torch.randn(rows, columns, generator=generator)
            expected = library.multiply(describe_matrix(wide, bias, "float32", 21, columns), x)
            made = library.multiply(describe_matrix(halves, bias, "bfloat16", 21, columns), x)
            assert torch.equal(made, expected)
    library.use_instructions(own)
    some = torch.tensor([3, 20, 0])
    assert torch.equal(library.read_rows(describe_matrix(halves, None, "bfloat16", 21, columns), some), wide[some])

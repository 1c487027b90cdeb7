"""Copies of float32 matrices in bfloat16: only exact ones, whose products are float32's, and none older than its
matrix."""

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
from unspool.models.paths.library_model import DescribedModel
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
def test_copies_give_the_same_logits(pair_of: Callable[[str], Any], name: str) -> None:
    model, plain = make(pair_of(name)), make(pair_of(name), packs=False)
    torch.testing.assert_close(read(model), read(plain), rtol=1e-4, atol=1e-5)
    assert BFLOATS in list_kinds(model) and list_kinds(plain) == {0}
    rounded = make(pair_of(name), is_exact=False)
    read(rounded)
    assert list_kinds(rounded) == {0}


def test_many_tokens_of_short_texts_have_the_same_bits_alone(
    pair_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(pair_of("llama"))
    library = model.find_path("library")
    assert isinstance(library, LibraryPath)
    monkeypatch.setattr(DescribedModel, "is_narrow", True)  # all but one matrix are: its width is no tile's
    monkeypatch.setattr(library, "_most_narrow", 40)
    tokens = torch.randint(3, 60, (3, 41), generator=torch.Generator().manual_seed(1))
    together = model.forward(tokens[:, :40], model.new_cache("dynamic", rows=3))
    assert together.path == "library", together.path_reason
    for row in range(3):
        alone = model.forward(tokens[row : row + 1, :40], model.new_cache("dynamic", rows=1))
        assert torch.equal(alone.logits[0], together.logits[row])
    longer = model.forward(tokens, model.new_cache("dynamic", rows=3))
    assert longer.path == "eager" and "more than 40 tokens of a text" in longer.path_reason


def test_a_changed_matrix_has_no_copy(pair_of: Callable[[str], Any]) -> None:
    model, plain = make(pair_of("llama")), make(pair_of("llama"), packs=False)
    before = read(model)
    for changed in (model, plain):
        changed.weights.layers[1].out.weight.mul_(1.7)
    after = read(model)
    torch.testing.assert_close(after, read(plain), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(after, before, rtol=1e-4, atol=1e-5)
    assert list_kinds(model) == {0}


@pytest.mark.parametrize("kind", ["late", "random", "float64", "turned", "inference"])
def test_what_has_no_copy(pair_of: Callable[[str], Any], kind: str) -> None:
    model = make(pair_of("llama"))
    layer = model.weights.layers[1].out
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
    copies = NarrowCopies(model.spec, model.weights)
    assert copies.find(layer.weight) is None
    others = [model.weights.layers[0].out, model.weights.layers[1].up, model.weights.head]
    for other in others:
        copy = copies.find(other.weight)
        assert copy is not None and copy.dtype == torch.bfloat16
        matrix = describe_matrix(copy, None, "bfloat16", *other.weight.shape)
        library = find_library()
        assert library is not None
        assert torch.equal(library.read_rows(matrix, torch.arange(len(other.weight))), other.weight)
    assert copies.is_current() and not copies.is_whole
    others[1].weight.add_(1)
    assert not copies.is_current()

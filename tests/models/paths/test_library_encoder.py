"""An encoder's products with short sources through exact copies of its matrices, beside torch's products."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.models.encoder_decoder.test_model import KINDS, find_pair
from tests.models.paths.replacing import WAYS, replace

from unspool.kernels.cpu import find_library, why_missing
from unspool.models.encoder_decoder.model import EncoderDecoder
from unspool.models.paths import library_encoder
from unspool.models.paths.library_encoder import EncoderProducts, multiply_plainly
from unspool.models.paths.library_encoding import LibraryEncoder
from unspool.models.weights import Linear, iterate_tensors

pytestmark = pytest.mark.skipif(find_library() is None, reason=f"no CPU library: {why_missing()}")
LIMITS = {"bfloat16": 60, "float16": 60}


@pytest.fixture(autouse=True)
def few_rows_on_any_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    library = find_library()
    assert library is not None
    monkeypatch.setitem(library_encoder._MOST_ROWS, library.instructions, LIMITS)
    monkeypatch.setattr(LibraryEncoder, "run", lambda self, x, lengths: None)  # products alone


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    return {}


@pytest.fixture
def pair_model(tmp_path_factory: pytest.TempPathFactory, known: dict[str, Any], load_pair: Any) -> Any:
    def make(name: str, dtype: torch.dtype) -> EncoderDecoder:
        pair = find_pair(name, tmp_path_factory, known, load_pair)
        weights = copy.deepcopy(pair.native.weights)
        for tensor in iterate_tensors(weights):
            tensor.copy_(tensor.to(dtype))
        return EncoderDecoder(pair.native.spec, weights, pair.config, pair.native.device, pair.native.dtype)

    return make


def encode(model: EncoderDecoder, lengths: list[int]) -> list[torch.Tensor]:
    """The encoder's states, and the keys and values of the sources."""
    source = torch.randint(4, 97, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(5))
    encoded = model.encode(source, lengths)
    cache = model.new_cache("dynamic", len(lengths), 8, encoded=encoded)
    sources = cache.read_sources()
    made = [torch.cat([encoded.states[row, :length] for row, length in enumerate(lengths)])]
    return made + [tensor[row, :, :length] for pair in sources for tensor in pair for row, length in enumerate(lengths)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", [name for name in KINDS if "unscaled" not in name])
def test_states_and_keys_are_those_of_torch(pair_model: Any, name: str, dtype: torch.dtype) -> None:
    model = pair_model(name, dtype)
    for lengths in ([11], [20, 7, 13]):
        made = encode(model, lengths)
        assert model._products._copies is not None
        assert model._products._copies.find(model.weights.encoder.layers[0].qkv.weight) is not None
        held, model._products = model._products, EncoderProducts([], narrows=False)
        expected = encode(model, lengths)
        model._products = held
        for one, other in zip(made, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=3e-5)


def test_long_sources_are_torchs(pair_model: Any) -> None:
    model = pair_model("t5", torch.float16)
    model.encode(torch.full((3, 21), 5))
    assert model._products._copies is None
    assert model._products.choose(61) is multiply_plainly
    model.packs_for_batches = False
    assert model._products.choose(2) is multiply_plainly


@pytest.mark.parametrize("way", WAYS)
def test_a_copy_never_outlives_its_matrix(pair_model: Any, way: str) -> None:
    model = pair_model("bart", torch.bfloat16)
    before = encode(model, [11])
    weight = model.weights.encoder.layers[0].out.weight
    replace(weight, weight * 1.7, way)
    after = encode(model, [11])
    assert model._products.choose(2) is multiply_plainly
    assert not torch.allclose(after[0], before[0], rtol=1e-3, atol=1e-3)
    model._products = EncoderProducts([], narrows=False)
    for one, other in zip(after, encode(model, [11]), strict=True):
        torch.testing.assert_close(one, other)


def test_matrices_without_copies_are_multiplied_all_the_same() -> None:
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    held, exact = Linear(weight), Linear(weight.half().float(), torch.ones(32))
    multiply = EncoderProducts([(held, 1), (exact, 1)], narrows=True).choose(3)
    x = torch.randn(1, 3, 64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(multiply(held, x), held(x))
    torch.testing.assert_close(multiply(exact, x), exact(x), rtol=1e-4, atol=1e-5)
    assert torch.equal(multiply(exact, x.expand(30, 3, 64)), exact(x.expand(30, 3, 64)))  # more than it was chosen for

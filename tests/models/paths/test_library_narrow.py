"""Copies of float32 matrices in bfloat16 or float16: only exact ones, whose products are float32's, and none older than
its matrix."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from tests.models.encoder_decoder.test_model import KINDS, find_pair

import unspool
from unspool.bench.floor import count_step_bytes
from unspool.kernels.cpu import BLOCK, find_library, why_missing
from unspool.kernels.cpu.structures import describe_matrix
from unspool.models.decoder.model import Decoder
from unspool.models.encoder_decoder.model import EncoderDecoder
from unspool.models.paths import library as library_file
from unspool.models.paths.library import LibraryPath
from unspool.models.paths.library_model import DescribedModel
from unspool.models.paths.library_narrow import NarrowCopies
from unspool.models.weights import iterate_tensors
from unspool.protocols import Want

pytestmark = pytest.mark.skipif(find_library() is None, reason=f"no CPU library: {why_missing()}")
NUMBERS = {torch.bfloat16: 7, torch.float16: 8}  # us_kind
TOKENS = torch.tensor([[5, 9, 31, 7], [8, 3, 44, 60]])
Model = Decoder | EncoderDecoder


def make(pair: Any, *, dtype: torch.dtype | None = torch.bfloat16, packs: bool = True) -> Any:
    """The pair's native model with weights that a dtype holds."""
    native = pair.native
    weights = copy.deepcopy(native.weights)
    for tensor in iterate_tensors(weights) if dtype is not None else ():
        tensor.copy_(tensor.to(dtype))
    model = type(native)(native.spec, weights, pair.config, native.device, native.dtype)
    model.packs_for_batches = packs
    return model


def read(model: Decoder) -> torch.Tensor:
    """Logits of a prompt of two rows, and of a step."""
    cache = model.new_cache("dynamic", rows=2)
    first = model.forward(TOKENS, cache)
    second = model.forward(TOKENS[:, :1], cache)
    assert first.path == second.path == "library"
    return torch.stack((first.logits, second.logits))


def describe(model: Model) -> DescribedModel:
    library = model.find_path("library")
    assert isinstance(library, LibraryPath)
    return library._calls._described


def list_kinds(model: Model, names: Sequence[str] = ("qkv", "out", "up", "down")) -> set[int]:
    return {getattr(layer, name).kind for layer in describe(model)._layers for name in names}


@pytest.mark.parametrize("dtype", list(NUMBERS))
@pytest.mark.parametrize("name", ["llama", "llama-tied-biased", "gemma3", "gpt2", "phi", "mixtral"])
def test_copies_give_the_same_logits(pair_of: Callable[[str], Any], name: str, dtype: torch.dtype) -> None:
    model, plain = make(pair_of(name), dtype=dtype), make(pair_of(name), dtype=dtype, packs=False)
    torch.testing.assert_close(read(model), read(plain), rtol=1e-4, atol=1e-5)
    assert NUMBERS[dtype] in list_kinds(model) and list_kinds(plain) == {0}
    rounded = make(pair_of(name), dtype=None)
    read(rounded)
    assert list_kinds(rounded) == {0}


def test_a_step_is_counted_by_what_it_reads(pair_of: Callable[[str], Any]) -> None:
    model, plain = make(pair_of("llama")), make(pair_of("llama"), packs=False)
    bytes_of = {id(one): count_step_bytes(one, 1, 0) for one in (model, plain)}
    copied = [
        linear.weight for layer in model.weights.layers for linear in (layer.qkv, layer.out, layer.up, layer.down)
    ]
    copied = [weight for weight in (*copied, model.weights.head.weight) if weight.shape[1] % BLOCK == 0]
    copies = [model.find_path("library").find_copy(weight) for weight in copied]
    assert copies and all(one.nbytes * 2 >= weight.nbytes for one, weight in zip(copies, copied, strict=True))
    saved = sum(weight.nbytes - one.nbytes for one, weight in zip(copies, copied, strict=True))
    assert saved > 0 and bytes_of[id(plain)] - bytes_of[id(model)] == saved


def test_an_expert_that_all_tokens_run_through_has_copies(pair_of: Callable[[str], Any]) -> None:
    model, plain = make(pair_of("dots1")), make(pair_of("dots1"), packs=False)
    for changed in (model, plain):  # 48 numbers wide as made, which are no whole tiles
        assert changed.weights.layers[1].mixture.shared_up.weight.shape == (96, 32)
    torch.testing.assert_close(read(model), read(plain), rtol=1e-4, atol=1e-5)
    assert describe(model)._layers[1].shared_up.kind == NUMBERS[torch.bfloat16]


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    return {}


def read_pair(model: EncoderDecoder, tokens: torch.Tensor) -> list[torch.Tensor]:
    """Logits of a prompt of three rows, of a step, and of several positions."""
    source = torch.randint(4, 97, (3, 40), generator=torch.Generator().manual_seed(5))
    cache = model.new_cache("dynamic", 3, 64, encoded=model.encode(source, [40, 7, 21]))
    made = [model.forward(tokens[:, :5], cache)]
    made.append(model.forward(tokens[:, 5:6], cache))
    made.append(model.forward(tokens[:, 6:9], cache, want=Want(logits="all")))
    assert {forward.path for forward in made} == {"library"}
    return [forward.logits for forward in made]


@pytest.mark.parametrize("dtype", list(NUMBERS))
@pytest.mark.parametrize("name", list(KINDS))
def test_copies_of_an_encoder_decoder(
    name: str,
    dtype: torch.dtype,
    tmp_path_factory: pytest.TempPathFactory,
    known: dict[str, Any],
    load_pair: Any,
) -> None:
    pair = find_pair(name, tmp_path_factory, known, load_pair)
    model, plain = make(pair, dtype=dtype), make(pair, dtype=dtype, packs=False)
    tokens = torch.randint(4, 97, (3, 9), generator=torch.Generator().manual_seed(0))
    for made, expected in zip(read_pair(model, tokens), read_pair(plain, tokens), strict=True):
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=3e-5)
    described = describe(model)
    matrices = [getattr(layer, name) for layer in described._layers for name in ("qkv", "cross_q", "cross_out")]
    for matrix in (*matrices, described._model.head):  # whole tiles have copies
        assert matrix.kind == (NUMBERS[dtype] if matrix.columns % BLOCK == 0 else 0)
    assert list_kinds(plain, ["cross_q", "cross_out"]) == list_kinds(plain) == {0}
    source = torch.randint(4, 97, (2, 12), generator=torch.Generator().manual_seed(6))
    for settings in ({}, {"num_beams": 3}):
        told = {"max_new_tokens": 12, "do_sample": False, "decoder_start_token_id": 0, **settings}
        assert torch.equal(unspool.generate(model, source, **told), unspool.generate(plain, source, **told))


def test_a_changed_cross_attention_has_no_copy(
    tmp_path_factory: pytest.TempPathFactory, known: dict[str, Any], load_pair: Any
) -> None:
    pair = find_pair("bart", tmp_path_factory, known, load_pair)
    model, plain = make(pair), make(pair, packs=False)
    tokens = torch.randint(4, 97, (3, 9), generator=torch.Generator().manual_seed(0))
    before = read_pair(model, tokens)
    for changed in (model, plain):
        changed.weights.decoder.crosses[0].out.weight.mul_(1.7)
    for made, expected, old in zip(read_pair(model, tokens), read_pair(plain, tokens), before, strict=True):
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=3e-5)
        assert not torch.allclose(made, old, rtol=1e-4, atol=1e-5)
    assert list_kinds(model, ("cross_q", "cross_out")) == {0}


def test_many_tokens_of_short_texts_have_the_same_bits_alone(
    pair_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make(pair_of("llama"))
    library = model.find_path("library")
    assert isinstance(library, LibraryPath)
    monkeypatch.setattr(DescribedModel, "narrow_kind", "bfloat16")  # all but one matrix are: its width is no tile's
    monkeypatch.setitem(library_file._MOST_NARROW, (library._instructions, "bfloat16"), 40)
    monkeypatch.setattr(library, "most_float", 64)
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
    copies = NarrowCopies(list(describe(model)._list_products()))
    assert copies.find(layer.weight) is None
    others = [model.weights.layers[0].out, model.weights.layers[1].up, model.weights.head]
    for other in others:
        copy = copies.find(other.weight)
        assert copy is not None and copy.dtype == torch.bfloat16
        matrix = describe_matrix(copy, None, "bfloat16", *other.weight.shape)
        library = find_library()
        assert library is not None
        assert torch.equal(library.read_rows(matrix, torch.arange(len(other.weight))), other.weight)
    assert copies.is_current() and copies.kind is None
    others[1].weight.add_(1)
    assert not copies.is_current()


def test_matrices_of_two_kinds(pair_of: Callable[[str], Any]) -> None:
    """Each has the first kind that holds it; all of them together are the slower one."""
    model = make(pair_of("gpt2"))
    model.weights.layers[1].out.weight[0, 0] = 1 + 2**-10
    products = list(describe(model)._list_products())
    copies = NarrowCopies(products)
    dtypes = [copies.find(linear.weight).dtype for linear, _ in products]
    assert dtypes.count(torch.float16) == 1 and dtypes.count(torch.bfloat16) == len(dtypes) - 1
    assert copies.kind == "float16"
    assert NarrowCopies(products[:2]).kind == "bfloat16"
    model.weights.layers[0].out.weight[0, 0] = 1 + 2**-20
    assert NarrowCopies(products).kind is None

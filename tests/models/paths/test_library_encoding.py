"""An encoder's pass in one call of the CPU library, beside torch's operators."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tests.conformance.cases import GOLDENS
from tests.models.encoder_decoder.test_model import KINDS, find_pair
from tests.models.paths.replacing import WAYS, replace

import unspool
from unspool.kernels.cpu import find_library, why_missing
from unspool.models.encoder_decoder.model import EncoderDecoder
from unspool.models.paths import library_encoding
from unspool.models.paths.library_encoding import LibraryEncoder
from unspool.models.weights import PackedLinear, iterate_tensors
from unspool.protocols import Want

pytestmark = pytest.mark.skipif(find_library() is None, reason=f"no CPU library: {why_missing()}")
RAGGED = [20, 1, 7, 30, 13]


@pytest.fixture(autouse=True)
def any_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices of these models are too narrow for copies."""
    monkeypatch.setattr(library_encoding, "_find_most_float", lambda _: 1 << 20)


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    return {}


@pytest.fixture
def pair_model(tmp_path_factory: pytest.TempPathFactory, known: dict[str, Any], load_pair: Any) -> Any:
    def make(name: str, dtype: torch.dtype | None) -> EncoderDecoder:
        pair = find_pair(name, tmp_path_factory, known, load_pair)
        weights = copy.deepcopy(pair.native.weights)
        for tensor in iterate_tensors(weights) if dtype is not None else ():
            tensor.copy_(tensor.to(dtype))
        return EncoderDecoder(pair.native.spec, weights, pair.config, pair.native.device, pair.native.dtype)

    return make


def encode(model: Any, lengths: list[int], seed: int = 5) -> list[torch.Tensor]:
    """Each source's states."""
    source = torch.randint(4, 97, (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(seed))
    states = model.encode(source, lengths).states
    return [states[row, :length] for row, length in enumerate(lengths)]


def encode_by_torch(model: Any, lengths: list[int]) -> list[torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LibraryEncoder, "run", lambda self, x, lengths: None)
        return encode(model, lengths)


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens of passes that the library has run."""
    runs, run = [], LibraryEncoder.run

    def note(self: LibraryEncoder, x: torch.Tensor, lengths: Any) -> Any:
        made = run(self, x, lengths)
        if made is not None:
            runs.append(len(x))
        return made

    monkeypatch.setattr(LibraryEncoder, "run", note)
    return runs


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", list(KINDS))
def test_states_are_those_of_torch(
    pair_model: Any, name: str, dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, runs = pair_model(name, dtype), count_runs(monkeypatch)
    for lengths in ([11], [5, 5], RAGGED[:3]):
        made = encode(model, lengths)
        assert runs.pop() == sum(lengths)
        for one, other in zip(made, encode_by_torch(model, lengths), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("name", ["t5", "bart", "pegasus", "marian"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_quantised_weights(name: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations of 8 bits may be rounded to either side, so numbers are near and no more."""
    model = unspool.load(GOLDENS / "models" / name, quantize=kind).model
    if not isinstance(model.weights.encoder.layers[0].qkv, PackedLinear):
        pytest.skip(f"the layers of {name} are too narrow for {kind}")
    runs = count_runs(monkeypatch)
    made = encode(model, RAGGED[:3])
    assert runs == [sum(RAGGED[:3])]
    for one, other in zip(made, encode_by_torch(model, RAGGED[:3]), strict=True):
        assert torch.linalg.vector_norm(one - other) <= 0.05 * torch.linalg.vector_norm(other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["t5-gated", "bart"])
def test_a_source_has_the_same_bits_alone(pair_model: Any, name: str, dtype: torch.dtype) -> None:
    model = pair_model(name, dtype)
    source = torch.randint(4, 97, (5, max(RAGGED)), generator=torch.Generator().manual_seed(5))
    together = model.encode(source, RAGGED).states
    for row, length in enumerate(RAGGED):
        alone = model.encode(source[row : row + 1, :length], [length]).states[0]
        assert torch.equal(together[row, :length], alone)


def test_what_is_left_to_torch(pair_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, runs = pair_model("t5", None), count_runs(monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(library_encoding, "_find_most_float", lambda _: 64)
        encode(model, [60, 60])
    assert not runs, "plain floats of many tokens"
    ids = torch.full((1, 8), 5)
    assert model.encode(ids, want=Want(hidden_states=True)).hidden_states is not None
    assert not runs, "states of every layer"
    model.encode(ids)
    assert runs == [8]


def test_many_sources_are_read_some_at_a_time(pair_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model, groups = pair_model("bart", torch.float16), []
    together = encode(model, RAGGED)
    library = find_library()
    assert library is not None
    read = library.encode
    monkeypatch.setattr(library, "encode", lambda *given: groups.append(given[2]) or read(*given))
    monkeypatch.setattr(library_encoding, "_MOST_TOGETHER", 28)
    for one, other in zip(encode(model, RAGGED), together, strict=True):
        assert torch.equal(one, other)
    assert groups == [[20, 1, 7], [30], [13]]


@pytest.mark.parametrize(("kind", "error"), [(None, 1e-5), ("int8", 0.05)])
def test_sounds(kind: str | None, error: float, monkeypatch: pytest.MonkeyPatch) -> None:
    model, runs = unspool.load(GOLDENS / "models" / "whisper", quantize=kind).model, count_runs(monkeypatch)
    shape = model.info.features
    assert shape is not None
    features = torch.randn(2, shape.channels, shape.frames, generator=torch.Generator().manual_seed(3))
    made = model.encode(None, embeds=features).states
    assert runs == [2 * shape.positions]
    with monkeypatch.context() as patch:
        patch.setattr(LibraryEncoder, "run", lambda self, x, lengths: None)
        expected = model.encode(None, embeds=features).states
    assert torch.linalg.vector_norm(made - expected) <= error * torch.linalg.vector_norm(expected)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_changed_matrix_is_read_as_it_is(pair_model: Any, way: str, dtype: torch.dtype | None) -> None:
    model = pair_model("bart", dtype)
    before = encode(model, [11])
    weight = model.weights.encoder.layers[0].out.weight
    replace(weight, weight * 1.7, way)
    after = encode(model, [11])
    assert not torch.allclose(after[0], before[0], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(after[0], encode_by_torch(model, [11])[0], rtol=1e-4, atol=3e-5)


def test_biases_reach_as_far_as_a_source(pair_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of distances grow with the longest source that was read."""
    model, runs = pair_model("t5", torch.bfloat16), count_runs(monkeypatch)
    for length in (3, 200, 40, 300):
        made = encode(model, [length])
        assert runs.pop() == length
        torch.testing.assert_close(made[0], encode_by_torch(model, [length])[0], rtol=1e-4, atol=3e-5)

"""An encoder-decoder's passes in one call of the CPU library against the same passes made of torch's operators."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from tests.models.encoder_decoder.test_model import KINDS, find_pair

import unspool
from unspool.cache import DynamicCache, EncoderDecoderCache
from unspool.errors import InputError
from unspool.kernels.cpu import find_library, why_missing
from unspool.models.encoder_decoder.model import EncoderDecoder
from unspool.models.paths.library_pair import PairLibraryPath
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource
from unspool.protocols import Want

pytestmark = pytest.mark.skipif(find_library() is None, reason=f"no CPU library: {why_missing()}")


@pytest.fixture(scope="module")
def known() -> dict[str, Any]:
    return {}


@pytest.fixture
def model_of(tmp_path_factory: pytest.TempPathFactory, known: dict[str, Any], load_pair: Any) -> Callable[..., Any]:
    def find(name: str) -> EncoderDecoder:
        model: EncoderDecoder = find_pair(name, tmp_path_factory, known, load_pair).native
        return open_path(model)

    return find


def open_path(model: EncoderDecoder) -> EncoderDecoder:
    path = model.find_path("library")
    assert isinstance(path, PairLibraryPath)
    path.most_float = None  # long passes too
    return model


def make_tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(4, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


def encode(model: EncoderDecoder, rows: int, lengths: list[int]) -> EncoderDecoderCache:
    return model.new_cache("dynamic", rows, 64, encoded=model.encode(make_tokens(rows, max(lengths), 5), lengths))


def read(model: EncoderDecoder, cache: Any, tokens: torch.Tensor, counts: list[int] | None, want: Want) -> list[Any]:
    """A prompt, steps, a short pass and one more step."""
    made = [model.forward(tokens[:, :9], cache, counts=counts, want=want)]
    made += [model.forward(tokens[:, i : i + 1], cache, want=want) for i in range(9, 12)]
    made.append(model.forward(tokens[:, 12:15], cache, want=want))
    made.append(model.forward(tokens[:, 15:16], cache, want=want))
    return made


def assert_close(made: torch.Tensor, expected: torch.Tensor, tolerance: float = 3e-5) -> None:
    assert made.shape == expected.shape
    assert float((made - expected).abs().max()) <= tolerance * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("wanted", ["last", "all"])
@pytest.mark.parametrize("name", list(KINDS))
def test_passes_equal_those_of_operators(model_of: Callable[..., Any], name: str, wanted: Any) -> None:
    model, want = model_of(name), Want(logits=wanted, last_states=True)
    for rows, lengths, counts in ((1, [11], None), (3, [40, 7, 21], None), (3, [2, 30, 1], [9, 4, 1])):
        tokens = make_tokens(rows, 16)
        whole = read(model, encode(model, rows, lengths), tokens, counts, want)
        with model.without_paths("library"):
            plain = read(model, encode(model, rows, lengths), tokens, counts, want)
        for place, (made, expected) in enumerate(zip(whole, plain, strict=True)):
            assert (made.path, expected.path) == ("library", "eager")
            real = counts if counts is not None and not place else [made.last_states.shape[1]] * rows
            for row, count in enumerate(real):  # what lies past a row's end is nothing
                assert_close(made.last_states[row, :count], expected.last_states[row, :count])
                stop = count if wanted == "all" else None
                assert_close(made.logits[row, :stop], expected.logits[row, :stop])


@pytest.mark.parametrize("name", ["t5", "m2m_100", "marian"])
def test_beams_of_a_source_read_one_copy_of_its_keys(model_of: Callable[..., Any], name: str) -> None:
    model, tokens = model_of(name), make_tokens(10, 6)

    def decode() -> torch.Tensor:
        longest = model.info.longest_source or 70  # the last are more than one part of keys
        cache = encode(model, 2, [longest, 30])
        model.forward(tokens[:2, :1], cache)
        cache = cache.branch(5)
        first = model.forward(tokens[:, 1:2], cache).logits
        cache.select_rows([0, 0, 1, 4, 2, 9, 9, 8, 5, 6])
        assert cache.num_branches == 5
        second = model.forward(tokens[:, 2:3], cache).logits
        cache.select_rows([8, 1, 2])  # rows of their own
        return torch.cat([first, second, model.forward(tokens[:3, 3:4], cache).logits])

    whole = decode()
    with model.without_paths("library"):
        assert_close(whole, decode())


@pytest.mark.parametrize("name", ["umt5", "pegasus"])
def test_forks_read_their_row_and_its_source(model_of: Callable[..., Any], name: str) -> None:
    model, tokens = model_of(name), make_tokens(2, 9)

    def decode() -> torch.Tensor:
        cache = encode(model, 2, [9, 20])
        model.forward(tokens[:, :4], cache, counts=[4, 2])
        made = model.forward(tokens[:, 4:7].reshape(6, 1), cache.fork(range(3))).logits
        cache.keep_fork(torch.tensor([2, 1]))
        return torch.cat([made, model.forward(tokens[:, 7:8], cache).logits])

    whole = decode()
    with model.without_paths("library"):
        assert_close(whole, decode())


@pytest.mark.parametrize("packing", ["int8", "int4"])
@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_quantised_passes_equal_those_of_operators(golden_pair: Callable[[str], Any], name: str, packing: Any) -> None:
    pair = golden_pair(name)
    model = build_model(pair.config, MemorySource(pair.weights), packing=packing)
    assert isinstance(model, EncoderDecoder) and model.fast_path == "library"
    if name == "whisper":
        encoded = model.encode(None, embeds=torch.randn(2, 16, 60, generator=torch.Generator().manual_seed(0)))
    else:
        encoded = model.encode(make_tokens(2, 12), [12, 5])
    tokens = make_tokens(2, 16)
    whole = read(model, model.new_cache("dynamic", 2, encoded=encoded), tokens, None, Want())
    with model.without_paths("library"):
        plain = read(model, model.new_cache("dynamic", 2, encoded=encoded), tokens, None, Want())
    for made, expected in zip(whole, plain, strict=True):
        # Activations are rounded to 8 bits on both ways, but not always to the same side.
        assert_close(made.logits, expected.logits, 0.02)


def test_a_row_has_the_same_bits_alone_and_in_a_batch(model_of: Callable[..., Any]) -> None:
    model, tokens = model_of("marian"), make_tokens(3, 16)
    lengths = [11, 40, 23]
    encoded = model.encode(make_tokens(3, 40, 5), lengths)
    many = read(model, model.new_cache("dynamic", 3, encoded=encoded), tokens, None, Want())
    for row, length in enumerate(lengths):
        own = type(encoded)(encoded.states[row : row + 1, :length], [length])
        alone = read(model, model.new_cache("dynamic", 1, encoded=own), tokens[row : row + 1], None, Want())
        for place, (made, expected) in enumerate(zip(many, alone, strict=True)):
            if place:  # torch projects the sources: its products may differ by rows
                assert_close(made.logits[row], expected.logits[0], 1e-5)


@pytest.mark.parametrize("name", ["t5-gated", "bart", "m2m_100"])
def test_steps_in_one_call_are_steps(model_of: Callable[..., Any], name: str) -> None:
    model, source = model_of(name), make_tokens(3, 14, 5)
    settings = {"max_new_tokens": 20, "do_sample": False, "decoder_start_token_id": 0}
    in_one_call = unspool.generate(model, source, **settings)
    one_by_one = unspool.generate(model, source, **settings, output_scores=True, return_dict_in_generate=True)
    assert torch.equal(in_one_call, one_by_one.sequences)
    with model.without_paths("library"):
        assert torch.equal(in_one_call, unspool.generate(model, source, **settings))
    encoded = model.encode(source)
    stretch = model.take_steps([0] * 3, model.new_cache("dynamic", 3, encoded=encoded), 5, ())
    assert stretch is not None and stretch.path == "library"
    assert torch.equal(torch.tensor(stretch.steps).t(), in_one_call[:, 1:6])


def test_positions_end_where_the_model_does(model_of: Callable[..., Any]) -> None:
    model = model_of("bart")
    cache = encode(model, 1, [5])
    model.forward(make_tokens(1, 48), cache)
    with pytest.raises(InputError, match="position 48"):
        model.forward(make_tokens(1, 1), cache)


def test_a_table_of_positions_grows(model_of: Callable[..., Any]) -> None:
    model = model_of("m2m_100")
    cache = encode(model, 1, [5])
    tokens = make_tokens(1, 1100)
    model.forward(tokens[:, :500], cache)
    model.forward(tokens[:, 500:1099], cache)
    made = model.forward(tokens[:, 1099:], cache).logits
    with model.without_paths("library"):
        assert_close(made, model.forward(tokens, encode(model, 1, [5])).logits, 1e-4)


def test_weights_are_freed_with_the_last_name() -> None:
    config = transformers.T5Config(**KINDS["t5"][1])
    made = transformers.T5ForConditionalGeneration._from_config(config)
    model = build_model(config.to_dict(), MemorySource(dict(made.state_dict())))
    encoded = model.encode(make_tokens(1, 4))
    model.forward(make_tokens(1, 1), model.new_cache("dynamic", 1, encoded=encoded))
    gc.disable()
    try:
        seen = weakref.ref(model)
        del model
        assert seen() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("rows", [1, 3])
def test_sources_in_float16_are_read_as_the_same_numbers_in_float32(
    golden_pair: Callable[[str], Any], rows: int
) -> None:
    """To the bit, over several parts of a source, by each set of instructions."""
    pair, library = golden_pair("t5"), find_library()
    model = build_model(pair.config, MemorySource(pair.weights), packing="int8")
    assert isinstance(model, EncoderDecoder) and library is not None
    encoded, tokens = model.encode(make_tokens(rows, 150)), make_tokens(rows, 16)
    best = library.instructions
    try:
        for name in library.available:
            library.use_instructions(name)
            half, whole = (model.new_cache("dynamic", rows, encoded=encoded) for _ in range(2))
            wide = [(keys.float(), values.float()) for keys, values in half.cross_attention_cache]
            assert all(keys.dtype == torch.float16 for keys, _ in half.cross_attention_cache)
            whole.cross_attention_cache = DynamicCache.from_legacy_cache(wide)
            made, expected = (read(model, cache, tokens, None, Want()) for cache in (half, whole))
            assert model.fast_path == "library"
            for one, other in zip(made, expected, strict=True):
                assert torch.equal(one.logits, other.logits), name
    finally:
        library.use_instructions(best)

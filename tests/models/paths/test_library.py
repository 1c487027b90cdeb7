"""A pass in one call of the CPU library against the same pass made of torch's operators."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch

from unspool import generate
from unspool.cache import BranchingCache, Cache, DynamicCache
from unspool.kernels.cpu import find_library, why_missing
from unspool.models.decoder.model import Decoder
from unspool.models.paths.library import LibraryPath
from unspool.models.paths.library_model import explain_no_library
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource, PackedEmbedding, PackedLinear
from unspool.protocols import Want

pytestmark = pytest.mark.skipif(find_library() is None, reason=f"no CPU library: {why_missing()}")

WHOLE = [
    *("llama", "llama-tied-biased", "llama-llama3-rope", "llama-yarn", "mistral", "qwen2", "qwen2-window", "qwen3"),
    *("gemma", "gemma2", "gemma3", "gpt2", "gpt_neox", "gptj", "opt", "bloom", "phi"),
    *("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe", "glm4_moe", "gpt_oss"),
    *("flex_olmo", "ernie4_5_moe"),
]


def make(pair: Any) -> Decoder:
    native = pair.native
    model = Decoder(native.spec, native.weights, pair.config, native.device, native.dtype)
    library = model.find_path("library")
    assert isinstance(library, LibraryPath)
    library.most_float = None  # long passes too
    return model


def make_tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


def read(
    model: Decoder, tokens: torch.Tensor, counts: list[int] | None, cache: Cache, want: Want
) -> list[torch.Tensor]:
    """A prompt, three steps, a short pass and one more step: the logits of each."""
    passes = [model.forward(tokens[:, :9], cache, counts=counts, want=want).logits]
    passes += [model.forward(tokens[:, i : i + 1], cache, want=want).logits for i in range(9, 12)]
    passes.append(model.forward(tokens[:, 12:15], cache, want=want).logits)
    passes.append(model.forward(tokens[:, 15:16], cache, want=want).logits)
    return passes


def assert_close(made: torch.Tensor, expected: torch.Tensor) -> None:
    assert float((made - expected).abs().max()) <= 2e-5 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("wanted", ["last", "all"])
@pytest.mark.parametrize("name", WHOLE)
def test_passes_equal_those_of_operators(
    pair_of: Callable[[str], Any], name: str, wanted: Any, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, want = make(pair_of(name)), Want(logits=wanted)
    for rows, counts in ((1, None), (3, None), (3, [9, 4, 1])):
        tokens = make_tokens(rows, 16)
        whole = read(model, tokens, counts, model.new_cache(kind, rows, 32), want)
        with monkeypatch.context() as patch:
            patch.setattr(model, "paths", model.paths[1:])
            plain = read(model, tokens, counts, model.new_cache(kind, rows, 32), want)
        for made, expected in zip(whole, plain, strict=True):
            if counts is not None and made.dim() == 3 and made.shape[1] == 9:  # what lies past a row's end is nothing
                for row, count in enumerate(counts):
                    assert_close(made[row, :count], expected[row, :count])
            else:
                assert_close(made, expected)


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("wanted", ["last", "all"])
def test_a_pass_tells_the_likeliest_token_of_every_position(
    pair_of: Callable[[str], Any], name: str, wanted: Any
) -> None:
    model = make(pair_of(name))
    for rows, length in ((1, 1), (1, 11), (3, 5), (3, 40)):  # the last takes two calls
        made = model.forward(make_tokens(rows, length), model.new_cache("dynamic", rows, 48), want=Want(logits=wanted))
        assert made.likeliest is not None and torch.equal(made.likeliest, made.logits.argmax(-1))
    ragged = model.forward(make_tokens(2, 4), model.new_cache("dynamic", 2, 8), counts=[4, 2], want=Want(logits="all"))
    assert ragged.likeliest is None  # what lies past a row's end is nothing


@pytest.mark.parametrize("name", ["llama", "mistral", "bloom", "gemma2"])
def test_branches_read_what_they_share(
    pair_of: Callable[[str], Any], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = make(pair_of(name)), make_tokens(6, 4)

    def decode() -> torch.Tensor:
        prompt = DynamicCache()
        model.forward(make_tokens(2, 7, 1), prompt, counts=[7, 5])
        cache = BranchingCache(prompt, 3)
        first = model.forward(tokens[:, :1], cache).logits
        cache.select_rows([0, 0, 1, 5, 4, 3])
        return torch.stack([first, model.forward(tokens[:, 1:2], cache).logits])

    whole = decode()
    monkeypatch.setattr(model, "paths", model.paths[1:])
    assert_close(whole, decode())


def test_long_texts_are_read_in_parts(pair_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    model = make(pair_of("llama"))
    tokens = make_tokens(1, 700)

    def decode() -> torch.Tensor:
        cache = model.new_cache("dynamic", 1, 710)
        logits = [model.forward(tokens, cache).logits]
        logits += [model.forward(tokens[:, i : i + 1], cache).logits for i in range(3)]
        return torch.cat(logits)

    whole = decode()
    monkeypatch.setattr(model, "paths", model.paths[1:])
    assert_close(whole, decode())


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_alone_is_a_row_in_a_batch_bit_by_bit(pair_of: Callable[[str], Any], threads: int) -> None:
    library = find_library()
    assert library is not None
    model, before = make(pair_of("llama")), library.threads
    tokens, counts = make_tokens(5, 300), [300, 7, 129, 1, 64]
    reference = [read_row(model, tokens[row : row + 1, :count]) for row, count in enumerate(counts)]
    try:
        library.threads = threads
        cache = model.new_cache("dynamic", 5, 310)
        together = [model.forward(tokens, cache, counts=counts).logits]
        together.append(model.forward(tokens[:, :1], cache).logits)
    finally:
        library.threads = before
    for row, alone in enumerate(reference):
        assert torch.equal(torch.stack([made[row] for made in together]), alone)


def read_row(model: Decoder, tokens: torch.Tensor) -> torch.Tensor:
    first = make_tokens(5, 300)[:, :1]
    row = next(i for i in range(5) if int(first[i]) == int(tokens[0, 0]))
    cache = model.new_cache("dynamic", 1, 310)
    return torch.cat([model.forward(tokens, cache).logits, model.forward(first[row : row + 1], cache).logits])


def test_more_threads_than_cores_change_no_token(pair_of: Callable[[str], Any]) -> None:
    """They wait for each other, so that calls and the steps of a call go on with fewer."""
    library = find_library()
    assert library is not None
    model, tokens, before = make(pair_of("llama")), make_tokens(3, 9), library.threads
    made = []
    try:
        for library.threads in (1, 5):
            made += [generate(model, tokens, max_new_tokens=12, do_sample=False) for _ in range(2)]
    finally:
        library.threads = before
    assert all(torch.equal(other, made[0]) for other in made[1:])


def test_two_threads_may_call_at_once(pair_of: Callable[[str], Any]) -> None:
    model = make(pair_of("llama"))
    expected = {seed: read(model, make_tokens(2, 16, seed), None, DynamicCache(), Want())[-1] for seed in range(4)}
    wrong: list[int] = []

    def work(seed: int) -> None:
        for _ in range(5):
            if not torch.equal(read(model, make_tokens(2, 16, seed), None, DynamicCache(), Want())[-1], expected[seed]):
                wrong.append(seed)

    threads = [Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_what_needs_more_than_logits_takes_operators(pair_of: Callable[[str], Any]) -> None:
    model, tokens = make(pair_of("llama")), make_tokens(1, 6)
    plain = model.forward(tokens, DynamicCache())
    told = model.forward(tokens, DynamicCache(), want=Want(hidden_states=True, attentions=True))
    assert told.hidden_states is not None and told.attentions is not None
    assert_close(told.logits, plain.logits)


@pytest.mark.parametrize("counts", [None, [9, 4, 1]])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2"])
def test_early_layers_are_read_on_the_way(
    pair_of: Callable[[str], Any], name: str, counts: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = make(pair_of(name)), make_tokens(3, 10)
    want = Want(early=tuple(range(model.spec.num_layers)), last_states=True)

    def decode() -> list[torch.Tensor]:
        cache = model.new_cache("dynamic", 3, 16)
        prompt = model.forward(tokens[:, :9], cache, counts=counts, want=want)
        step = model.forward(tokens[:, 9:], cache, want=want)
        assert prompt.early_logits is not None and step.early_logits is not None and step.last_states is not None
        return [prompt.logits, *prompt.early_logits, step.logits, *step.early_logits, step.last_states]

    assert model.forward(tokens, DynamicCache(), want=want).path == "library"
    whole = decode()
    monkeypatch.setattr(model, "paths", model.paths[1:])
    for made, expected in zip(whole, decode(), strict=True):
        assert_close(made, expected)


def test_a_long_prompts_early_logits_are_its_last_tokens(
    pair_of: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens, want = make(pair_of("llama")), make_tokens(2, 150), Want(early=(0, 1))
    whole = model.forward(tokens, DynamicCache(), counts=[150, 70], want=want)
    monkeypatch.setattr(model, "paths", model.paths[1:])
    plain = model.forward(tokens, DynamicCache(), counts=[150, 70], want=want)
    assert whole.early_logits is not None and plain.early_logits is not None
    for made, expected in zip(whole.early_logits, plain.early_logits, strict=True):
        assert_close(made, expected)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("name", ["llama", "mistral", "bloom"])
def test_forks_read_their_row_and_themselves(
    pair_of: Callable[[str], Any], name: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokens = make(pair_of(name)), make_tokens(6, 2)

    def decode() -> list[torch.Tensor]:
        cache = model.new_cache(kind, 2, 40)
        model.forward(make_tokens(2, 9, 1), cache, counts=[9, 5])
        logits = []
        for _ in range(2):
            forward = model.forward(tokens[:, :1], cache.fork(range(3)), want=Want(last_states=True))
            assert forward.last_states is not None
            logits += [forward.logits, forward.last_states]
            cache.keep_fork(torch.tensor([2, 1]))
        logits.append(model.forward(tokens[:2, 1:], cache).logits)
        return logits

    view = model.new_cache(kind, 2, 40)
    model.forward(make_tokens(2, 9, 1), view)
    assert model.forward(tokens[:, :1], view.fork(range(3))).path == "library"
    whole = decode()
    monkeypatch.setattr(model, "paths", model.paths[1:])
    for made, expected in zip(whole, decode(), strict=True):
        assert_close(made, expected)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_the_likeliest_token_is_the_first_of_the_highest(pair_of: Callable[[str], Any], threads: int) -> None:
    library = find_library()
    assert library is not None
    model, before = make(pair_of("gemma2")), library.threads
    weight = model.weights.head.weight
    kept = weight.clone()
    try:
        weight[60] = weight[41] = weight[7]  # three are alike
        library.threads = threads
        made = model.forward(make_tokens(40, 3), DynamicCache())
    finally:
        library.threads = before
        weight.copy_(kept)
    assert made.likeliest is not None and torch.equal(made.likeliest, made.logits.max(-1).indices)
    assert model.forward(make_tokens(2, 3), DynamicCache(), counts=[3, 0]).likeliest is None


def test_no_token_is_the_likeliest_of_what_is_no_number(pair_of: Callable[[str], Any]) -> None:
    model = make(pair_of("llama"))
    weight = model.weights.head.weight
    kept = weight.clone()
    try:
        weight[50] = float("nan")
        likeliest = model.forward(make_tokens(3, 3), DynamicCache()).likeliest
    finally:
        weight.copy_(kept)
    assert likeliest is not None and likeliest.tolist() == [-1] * 3


@pytest.mark.parametrize("name", ["falcon-7b", "falcon-40b"])
def test_blocks_that_are_not_known_are_left_to_torch(pair_of: Callable[[str], Any], name: str) -> None:
    model = pair_of(name).native
    expected = model.spec.alibi is None or not model.spec.alibi.is_rounded
    refusal = explain_no_library(model.spec, model.weights, model.device, model.dtype)
    assert (refusal is None) == expected
    assert "bfloat16" in str(explain_no_library(model.spec, model.weights, model.device, torch.bfloat16))
    if refusal is not None:
        assert refusal in model.forward(make_tokens(1, 3), DynamicCache()).path_reason


# --- quantised ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("packing", ["int8", "int4"])
@pytest.mark.parametrize("name", ["llama", "llama-tied-biased", "qwen3", "gpt2", "gpt_neox", "gemma2"])
def test_quantised_models_stay_close_to_their_own_numbers(
    pair_of: Callable[[str], Any], name: str, packing: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair = pair_of(name)
    model = build_model(pair.config, MemorySource(pair.weights), packing=packing)
    assert isinstance(model, Decoder)
    layer = model.weights.layers[0]
    assert isinstance(layer.qkv, PackedLinear) and layer.qkv.kind == packing
    assert isinstance(model.weights.embedding, PackedEmbedding) and model.weights.embedding.kind == "int8"
    tokens = make_tokens(3, 16)
    whole = torch.cat([made.flatten() for made in read(model, tokens, None, DynamicCache(), Want())])
    monkeypatch.setattr(model, "paths", model.paths[1:])
    operators = torch.cat([made.flatten() for made in read(model, tokens, None, DynamicCache(), Want())])
    monkeypatch.setattr("unspool.models.weights.find_library", lambda: None)  # the numbers that the blocks stand for
    exact = torch.cat([made.flatten() for made in read(model, tokens, None, DynamicCache(), Want())])
    # Both round activations to 8 bits; where one of them rounds a tie the other way, later layers make more of it.
    assert float((whole - exact).norm() / exact.norm()) < 0.06
    assert float((operators - exact).norm() / exact.norm()) < 0.06


@pytest.mark.parametrize("packing", ["int8", "int4"])
def test_a_quantised_row_alone_is_a_row_in_a_batch_bit_by_bit(pair_of: Callable[[str], Any], packing: Any) -> None:
    library = find_library()
    assert library is not None
    pair, before = pair_of("llama"), library.threads
    model = build_model(pair.config, MemorySource(pair.weights), packing=packing)
    tokens, counts = make_tokens(5, 90), [90, 7, 65, 1, 64]
    alone = [model.forward(tokens[row : row + 1, :count], DynamicCache()).logits for row, count in enumerate(counts)]
    try:
        for threads in (1, 2, 3):
            library.threads = threads
            together = model.forward(tokens, DynamicCache(), counts=counts).logits
            assert torch.equal(together, torch.cat(alone))
    finally:
        library.threads = before

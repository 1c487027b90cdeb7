"""The pass of operators: steps, drafts, packed weights for batches, and what is freed with a model."""

from __future__ import annotations

from collections.abc import Callable
from threading import Thread
from typing import Any

import pytest
import torch

from unspool.models.decoder.head import cap_logits
from unspool.models.decoder.model import Decoder
from unspool.models.paths.plain import BatchLinear, can_pack
from unspool.protocols import Want

FAMILIES = [
    *("llama", "llama-tied-biased", "llama-yarn", "mistral", "qwen2", "qwen2-window", "qwen3", "gemma", "gemma3"),
    *("gpt2", "gpt_neox", "gptj", "opt", "bloom", "phi", "falcon-40b", "gemma2"),
]


def make_tokens(rows: int, length: int) -> torch.Tensor:
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(rows))


def decode(model: Decoder, tokens: torch.Tensor, counts: list[int] | None, prompt: int = 6) -> torch.Tensor:
    cache = model.new_cache("dynamic", rows=tokens.shape[0])
    model.forward(tokens[:, :prompt], cache, counts=counts)
    steps = [model.forward(tokens[:, i : i + 1], cache).logits for i in range(prompt, tokens.shape[1])]
    return torch.stack(steps, 1)


def make_plain(pair: Any) -> Decoder:
    """A model of its own without fast paths."""
    model = Decoder(pair.native.spec, pair.native.weights, pair.config, pair.native.device, pair.native.dtype)
    model.paths = []
    return model


@pytest.mark.parametrize("name", FAMILIES)
def test_weights_packed_for_batches_give_the_same_logits(pair_of: Callable[[str], Any], name: str) -> None:
    model, other = make_plain(pair_of(name)), make_plain(pair_of(name))
    other.packs_for_batches = False
    other.paths = []
    for rows in (1, 2, 5):
        tokens = make_tokens(rows, 12)
        for counts in (None, [6 - row % 3 for row in range(rows)]):
            packed, plain = decode(model, tokens, counts), decode(other, tokens, counts)
            assert float((packed - plain).abs().max()) <= 1e-5 * max(1.0, float(plain.abs().max()))
        assert (model.plain._packed is not None) == (rows > 1)  # a row alone has no use for the copy
    assert model.plain._packed is not None and isinstance(model.plain._packed.layers[-1].down, BatchLinear)
    assert other.plain._packed is None


def test_prompts_and_passes_that_return_all_layers_do_not_pack(pair_of: Callable[[str], Any]) -> None:
    model = make_plain(pair_of("llama"))
    cache = model.new_cache("dynamic", rows=2)
    model.forward(make_tokens(2, 6), cache)
    model.forward(make_tokens(2, 3), cache)
    model.forward(make_tokens(2, 1), cache, want=Want(hidden_states=True))
    assert model.plain._packed is None
    model.forward(make_tokens(2, 3), cache, want=Want(logits="all"))
    assert model.plain._packed is not None


@pytest.mark.parametrize("counts", [None, [3, 1, 2, 0, 3]], ids=["even", "ragged"])
@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_few_tokens_a_row_equal_one_after_the_other(
    pair_of: Callable[[str], Any], name: str, rows: int, counts: list[int] | None
) -> None:
    """Checking drafts: the same logits as single steps, for rows of different lengths, then the cache rolls back."""
    model, tokens = pair_of(name).native, make_tokens(rows, 9)
    lengths = [6 - row % 3 for row in range(rows)]
    given = None if counts is None else counts[:rows]
    cache = model.new_cache("dynamic", rows=rows)
    model.forward(tokens[:, :6], cache, counts=lengths)
    plain = []
    for place in range(3):
        plain.append(model.forward(tokens[:, 6 + place : 7 + place], cache).logits)
    for _ in range(2):
        cache.truncate(lengths)
        wide = model.forward(tokens[:, 6:], cache, counts=given, want=Want(logits="all")).logits
        assert cache.lengths == [n + (3 if given is None else given[row]) for row, n in enumerate(lengths)]
        for row in range(rows):
            for place in range(3 if given is None else given[row]):
                error = (wide[row, place] - plain[place][row]).abs().max()
                assert float(error) <= 1e-4 * max(1.0, float(plain[place].abs().max()))


@pytest.mark.parametrize("name", ["llama", "qwen3", "gpt2", "bloom"])
def test_leaving_after_the_first_layers(pair_of: Callable[[str], Any], name: str) -> None:
    """The first layers, the final norm and the head: what a model of so few layers says; and no trace is left."""
    model, tokens = pair_of(name).native, make_tokens(2, 9)
    for exit_layer in (1, 2):
        cache, shadow = (model.new_cache("dynamic", rows=2) for _ in range(2))
        hidden = model.forward(tokens[:, :8], shadow, want=Want(hidden_states=True)).hidden_states
        expected = cap_logits(model.spec, model.weights.head(model.plain.finish(hidden[exit_layer])))[:, -1]
        found = model.forward(tokens[:, :8], cache, want=Want(exit_layer=exit_layer)).logits
        torch.testing.assert_close(found, expected)
        cache.truncate([0, 0])
        model.forward(tokens[:, :8], cache)
        step = model.forward(tokens[:, 8:], cache, want=Want(exit_layer=exit_layer)).logits
        cache.truncate([8, 8])
        after = model.forward(tokens[:, 8:], cache).logits
        torch.testing.assert_close(after, model.forward(tokens[:, 8:], shadow).logits)
        assert float((step - after).abs().max()) > 1e-3


def test_which_weights_are_packed(pair_of: Callable[[str], Any]) -> None:
    weights = pair_of("llama").native.weights
    assert can_pack(weights, torch.device("cpu"), torch.float32)
    assert not can_pack(weights, torch.device("cpu"), torch.bfloat16)
    assert not can_pack(weights, torch.device("cuda"), torch.float32)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_logits_may_be_changed_in_place_and_the_cache_written_outside(pair_of: Callable[[str], Any], name: str) -> None:
    model, tokens = pair_of(name).native, make_tokens(2, 8)
    cache = model.new_cache("dynamic", rows=2)
    for i in range(8):  # the first pass makes the buffers, the others run in inference mode
        logits = model.forward(tokens[:, i : i + 1], cache).logits
        assert not logits.is_inference()
        logits[:, 3] = -torch.inf
    keys, values = cache[0]
    cache.update(keys[:, :, :1].clone(), values[:, :, :1].clone(), 0)


def test_threads_do_not_share_buffers(pair_of: Callable[[str], Any]) -> None:
    model = pair_of("llama").native
    prompts = [make_tokens(1, 24) + shift for shift in (0, 0, 0)]
    prompts = [(prompt + i) % 90 + 3 for i, prompt in enumerate(prompts)]
    alone = [decode(model, prompt, None) for prompt in prompts]
    found: list[torch.Tensor | None] = [None] * 3

    def work(place: int) -> None:
        for _ in range(5):
            found[place] = decode(model, prompts[place], None)

    threads = [Thread(target=work, args=(place,)) for place in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for mine, expected in zip(found, alone, strict=True):
        assert mine is not None and float((mine - expected).abs().max()) < 1e-5 * float(expected.abs().max())


def test_moving_a_model_packs_anew(pair_of: Callable[[str], Any]) -> None:
    pair, tokens = pair_of("llama"), make_tokens(2, 9)
    model = Decoder(pair.native.spec, pair.native.weights, pair.config, pair.native.device, pair.native.dtype)
    before = decode(model, tokens, None)
    model.to(torch.float64)
    wide = decode(model, tokens, None)
    model.to("cpu", torch.float32)
    assert wide.dtype == torch.float64
    assert float((wide - before).abs().max()) < 1e-4
    assert torch.equal(decode(model, tokens, None), before)


def test_tables_that_grew_in_a_step_serve_other_passes(pair_of: Callable[[str], Any]) -> None:
    for name in ("llama", "bloom"):
        model = pair_of(name).native
        tokens = torch.randint(3, 97, (1, 520), generator=torch.Generator().manual_seed(0))
        cache = model.new_cache("dynamic", rows=1)
        model.forward(tokens[:, :510], cache)
        for i in range(510, 519):
            model.forward(tokens[:, i : i + 1], cache)
        last = model.forward(tokens[:, 519:], cache).logits
        assert float((model(tokens).logits[:, -1] - last).abs().max()) < 1e-4 * float(last.abs().max())

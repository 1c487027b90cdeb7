"""The configurable decoder against transformers, for every architecture."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from unspool.cache import Cache
from unspool.models.decoder.model import Decoder
from unspool.protocols import Want

TOLERANCE = 1e-4


def make_tokens(rows: int, length: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 97, (rows, length), generator=torch.Generator().manual_seed(seed))


def gap(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    assert ours.shape == theirs.shape
    return float((ours - theirs).abs().max())


def is_same(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal but for the rounding of another batch size: 1e-5 of the largest number."""
    return gap(ours, theirs) <= 1e-5 * max(1.0, float(theirs.abs().max()))


def decode_step_by_step(model: Decoder, tokens: torch.Tensor, cache: Cache, prompt: int) -> torch.Tensor:
    """Logits of every position from `prompt - 1` on, one token at a time after the prompt."""
    logits = [model.forward(tokens[:, :prompt], cache).logits]
    logits += [model.forward(tokens[:, i : i + 1], cache).logits for i in range(prompt, tokens.shape[1])]
    return torch.stack(logits, 1)


@torch.no_grad()
def test_logits_hidden_states_and_attentions_equal_the_reference(pair) -> None:
    tokens = make_tokens(2, 13)
    has_weights = pair.reference.config._attn_implementation == "eager"
    ours = pair.native(tokens, output_hidden_states=True, output_attentions=True)
    theirs = pair.reference(tokens, output_hidden_states=True, output_attentions=has_weights)
    assert gap(ours.logits, theirs.logits) < TOLERANCE
    for mine, other in zip(ours.hidden_states, theirs.hidden_states, strict=True):
        assert gap(mine, other) < TOLERANCE
    if not has_weights:
        return
    for mine, other in zip(ours.attentions, theirs.attentions, strict=True):
        assert gap(mine, other) < TOLERANCE


@torch.no_grad()
def test_left_padded_rows_equal_the_reference(pair) -> None:
    tokens, mask = make_tokens(3, 11), torch.ones(3, 11, dtype=torch.int64)
    mask[0, :4] = 0
    mask[2, :7] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    theirs = pair.reference(tokens, attention_mask=mask, **_positions(pair, positions)).logits
    ours = pair.native(tokens, attention_mask=mask, position_ids=positions).logits
    is_real = mask.bool()
    assert gap(ours[is_real], theirs[is_real]) < TOLERANCE


def _positions(pair, positions: torch.Tensor) -> dict[str, torch.Tensor]:
    """BLOOM takes no positions: it reads them off the mask."""
    return {} if pair.config["model_type"] == "bloom" else {"position_ids": positions}


def test_decoding_step_by_step_equals_one_pass(pair) -> None:
    tokens = make_tokens(2, 14, seed=1)
    whole = pair.native(tokens).logits
    for kind in ("dynamic", "static"):
        cache = pair.native.new_cache(kind, rows=2, capacity=20)
        steps = decode_step_by_step(pair.native, tokens, cache, prompt=5)
        assert gap(steps, whole[:, 4:]) < TOLERANCE
        assert cache.lengths == [14, 14]


def test_static_equals_dynamic_exactly(pair) -> None:
    tokens = make_tokens(2, 9, seed=2)
    dynamic, static = (
        decode_step_by_step(pair.native, tokens, pair.native.new_cache(kind, 2, 16), prompt=4)
        for kind in ("dynamic", "static")
    )
    assert torch.equal(dynamic, static)


def test_row_alone_equals_row_in_a_ragged_batch(pair) -> None:
    tokens, counts = make_tokens(3, 9, seed=3), [4, 9, 6]
    following = make_tokens(3, 4, seed=4)
    batch = pair.native.new_cache("dynamic", rows=3)
    first = pair.native.forward(tokens, batch, counts=counts).logits
    later = [pair.native.forward(following[:, i : i + 1], batch).logits for i in range(3)]
    several = pair.native.forward(following, batch, counts=[2, 4, 3], want=Want("all")).logits
    for row, count in enumerate(counts):
        alone = pair.native.new_cache("dynamic", rows=1)
        mine = slice(row, row + 1)
        assert is_same(pair.native.forward(tokens[mine, :count], alone).logits, first[mine])
        for i in range(3):
            step = pair.native.forward(following[mine, i : i + 1], alone).logits
            assert is_same(step, later[i][mine])
        real = [2, 4, 3][row]
        rest = pair.native.forward(following[mine, :real], alone, want=Want("all")).logits
        assert is_same(rest, several[mine, :real])


def test_a_prompt_in_chunks_equals_a_prompt_at_once(pair) -> None:
    tokens = make_tokens(2, 12, seed=5)
    cache = pair.native.new_cache("dynamic", rows=2)
    parts = [pair.native.forward(part, cache, want=Want("all")).logits for part in tokens.split(5, dim=1)]
    assert gap(torch.cat(parts, 1), pair.native(tokens).logits) < TOLERANCE


def test_rolling_back_forgets(pair) -> None:
    tokens = make_tokens(2, 10, seed=6)
    cache = pair.native.new_cache("dynamic", rows=2)
    pair.native.forward(make_tokens(2, 10, seed=7), cache)
    cache.truncate([0, 0])
    assert is_same(pair.native.forward(tokens, cache).logits, pair.native(tokens).logits[:, -1])


def test_embeddings_in_place_of_tokens(pair) -> None:
    tokens = make_tokens(2, 7, seed=8)
    embeds = pair.native.get_input_embeddings()(tokens)
    assert is_same(pair.native(inputs_embeds=embeds).logits, pair.native(tokens).logits)


def test_counts_its_parameters_as_the_reference_does(pair) -> None:
    buffers = [part.numel() for name, part in pair.reference.named_buffers() if name.endswith("correction_bias")]
    assert pair.native.num_parameters() == pair.reference.num_parameters() + sum(
        buffers
    )  # one of GLM's is no parameter
    assert pair.native.weights_bytes == 4 * pair.native.num_parameters()


def test_says_what_it_is(pair) -> None:
    info, config = pair.native.info, pair.native.config
    theirs = pair.reference.config
    assert (info.vocab_size, info.num_layers, info.num_heads) == (
        97,
        theirs.num_hidden_layers,
        theirs.num_attention_heads,
    )
    assert (info.bos_token_id, info.eos_token_id, info.pad_token_id) == (1, 2, 0)
    assert (config.hidden_size, config.num_hidden_layers) == (theirs.hidden_size, theirs.num_hidden_layers)
    assert config.to_dict()["vocab_size"] == 97
    assert info.has_tied_embeddings == bool(theirs.tie_word_embeddings)


@torch.no_grad()
@pytest.mark.parametrize(
    "name",
    ["llama", "llama_draft", "mistral", "qwen2", "qwen3", "gemma2", "gpt2", "gpt_neox", "opt", "bloom", "phi"],
)
def test_golden_models_with_their_older_configs(golden_pair: Callable[[str], Any], name: str) -> None:
    pair = golden_pair(name)
    tokens = make_tokens(2, 20)
    assert gap(pair.native(tokens).logits, pair.reference(tokens).logits) < TOLERANCE

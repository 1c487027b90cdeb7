"""Draft models over transformers' own caches that read texts of their own, not the inputs of the model's call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tests.decoding.speculative.tokenizer_fakes import make_pair
from tests.models.adapters.tiny import LLAMA

import unspool

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

TEXT = "the cat and the cat"
NEW = {"max_new_tokens": 12, "eos_token_id": None, "return_dict_in_generate": True}
DRAFTS = {"num_assistant_tokens": 4, "num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
STATES = {**LLAMA, "mamba_d_state": 4, "mamba_d_conv": 3, "mamba_dt_rank": 4, "use_mamba_kernels": False}
SIZES: dict[str, dict[str, Any]] = {
    "Llama": LLAMA,
    "Jamba": {**STATES, "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "num_experts_per_tok": 1},
    "Rwkv": {**LLAMA, "attention_hidden_size": 32, "context_length": 64},
    "OpenAIGPT": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64},
}
HEADS = {"OpenAIGPT": "OpenAIGPTLMHeadModel"}


def make(name: str, num_tokens: int) -> Any:
    """A tiny random model."""
    torch.manual_seed(4)
    config = getattr(transformers, f"{name}Config")(**{**SIZES[name], "vocab_size": num_tokens})
    model = getattr(transformers, HEADS.get(name, f"{name}ForCausalLM"))(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape), alpha=0.2)
    return model


def renumber(model: Any, own: Any, other: Any) -> Any:
    """The same model under another tokenizer's numbers."""
    twin, own_ids, other_ids = type(model)(model.config).eval(), own.get_vocab(), other.get_vocab()
    order = torch.tensor([own_ids[token] for token in sorted(other_ids, key=lambda token: other_ids[token])])
    twin.load_state_dict(model.state_dict())
    tables = {twin.get_input_embeddings().weight, twin.get_output_embeddings().weight}
    biases = {bias for bias in (twin.get_output_embeddings().bias,) if bias is not None}
    with torch.no_grad():
        for table in tables | biases:
            table.copy_(table[order])
    return twin


def read(tokenizer: Any, text: str) -> torch.Tensor:
    return torch.tensor([tokenizer.encode(text, add_special_tokens=False)])


@pytest.mark.parametrize("name", SIZES)
def test_the_model_itself_under_other_numbers_drafts_what_is_written(name: str) -> None:
    own, other = make_pair("renumbered")
    model = make(name, len(own))
    ids = read(own, TEXT)
    settings = {**NEW, "cache_implementation": "static"} if name == "Llama" else NEW
    told = {"assistant_model": renumber(model, own, other), "tokenizer": own, "assistant_tokenizer": other, **DRAFTS}
    expected = unspool.generate(model, ids, **settings, native=False)
    found = unspool.generate(model, ids, **settings, **told, native=False)
    assert "own cache" in found.stats.path_reason
    assert torch.equal(found.sequences, expected.sequences)
    assert sum(found.speculation.accepted) == sum(found.speculation.drafted) > 0


@pytest.mark.parametrize("text", [TEXT, "a", "stop stopping\n\nstop"])
@pytest.mark.parametrize("kind", ["merges", "characters"])
def test_drafts_are_the_same_over_every_cache(kind: str, text: str) -> None:
    own, other = make_pair(kind)
    model, draft = make("Llama", len(own)), make("Llama", len(other))
    told = {"assistant_model": draft, "tokenizer": own, "assistant_tokenizer": other, **DRAFTS, **NEW}
    expected = unspool.generate(model, read(own, text), **told)
    found = unspool.generate(model, read(own, text), **told, cache_implementation="static", native=False)
    assert "own cache" in found.stats.path_reason
    assert torch.equal(found.sequences, expected.sequences)
    assert found.speculation == expected.speculation


@pytest.mark.parametrize("kind", ["the same", "characters"])
@pytest.mark.parametrize("native", [None, False])
@pytest.mark.parametrize("name", ["Jamba", "Rwkv", "OpenAIGPT"])
def test_an_object_that_our_caches_cannot_serve_drafts_for_others(name: str, native: bool | None, kind: str) -> None:
    """As transformers has Jamba draft for Llama."""
    own, other = make_pair("characters")
    model, ids = make("Llama", len(own)), read(own, TEXT)
    told: dict[str, Any] = {"assistant_model": make(name, len(own)), **DRAFTS}
    if kind != "the same":
        told |= {"assistant_model": make(name, len(other)), "tokenizer": own, "assistant_tokenizer": other}
    expected = unspool.generate(model, ids, **NEW, native=native)
    found = unspool.generate(model, ids, **NEW, **told, native=native)
    assert torch.equal(found.sequences, expected.sequences) and sum(found.speculation.drafted) > 0
    rows = torch.cat((ids, ids.flip(1)))
    if name == "OpenAIGPT":  # it keeps nothing, so what was refused is not read again
        expected = unspool.generate(model, rows, **NEW, native=native)
        assert torch.equal(unspool.generate(model, rows, **NEW, **told, native=native).sequences, expected.sequences)
    else:
        with pytest.raises(unspool.SettingError, match="keeps states, so drafts that one row of several refuses"):
            unspool.generate(model, rows, **NEW, **told, native=native)


def test_rows_of_a_model_without_a_cache_refuse_different_drafts() -> None:
    model, draft = (make("OpenAIGPT", 97) for _ in range(2))
    with torch.no_grad():
        draft.lm_head.weight.add_(torch.randn(97, 32), alpha=0.1)
    ids = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5], [3, 3, 4, 4, 3]])
    expected = unspool.generate(model, ids, **NEW)
    found = unspool.generate(model, ids, **NEW, **DRAFTS, assistant_model=draft)
    assert torch.equal(found.sequences, expected.sequences)
    accepted = [part / whole for part, whole in zip(found.speculation.accepted, found.speculation.drafted, strict=True)]
    assert 0 < min(accepted) < max(accepted)

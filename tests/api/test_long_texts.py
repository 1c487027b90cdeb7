"""Texts beyond a model's context: computed where positions are, refused where a table of them ends."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tests.conformance.cases import load_model

import unspool
from unspool.errors import ContextError

SIZES: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
DYNAMIC = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}}
ROTARY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "dynamic NTK": ("Llama", DYNAMIC),
    "gpt_neox": ("GPTNeoX", {}),
    "phi": ("Phi", {}),
    "mistral": ("Mistral", {"num_key_value_heads": 2, "sliding_window": 8}),
}


def make(name: str, **more: Any) -> Any:
    torch.manual_seed(3)
    config = getattr(transformers, f"{name}Config")(**SIZES, **more)
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


@pytest.mark.parametrize("native", [None, False])
@pytest.mark.parametrize("width", [10, 40])
@pytest.mark.parametrize("name", ROTARY)
def test_rotary_models_go_on_as_the_reference_does(name: str, width: int, native: bool | None) -> None:
    kind, more = ROTARY[name]
    model = make(kind, **more)
    ids = torch.randint(3, 110, (1, width), generator=torch.Generator().manual_seed(1))
    expected = model.generate(ids, max_new_tokens=40, do_sample=False, pad_token_id=0)
    assert torch.equal(unspool.generate(model, ids, max_new_tokens=40, pad_token_id=0, native=native), expected)


@pytest.mark.parametrize("native", [None, False])
@pytest.mark.parametrize(("width", "said"), [(10, "at most `max_new_tokens=22` fit"), (40, "the prompt has 40 tokens")])
def test_a_table_of_positions_ends(width: int, said: str, native: bool | None) -> None:
    model = make("OPT", ffn_dim=48, word_embed_proj_dim=32)
    with pytest.raises(ContextError, match=said):
        unspool.generate(model, torch.full((1, width), 5), max_new_tokens=40, pad_token_id=0, native=native)


@pytest.mark.parametrize("name", ["gpt2", "opt", "bart", "marian"])
def test_so_does_a_native_model_s(name: str) -> None:
    lm = load_model(name)
    with pytest.raises(ContextError, match="context ends at"):
        lm.generate([[5, 6, 7]], max_new_tokens=4000)


def test_an_engine_and_a_prefix_go_on_too() -> None:
    lm = load_model("llama")
    prompt = [5, 6, 7] * 50
    told: dict[str, Any] = {"max_new_tokens": 30, "eos_token_id": None}
    wanted = lm.generate([prompt], **told).token_ids
    with unspool.Engine(lm) as engine:
        assert engine.submit([prompt], **told).result().token_ids == wanted
    assert lm.generate([prompt[140:]], prefix=lm.prefix(prompt[:140]), **told).token_ids == wanted
    assert lm.generate([prompt], **told, do_sample=False, prefill_chunk_size=40).token_ids == wanted


def test_what_nobody_set_still_ends_with_the_context() -> None:
    found = load_model("llama").generate([[5, 6, 7]], eos_token_id=None)
    assert len(found.token_ids[0]) == 128 - 3


@pytest.mark.filterwarnings("ignore:Unfeasible length")  # the reference's
@pytest.mark.parametrize(
    "told",
    [
        {"min_new_tokens": 9, "max_new_tokens": 5},
        {"min_length": 40, "max_length": 12},
        {"forced_bos_token_id": 7, "max_new_tokens": 5},
    ],
    ids=str,
)
def test_places_that_no_text_gets_to_change_nothing(told: dict[str, Any]) -> None:
    model = make("Llama")
    ids = torch.tensor([[5, 6, 7, 8]])
    with_end = {"eos_token_id": 9, "pad_token_id": 0}
    expected = model.generate(ids, **told, **with_end, do_sample=False)
    for native in (None, False):
        assert torch.equal(unspool.generate(model, ids, **told, **with_end, native=native), expected)

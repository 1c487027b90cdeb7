"""Models in PEFT's wrappers: trained prompts and adapters count, as in PEFT's own generate()."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.models.adapters.tiny import make

import unspool
from unspool.errors import UnsupportedError

peft = pytest.importorskip("peft")

IDS = torch.tensor([[0, 0, 5, 6, 7], [9, 8, 7, 6, 5]])
COMMON = {
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
    "max_new_tokens": 6,
    "eos_token_id": None,
    "pad_token_id": 0,
}
TASK = {"task_type": "CAUSAL_LM"}
PROMPTS = {
    "prompt tuning": lambda: peft.PromptTuningConfig(**TASK, num_virtual_tokens=4),
    "prefix tuning": lambda: peft.PrefixTuningConfig(**TASK, num_virtual_tokens=4),
    "P-tuning": lambda: peft.PromptEncoderConfig(**TASK, num_virtual_tokens=4, encoder_hidden_size=16),
}
ADAPTERS = {
    "LoRA": lambda: peft.LoraConfig(**TASK, r=4, init_lora_weights=False),
    "IA3": lambda: peft.IA3Config(**TASK, init_ia3_weights=False),
}


def wrap(config: Any, seed: int) -> Any:
    wrapped = peft.get_peft_model(make("llama"), config).eval()
    torch.manual_seed(seed)
    for parameter in wrapped.parameters():
        if parameter.requires_grad:
            parameter.data.normal_()
    return wrapped


def compare(model: Any, **settings: Any) -> Any:
    expected = model.generate(input_ids=IDS, **COMMON, **settings).tolist()
    assert unspool.generate(model, input_ids=IDS, **COMMON, **settings).tolist() == expected
    return expected


@pytest.mark.parametrize("kind", PROMPTS)
def test_trained_prompts_count(kind: str) -> None:
    found = []
    for seed in (1, 2):
        model = wrap(PROMPTS[kind](), seed)
        found.append(compare(model))
        compare(model, num_beams=3)
        unspool.attach()
        try:
            assert model.generate(input_ids=IDS, **COMMON).tolist() == found[-1]
        finally:
            unspool.detach()
    assert found[0] != found[1]
    with model.disable_adapter():
        assert compare(model) not in found
    with pytest.raises(UnsupportedError, match=r"brought in by its own generate\(\)"):
        list(unspool.stream(model, IDS, **COMMON))


@pytest.mark.parametrize("kind", ADAPTERS)
def test_adapters_count(kind: str) -> None:
    model, bare = wrap(ADAPTERS[kind](), 1), make("llama").generate(IDS, **COMMON).tolist()
    expected = compare(model)
    assert expected != bare
    compare(model, num_beams=3)
    rows: dict[int, list[int]] = {0: [], 1: []}
    for emitted in unspool.stream(model, IDS, **COMMON):
        for row, tokens in emitted.tokens.items():
            rows[row] += tokens
    assert [rows[0], rows[1]] == [row[5:] for row in expected]
    with model.disable_adapter():
        assert compare(model) == bare
    model.add_adapter("other", ADAPTERS[kind]())
    model.set_adapter("other")
    assert compare(model) != expected
    model.base_model.set_adapter(["default", "other"])
    compare(model)
    model.set_adapter("default")
    model.merge_adapter()
    compare(model)
    model.unmerge_adapter()
    compare(model.merge_and_unload())

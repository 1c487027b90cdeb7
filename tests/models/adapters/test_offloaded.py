"""Objects whose weights accelerate keeps elsewhere: on the meta device, brought for each pass by hooks."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tests.models.adapters.tiny import make
from torch import nn

import unspool

IDS = torch.tensor([[0, 0, 5, 6, 7], [9, 8, 7, 6, 5]])
COMMON = {
    "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
    "max_new_tokens": 6,
    "eos_token_id": None,
    "pad_token_id": 0,
}


class Bringing:
    """A hook in accelerate's form: it says where its module computes, and puts the weights there meanwhile."""

    def __init__(self, module: nn.Module) -> None:
        self.execution_device = torch.device("cpu")
        self.held = {name: value.data for name, value in module._parameters.items() if value is not None}


def offload(model: Any) -> None:
    """What accelerate.cpu_offload does, without accelerate."""
    hooks = [(part, Bringing(part)) for part in model.modules() if part._parameters]
    for part, hook in hooks:
        part._hf_hook = hook
        for name, value in hook.held.items():
            part._parameters[name] = nn.Parameter(value.to("meta"), requires_grad=False)
        part.forward = functools.partial(_run, part, hook, part.forward)


def _run(part: Any, hook: Bringing, usual: Any, *args: Any, **kwargs: Any) -> Any:
    away = dict(part._parameters)
    part._parameters.update({name: nn.Parameter(value, requires_grad=False) for name, value in hook.held.items()})
    try:
        return usual(*args, **kwargs)
    finally:
        part._parameters.update(away)


def offload_by_accelerate(model: Any) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))


@pytest.mark.parametrize("away", [offload, offload_by_accelerate])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mpt"])
def test_offloaded_weights_give_the_same_tokens(family: str, away: Any) -> None:
    model = make(family)
    expected = model.generate(IDS, **COMMON).tolist()
    beams = model.generate(IDS, **COMMON, num_beams=3).tolist()
    lookup = unspool.generate(model, IDS[1:], max_new_tokens=6, eos_token_id=None, prompt_lookup_num_tokens=2).tolist()
    away(model)
    unspool.attach(model)
    unspool.detach(model)  # it may run natively, if it can
    assert next(model.parameters()).device.type == "meta"
    for _ in range(2):
        assert unspool.generate(model, IDS, **COMMON).tolist() == expected
    assert unspool.generate(model, IDS, **COMMON, num_beams=3).tolist() == beams
    drafted = unspool.generate(model, IDS[1:], max_new_tokens=6, eos_token_id=None, prompt_lookup_num_tokens=2)
    assert drafted.tolist() == lookup
    output = unspool.generate(model, IDS, **COMMON, return_dict_in_generate=True, output_hidden_states=True)
    assert output.sequences.tolist() == expected
    assert next(model.parameters()).device.type == "meta"
    with unspool.Engine(model) as engine:
        result = engine.submit(IDS[1].tolist(), max_new_tokens=6, eos_token_id=None).result()
    assert result.token_ids == [expected[1][5:]]


def test_offloaded_weights_over_a_cache_of_transformers() -> None:
    model = make("llama")
    expected = model.generate(IDS, **COMMON).tolist()
    offload(model)
    transformers = pytest.importorskip("transformers")
    found = unspool.generate(model, IDS, **COMMON, past_key_values=transformers.DynamicCache())
    assert found.tolist() == expected

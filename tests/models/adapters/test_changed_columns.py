"""Code that was put into an object sees what transformers shows it: padded columns, its mask and its cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.fakes import pad_left
from tests.models.adapters.live_changes import find_attention, find_module, list_layers, put
from tests.models.adapters.live_models import make
from torch import nn

import unspool

pytest.importorskip("transformers")
ROWS = [[5, 6, 7, 8, 9, 4, 11, 3, 17], [1, 9, 8], [33, 21, 60, 44, 2]]
CALLS: dict[str, dict[str, Any]] = {
    "ragged": {**pad_left(ROWS), "output_logits": True},
    "beams": {**pad_left(ROWS), "num_beams": 3, "output_scores": True},
    "whole": {"input_ids": torch.tensor(ROWS[:1]), "output_logits": True},
}


def hook(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], Any]:
    """A change by a hook on the first layer's states."""

    @contextmanager
    def made(model: Any) -> Iterator[None]:
        def run(_module: Any, _given: Any, states: Any) -> Any:
            is_several = isinstance(states, tuple)
            changed = change((states[0] if is_several else states).clone())
            return (changed, *states[1:]) if is_several else changed

        handle = list_layers(model)[0].register_forward_hook(run)
        yield
        handle.remove()

    return made


def steer(states: torch.Tensor) -> torch.Tensor:
    states[:, -1] += 0.7
    return states


@contextmanager
def take_the_mask(model: Any) -> Iterator[None]:
    def run(_module: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "attention_mask": None}

    handle = find_attention(model).register_forward_pre_hook(run, with_kwargs=True)
    yield
    handle.remove()


@contextmanager
def read_the_mask(model: Any) -> Iterator[None]:
    kind = type(model)
    own = kind.forward

    @functools.wraps(own)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        made, mask = own(self, *args, **kwargs), kwargs.get("attention_mask")
        if mask is not None:
            made.logits = made.logits * (1 + 0.05 * mask.sum(-1)[:, None, None])
        return made

    with put(kind, "forward", forward):
        yield


@contextmanager
def change_a_function_of_torch(_model: Any) -> Iterator[None]:
    linear = F.linear
    with put(F, "linear", lambda x, weight, bias=None: linear(x, weight, bias) * 1.05):
        yield


@contextmanager
def change_a_cache(_model: Any) -> Iterator[None]:
    from transformers.cache_utils import DynamicLayer

    own = DynamicLayer.update

    def update(self: Any, *args: Any, **kwargs: Any) -> Any:
        keys, values = own(self, *args, **kwargs)
        return keys, values * 0.8

    with put(DynamicLayer, "update", update):
        yield


@contextmanager
def skip_a_layer(model: Any) -> Iterator[None]:
    layer = list_layers(model)[1]
    layer.forward = lambda states, *_args, **_kwargs: states
    yield
    del layer.forward


CHANGES: dict[str, Callable[[Any], Any]] = {
    "the last column": hook(steer),
    "the mean of columns": hook(lambda states: states - 0.5 * states.mean(dim=1, keepdim=True)),
    "the mean of rows": hook(lambda states: states - 0.5 * states.mean(dim=0, keepdim=True)),
    "prompts alone": hook(lambda states: states * (0.5 if states.shape[1] > 1 else 1.0)),
    "no mask": take_the_mask,
    "the mask": read_the_mask,
    "a function of torch": change_a_function_of_torch,
    "a cache": change_a_cache,
    "a layer": skip_a_layer,
}


@pytest.mark.parametrize(
    ("name", "family"),
    list(zip(CHANGES, ("llama", "gpt2", "gemma2", "qwen2", "gpt2", "llama", "gpt2", "llama", "gemma2"), strict=True)),
)
def test_what_is_seen_is_transformers_own(name: str, family: str) -> None:
    model = make(family)
    told = {"max_new_tokens": 3, "eos_token_id": None, "pad_token_id": 0, "return_dict_in_generate": True}
    unspool.generate(model, **CALLS["ragged"], **told)
    with CHANGES[name](model):
        for call, given in CALLS.items():
            expected = type(model).generate(model, **given, **told, do_sample=False)
            found = unspool.generate(model, **given, **told, do_sample=False)
            if call == "beams":
                torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, atol=2e-3, rtol=0)
            else:
                ours, wanted = torch.stack(found.logits), torch.stack(expected.logits)
                torch.testing.assert_close(ours, wanted, atol=5e-3 * float(wanted.abs().max()), rtol=0)


def test_it_is_so_where_no_native_model_is_asked_for() -> None:
    model = make("llama")
    told = {"max_new_tokens": 2, "eos_token_id": None, "pad_token_id": 0}
    with CHANGES["the last column"](model):
        expected = type(model).generate(model, **pad_left(ROWS), **told)
        assert unspool.generate(model, **pad_left(ROWS), **told, native=False).tolist() == expected.tolist()


def test_a_function_that_stands_under_the_name_of_another_is_seen() -> None:
    model = make("gemma2")
    module, ids = find_module(model), torch.tensor(ROWS[:1])
    told = {"max_new_tokens": 4, "eos_token_id": None, "pad_token_id": 0, "use_cache": False, "output_logits": True}
    unspool.generate(model, ids, **told, return_dict_in_generate=True)
    with put(module, "create_sliding_window_causal_mask", module.create_causal_mask):
        expected = type(model).generate(model, ids, **told, return_dict_in_generate=True)
        found = unspool.generate(model, ids, **told, return_dict_in_generate=True)
        torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits), atol=2e-3, rtol=0)


def test_a_hook_that_is_taken_away_leaves_the_native_model() -> None:
    model = make("llama")
    ids, told = torch.tensor(ROWS[:1]), {"max_new_tokens": 2, "return_dict_in_generate": True, "pad_token_id": 0}
    with CHANGES["the last column"](model):
        assert "own cache" in unspool.generate(model, ids, **told).stats.path_reason
        assert "own cache" not in unspool.generate(model, ids, prompt_logprobs=1, **told).stats.path_reason
    assert "own forward" not in unspool.generate(model, ids, **told).stats.path_reason
    assert isinstance(model.get_output_embeddings(), nn.Linear)

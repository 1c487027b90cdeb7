"""Encoders that hold the same numbers: compared once, and again when something has changed."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator
from typing import Any
from weakref import ref

import pytest
import torch
import transformers

from unspool.models.encoder_decoder import likeness
from unspool.models.encoder_decoder.model import EncoderDecoder
from unspool.models.registry import build_model
from unspool.models.weights import MemorySource


def make_model() -> EncoderDecoder:
    torch.manual_seed(0)
    sizes = {"vocab_size": 19, "d_model": 16, "d_kv": 4, "d_ff": 20, "num_layers": 2, "num_heads": 4}
    inner = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))
    config = {**inner.config.to_dict(), "architectures": ["T5ForConditionalGeneration"]}
    made = build_model(config, MemorySource(inner.state_dict()))
    assert isinstance(made, EncoderDecoder)
    return made


@pytest.fixture
def num_compared(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], int]]:
    """How many tensors were compared since it was last asked."""
    calls: list[Any] = []
    equal = torch.equal

    def count(one: torch.Tensor, two: torch.Tensor) -> bool:
        calls.append(one)
        return equal(one, two)

    def take() -> int:
        number = len(calls)
        calls.clear()
        return number

    monkeypatch.setattr(likeness.torch, "equal", count)
    yield take


def first(model: EncoderDecoder) -> torch.Tensor:
    norm = model.weights.encoder.final_norm
    assert norm is not None
    return norm.weight


def test_a_pair_is_compared_once(num_compared: Callable[[], int]) -> None:
    one = make_model()
    two, other = copy.deepcopy(one), copy.deepcopy(one)
    first(other).add_(1)
    num_compared()
    assert one.encodes_like(two) and num_compared() > 1
    assert one.encodes_like(two) and num_compared() == 0
    assert not one.encodes_like(other) and num_compared() > 0
    assert not one.encodes_like(other) and num_compared() == 0
    assert one.encodes_like(two) and num_compared() == 0
    assert not one.encodes_like(object()) and one.encodes_like(copy.copy(one))


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("way", ["in place", "through data", "through numpy", "other memory", "another tensor"])
def test_what_changes_is_compared_again(side: int, way: str, num_compared: Callable[[], int]) -> None:
    one = make_model()
    pair = (one, copy.deepcopy(one))
    assert pair[0].encodes_like(pair[1])
    changed = first(pair[side])
    before = changed.clone()
    if way == "in place":
        changed.add_(1)
    elif way == "through data":
        changed.data.add_(1)
    elif way == "through numpy":
        changed.detach().numpy()[0] += 1
    elif way == "other memory":
        changed.data = changed + 1
    else:
        norm = pair[side].weights.encoder.final_norm
        assert norm is not None
        norm.weight = changed = changed + 1
    assert not pair[0].encodes_like(pair[1])
    changed.detach().copy_(before)
    num_compared()
    assert pair[0].encodes_like(pair[1]) and num_compared() > 1


def test_tensors_of_inference_mode_are_looked_at_too() -> None:
    with torch.inference_mode():
        one, two = torch.zeros(3), torch.zeros(3)
    owners = make_model(), make_model()
    assert likeness.hold_same_numbers(owners[0], [one], owners[1], [two])
    with torch.inference_mode():
        two += 1
    assert not likeness.hold_same_numbers(owners[0], [one], owners[1], [two])
    assert not likeness.hold_same_numbers(owners[0], [one], owners[1], [two.double()])


def test_nothing_is_kept_alive() -> None:
    models = [make_model(), make_model()]
    assert models[0].encodes_like(models[1]) and models[1].encodes_like(models[0])
    gone = [*map(ref, models), *(ref(first(model)) for model in models)]
    models.clear()
    gc.collect()
    assert [one() for one in gone] == [None] * 4

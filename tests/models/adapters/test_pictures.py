"""Models that read pictures: their language part runs natively, and writes what transformers' own generate does."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from tests.models.adapters.pictured import FAMILIES, make_inputs, make_pictured

import unspool
from unspool.api.starting import start
from unspool.errors import InputError, UnsupportedError

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "penalties": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
}
MORE_WAYS: dict[str, dict[str, Any]] = {
    "sampling": {"do_sample": True, "top_p": 0.8, "seed": 5},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "DoLa": {"dola_layers": "low"},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "static cache": {"cache_implementation": "static"},
}


@cache
def keep(name: str) -> Any:
    return make_pictured(name)


@cache
def keep_theirs(name: str) -> Any:
    """The same model in the hands of transformers, whose calls leave hooks in it."""
    return make_pictured(name)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FAMILIES)
def test_writes_what_the_object_writes(name: str, way: str) -> None:
    model, inputs = keep(name), make_inputs(name)
    expected = keep_theirs(name).generate(**inputs, max_new_tokens=10, do_sample=False, **WAYS[way])
    found = unspool.generate(model, **inputs, max_new_tokens=10, **WAYS[way])
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_language_part_runs_natively(name: str) -> None:
    run = start(keep(name), **make_inputs(name), max_new_tokens=3)
    for _ in run:
        pass
    assert type(run.parts.model).__module__.startswith("unspool.models.decoder")
    assert run.stats.path == "library" or "transformers" not in run.stats.path_reason


@pytest.mark.parametrize("way", MORE_WAYS)
@pytest.mark.parametrize("name", ("llava", "qwen2_vl", "gemma3"))
def test_every_strategy_writes_what_it_writes_over_the_object(name: str, way: str) -> None:
    model, inputs = keep(name), make_inputs(name)
    found = unspool.generate(model, **inputs, max_new_tokens=6, **MORE_WAYS[way])
    settings = {} if way == "lookup" else MORE_WAYS[way]  # drafts change no token
    expected = unspool.generate(keep_theirs(name), **inputs, native=False, max_new_tokens=6, **settings)
    assert found.tolist() == expected.tolist()


def test_another_picture_is_another_answer() -> None:
    model, inputs = keep("qwen2_vl"), make_inputs("qwen2_vl")
    other = {**inputs, "pixel_values": -inputs["pixel_values"]}
    first, second = (unspool.generate(model, **given, max_new_tokens=10).tolist() for given in (inputs, other))
    assert first != second


def test_tokens_of_a_picture_see_each_other() -> None:
    """Without its marks a picture of Gemma 3 is read from left to right, there as here."""
    model, inputs = keep("gemma3"), make_inputs("gemma3")
    bare = {name: value for name, value in inputs.items() if name != "token_type_ids"}
    with torch.no_grad():
        seen, unseen = (model(**given).logits[:, -1] for given in (inputs, bare))
    assert not torch.allclose(seen, unseen)
    for given in (inputs, bare):
        expected = model.generate(**given, max_new_tokens=6, do_sample=False)
        assert unspool.generate(model, **given, max_new_tokens=6).tolist() == expected.tolist()


def test_a_picture_that_is_seen_whole_is_not_read_in_pieces() -> None:
    model, inputs = keep("gemma3"), make_inputs("gemma3")
    with pytest.raises(UnsupportedError, match=r"read in one pass, and `?prefill_chunk_size"):
        start(model, **inputs, prefill_chunk_size=4)
    with pytest.raises(UnsupportedError, match="a quantized cache"):
        start(model, **inputs, cache_implementation="quantized")


def test_pieces_of_a_prompt_with_positions_are_the_whole() -> None:
    model, inputs = keep("qwen2_vl"), make_inputs("qwen2_vl")
    whole, pieces = (
        unspool.generate(model, **inputs, max_new_tokens=8, prefill_chunk_size=size).tolist() for size in (None, 4)
    )
    assert whole == pieces


def test_places_and_pictures_must_fit() -> None:
    inputs = make_inputs("llava")
    inputs["pixel_values"] = inputs["pixel_values"][:1]
    with pytest.raises(InputError, match=r"8 places for what pictures are made into, and .* 4 embeddings"):
        unspool.generate(keep("llava"), **inputs, max_new_tokens=2)


def test_pixels_are_finite() -> None:
    inputs = make_inputs("llava")
    inputs["pixel_values"] = inputs["pixel_values"].fill_(float("nan"))
    with pytest.raises(InputError, match="NaN or infinite"):
        unspool.generate(keep("llava"), **inputs, max_new_tokens=2)


def test_texts_alone_run_natively_after_pictures() -> None:
    """What a call with pictures leaves in an object's vision part and its memory of positions changes nothing."""
    model = keep("qwen2_vl")
    model.generate(**make_inputs("qwen2_vl"), max_new_tokens=2, do_sample=False)
    run = start(model, torch.tensor([[11, 12, 13]]), max_new_tokens=4)
    for _ in run:
        pass
    assert type(run.parts.model).__module__.startswith("unspool.models.decoder")

"""Methods of GenerationMixin that a user put code of their own in the place of: followed, or refused."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.models.adapters.tiny import make

import unspool
from unspool.errors import SettingError, UnsupportedError

transformers = pytest.importorskip("transformers")

IDS = torch.tensor([[0, 0, 5, 6, 7], [9, 8, 7, 6, 5]])
MASK = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
COMMON = {"attention_mask": MASK, "max_new_tokens": 7, "eos_token_id": None, "pad_token_id": 0}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "penalty": {"repetition_penalty": 1.7},
    "sampling": {"do_sample": True, "temperature": 0.7},
    "nothing kept": {"use_cache": False},
}
NUM_PROMPTS = 3


def prompt_the_way_peft_does(model: Any, seed: int) -> Callable[..., dict[str, Any]]:
    """A prepare_inputs_for_generation that puts trained prompts before the first pass and a mask over them."""
    usual = type(model).prepare_inputs_for_generation
    table = model.get_input_embeddings()
    drawn = torch.randn(NUM_PROMPTS, table.weight.shape[1], generator=torch.Generator().manual_seed(seed))

    def prepare(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> dict[str, Any]:
        made: dict[str, Any] = usual(self, input_ids, **kwargs)
        rows = made["input_ids"].shape[0]
        if made.get("attention_mask") is not None:
            ahead = made["attention_mask"].new_ones(rows, NUM_PROMPTS)
            made["attention_mask"] = torch.cat((ahead, made["attention_mask"]), dim=1)
        made.pop("position_ids", None)
        past = made.get("past_key_values")
        if past is None or not past.get_seq_length():
            prompts = drawn.expand(rows, -1, -1)
            made["inputs_embeds"] = torch.cat((prompts, table(made.pop("input_ids"))), dim=1)
            made["input_ids"] = None
        return made

    return prepare


def place(model: Any, name: str, function: Any, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a function in the place of a method: on the object, in its class, or in a class of the user's."""
    if where == "instance":
        setattr(model, name, types.MethodType(function, model))
    elif where == "class":
        monkeypatch.setattr(type(model), name, function)
    else:
        model.__class__ = type("Mine", (type(model),), {name: function, "__module__": __name__})


def compare(model: Any, **settings: Any) -> torch.Tensor:
    """The tokens of both, which must be equal."""
    torch.manual_seed(0)
    expected = model.generate(IDS, **COMMON, **settings)
    torch.manual_seed(0)
    found = unspool.generate(model, IDS, **COMMON, **settings)
    assert found.tolist() == expected.tolist()
    return expected


@pytest.mark.parametrize("where", ["instance", "class", "subclass"])
@pytest.mark.parametrize("way", [name for name in WAYS if name != "sampling"])
def test_trained_prompts_count(where: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    bare = model.generate(IDS, **COMMON, **WAYS[way])
    place(model, "prepare_inputs_for_generation", prompt_the_way_peft_does(model, 1), where, monkeypatch)
    found = compare(model, **WAYS[way])
    assert found.tolist() != bare.tolist()
    unspool.attach(model)
    assert model.generate(IDS, **COMMON, **WAYS[way]).tolist() == found.tolist()


@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral", "gemma2"])
def test_two_prompts_give_two_texts_in_every_family(family: str) -> None:
    try:
        model = make(family)
    except KeyError:
        pytest.skip(f"no tiny {family}")
    found = []
    for seed in (1, 2):
        model.prepare_inputs_for_generation = types.MethodType(prompt_the_way_peft_does(model, seed), model)
        found.append(compare(model).tolist())
    assert found[0] != found[1]


def test_streams_and_strategies_of_unspool_follow_the_prompts() -> None:
    model = make("llama")
    model.prepare_inputs_for_generation = types.MethodType(prompt_the_way_peft_does(model, 1), model)
    expected = compare(model)[:, 5:].tolist()
    rows: dict[int, list[int]] = {0: [], 1: []}
    for emitted in unspool.stream(model, IDS, **COMMON):
        for row, tokens in emitted.tokens.items():
            rows[row] += tokens
    assert [rows[0], rows[1]] == expected
    one = model.generate(IDS[1:], max_new_tokens=7, eos_token_id=None, pad_token_id=0)
    drafted = unspool.generate(
        model, IDS[1:], max_new_tokens=7, eos_token_id=None, pad_token_id=0, prompt_lookup_num_tokens=3
    )
    assert drafted.tolist() == one.tolist()
    output = unspool.generate(model, IDS, **COMMON, return_dict_in_generate=True, output_scores=True)
    assert "prepare_inputs_for_generation() of this LlamaForCausalLM is not transformers' own" in (
        output.stats.path_reason
    )
    seeded = {**COMMON, "do_sample": True, "seed": 3}
    assert unspool.generate(model, IDS, **seeded).tolist() == unspool.generate(model, IDS, **seeded).tolist()
    with pytest.raises(UnsupportedError, match="guidance"):
        unspool.generate(model, IDS, **COMMON, guidance_scale=2.0)


def test_a_method_that_was_put_back_is_no_rule_of_its_own() -> None:
    model = make("llama")
    model.prepare_inputs_for_generation = model.prepare_inputs_for_generation  # as PEFT leaves it
    output = unspool.generate(model, IDS, **COMMON, return_dict_in_generate=True)
    assert "prepare_inputs_for_generation" not in (output.stats.path_reason or "")


# --- methods that decide what is decoded ------------------------------------------------------------------


class Lift(transformers.LogitsProcessor):  # type: ignore[misc]
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        scores[:, 11] += 100.0 * (input_ids.shape[1] % 2)
        return scores


class Stop(transformers.StoppingCriteria):  # type: ignore[misc]
    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= 8)


def add_processor(usual: Any) -> Any:
    def make_list(self: Any, *args: Any, **kwargs: Any) -> Any:
        return transformers.LogitsProcessorList([*usual(self, *args, **kwargs), Lift()])

    return make_list


def add_criterion(usual: Any) -> Any:
    def make_list(self: Any, *args: Any, **kwargs: Any) -> Any:
        return transformers.StoppingCriteriaList([*usual(self, *args, **kwargs), Stop()])

    return make_list


def shorten(usual: Any) -> Any:
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = usual(self, *args, **kwargs)
        config.max_length = 8
        return config

    return prepare


def hide(usual: Any) -> Any:
    """The last column that was read is masked from then on."""

    def update(self: Any, outputs: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        made = usual(self, outputs, model_kwargs, *args, **kwargs)
        mask = made["attention_mask"].clone()
        mask[:, -3] = 0
        return {**made, "attention_mask": mask}

    return update


def draw_least(usual: Any) -> Any:
    def decode(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torch.cat((input_ids, torch.full_like(input_ids, 42)), dim=1)

    return decode


def expand_reversed(usual: Any) -> Any:
    def expand(self: Any, *args: Any, **kwargs: Any) -> Any:
        ids, made = usual(self, *args, **kwargs)
        return ids.flip(0), made

    return expand


def warm(usual: Any) -> Any:
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        config, made = usual(self, *args, **kwargs)
        config.repetition_penalty = 3.0
        return config, made

    return prepare


DECIDING = {
    "_get_logits_processor": add_processor,
    "_get_stopping_criteria": add_criterion,
    "_prepare_generated_length": shorten,
    "_update_model_kwargs_for_generation": hide,
    "_sample": draw_least,
    "_prepare_generation_config": warm,
    "_expand_inputs_for_generation": expand_reversed,
}


@pytest.mark.parametrize("where", ["instance", "class", "subclass"])
@pytest.mark.parametrize("name", DECIDING)
def test_a_method_that_decides_is_followed(name: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make("llama")
    bare = model.generate(IDS, **COMMON, repetition_penalty=1.3)
    place(model, name, DECIDING[name](getattr(type(model), name)), where, monkeypatch)
    is_read = name != "_sample" or where != "instance"  # transformers asks the class for it
    assert (compare(model, repetition_penalty=1.3).tolist() != bare.tolist()) == is_read
    ways = ["beams", "sampling"] if name != "_sample" else ["sampling"]
    for way in ways:
        compare(model, **WAYS[way])
    unspool.attach(model)
    assert model.generate(IDS, **COMMON).tolist() == compare_by_class(model)
    unspool.detach(model)
    refused = pytest.raises(UnsupportedError, match=f"{name}\\(\\) that is not transformers' own")
    with refused:
        list(unspool.stream(model, IDS, **COMMON))
    with refused:
        unspool.Engine(model)
    with pytest.raises(SettingError, match=r"`logprobs` is a setting of unspool's"):
        unspool.generate(model, IDS, **COMMON, logprobs=2)
    with pytest.raises(UnsupportedError, match="contrastive search is not decoded by transformers"):
        unspool.generate(model, IDS, **COMMON, penalty_alpha=0.6, top_k=4)
    with pytest.raises(SettingError, match="'temprature'; did you mean"):
        unspool.generate(model, IDS, **COMMON, temprature=0.4)


def compare_by_class(model: Any) -> Any:
    return type(model).generate(model, IDS, **COMMON).tolist()


def test_configs_of_both_are_taken_where_transformers_decodes() -> None:
    model = make("llama")
    model._get_logits_processor = types.MethodType(add_processor(type(model)._get_logits_processor), model)
    rest = {name: value for name, value in COMMON.items() if name != "attention_mask"}
    expected = model.generate(IDS, attention_mask=MASK, **rest).tolist()
    for kind in (unspool.GenerationConfig, transformers.GenerationConfig):
        found = unspool.generate(model, IDS, attention_mask=MASK, generation_config=kind(**rest))
        assert found.tolist() == expected
    with pytest.raises(SettingError, match="`seed` is a setting of unspool's"):
        unspool.generate(model, IDS, generation_config=unspool.GenerationConfig(**rest, seed=3, do_sample=True))


def test_all_of_transformers_attached_follows_too() -> None:
    model = make("llama")
    model._get_logits_processor = types.MethodType(add_processor(type(model)._get_logits_processor), model)
    expected = model.generate(IDS, **COMMON).tolist()
    unspool.attach()
    try:
        assert model.generate(IDS, **COMMON).tolist() == expected
    finally:
        unspool.detach()


def test_a_generate_of_the_user_s_own_is_run_or_refused() -> None:
    model = make("llama")
    kind = type(model)

    def two_more(self: Any, *args: Any, **kwargs: Any) -> Any:
        return kind.generate(self, *args, **{**kwargs, "max_new_tokens": 2})

    model.__class__ = type("Short", (kind,), {"generate": two_more, "__module__": __name__})
    assert unspool.generate(model, IDS, **COMMON).shape == (2, 7)
    model._get_logits_processor = types.MethodType(add_processor(kind._get_logits_processor), model)
    assert unspool.generate(model, IDS, **COMMON).tolist() == model.generate(IDS, **COMMON).tolist()
    del model._get_logits_processor

    def alone(self: Any, input_ids: torch.Tensor, **kwargs: Any) -> Any:
        return input_ids

    model.__class__ = type("Alone", (kind,), {"generate": alone, "__module__": __name__})
    with pytest.raises(UnsupportedError, match="leaves nothing to the common one"):
        unspool.generate(model, IDS, **COMMON)

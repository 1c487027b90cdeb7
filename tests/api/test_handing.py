"""Models, prefixes, caches and outputs that are copied, pickled and handed to other processes."""

from __future__ import annotations

import copy
import io
import operator
import pickle
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from tests.conformance.cases import GOLDENS
from tests.copies import copy_by_pickle

import unspool
from unspool import LanguageModel
from unspool.cache.kinds import KINDS
from unspool.errors import SettingError, UnsupportedError
from unspool.loading.model import LoadedParts
from unspool.models.weights import iterate_tensors

PROMPT = "hello the cat"
COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "pickle": copy_by_pickle,
}


def write(lm: LanguageModel, prompt: Any = PROMPT, **settings: Any) -> list[list[int]]:
    return lm.generate(prompt, **{"max_new_tokens": 8, **settings}).token_ids


def use_up_freed_memory() -> list[torch.Tensor]:
    """Let somebody else write where tensors have been."""
    return [torch.full((size,), torch.nan) for size in (48, 64, 96, 512, 1024, 2048, 3104) for _ in range(40)]


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}, {"native": False}])
def test_a_copy_of_a_model_writes_the_same(folder: Path, way: str, options: dict[str, Any]) -> None:
    lm = unspool.load(folder, device="cpu", **options)
    lm.generation_config.repetition_penalty = 1.5
    expected = write(lm)
    copied = COPIES[way](lm)
    assert (type(copied), copied.name, copied.source) == (LanguageModel, lm.name, lm.source)
    assert (copied.model.dtype, copied.model.is_quantised) == (lm.model.dtype, lm.model.is_quantised)
    assert write(copied) == expected
    copied.generation_config.repetition_penalty = 1.0
    assert lm.generation_config.repetition_penalty == 1.5
    assert write(lm) == expected


@pytest.mark.parametrize("name", ["t5", "mamba", "gpt2"])
@pytest.mark.parametrize("way", COPIES)
def test_a_bare_model_is_copied_too(name: str, way: str) -> None:
    model = unspool.load(GOLDENS / "models" / name, device="cpu").model
    copied = COPIES[way](model)
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(unspool.generate(copied, ids, max_new_tokens=5), unspool.generate(model, ids, max_new_tokens=5))


def test_weights_are_shared_by_a_shallow_copy_and_not_by_a_deep_one(lm: LanguageModel) -> None:
    expected = write(lm)
    shallow, deep = copy.copy(lm), copy.deepcopy(lm)
    table = lm.model.get_input_embeddings().weight
    assert shallow.model.get_input_embeddings().weight is table and shallow.tokenizer is lm.tokenizer
    assert deep.model.get_input_embeddings().weight.data_ptr() != table.data_ptr()
    for tensor in iterate_tensors(deep.model.weights):
        tensor.zero_()
    assert write(lm) == write(shallow) == expected
    shallow.model.to(torch.bfloat16)  # the copy's alone
    assert lm.model.dtype == torch.float32 and write(lm) == expected


def test_a_tokenizer_is_pickled_with_what_was_changed(lm: LanguageModel) -> None:
    assert lm.tokenizer is not None
    lm.tokenizer.chat_template = "{{ messages[0]['content'] }}"
    copied = COPIES["pickle"](lm)
    assert copied.encode([{"role": "user", "content": "the cat"}]) == lm.encode(
        [{"role": "user", "content": "the cat"}]
    )


def test_another_dtype_is_kept(lm: LanguageModel) -> None:
    lm.model.to(torch.float64)
    copied = COPIES["pickle"](lm.model.to(torch.bfloat16))
    assert copied.dtype == torch.bfloat16


def test_a_spawned_process_is_given_the_model(lm: LanguageModel) -> None:
    expected = write(lm)
    prefix = lm.prefix("hello")
    context = torch.multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        ask = operator.methodcaller("generate", PROMPT, max_new_tokens=8)
        assert pool.submit(ask, lm).result(timeout=120).token_ids == expected
        follow = operator.methodcaller("generate", " the cat", max_new_tokens=4)
        followed = pool.submit(follow, prefix).result(timeout=120)
    junk = use_up_freed_memory()
    assert write(lm) == expected and junk
    assert prefix.generate(" the cat", max_new_tokens=4).token_ids == followed.token_ids


def test_a_model_that_has_no_path_refuses_before_anything_moves(lm: LanguageModel) -> None:
    import transformers

    expected = write(lm)
    lm.model.origin = None  # as if it had been built in memory
    adapted = transformers.AutoModelForCausalLM.from_pretrained(lm.source)
    given = LanguageModel(LoadedParts("mine", Path(), unspool.api.core.as_model(adapted), None, lm.generation_config))
    for held in (lm, lm.model, lm.prefix("hello"), given, given.model):
        for pickler in (pickle.Pickler, ForkingPickler):
            with pytest.raises(UnsupportedError, match=r"not loaded from a path.*unspool\.load"):
                pickler(io.BytesIO(), 4).dump(held)
    assert not any(tensor.is_shared() for tensor in iterate_tensors(lm.model.weights))
    assert write(lm) == expected
    assert write(copy.deepcopy(lm)) == expected
    with pytest.raises(UnsupportedError, match="result"):
        pickle.dumps(lm.start(PROMPT))


@pytest.mark.parametrize("options", [{}, {"quantize": "int8"}])
@pytest.mark.parametrize("prompt", [PROMPT, ["hello the", "a"]])
def test_weights_that_move_are_found_again(folder: Path, options: dict[str, Any], prompt: Any) -> None:
    lm = unspool.load(folder, device="cpu", **options)
    ways: list[dict[str, Any]] = [{}, {"do_sample": True, "seed": 5}, {"num_beams": 2}]
    expected = [write(lm, prompt, **way) for way in ways]
    moves: list[Callable[[torch.Tensor], Any]] = [lambda t: t.share_memory_(), lambda t: t.set_(t.clone())]
    for move in moves:
        for tensor in iterate_tensors(lm.model.weights):
            move(tensor)
        junk = use_up_freed_memory()
        assert [write(lm, prompt, **way) for way in ways] == expected and junk


def test_weights_that_move_between_the_pieces_of_a_stream(lm: LanguageModel) -> None:
    settings: dict[str, Any] = {"do_sample": True, "seed": 3, "max_new_tokens": 12}
    expected, tokens, junk = write(lm, **settings), [], []
    for piece in lm.stream(PROMPT, **settings):
        tokens += piece.token_ids
        for tensor in iterate_tensors(lm.model.weights):
            tensor.set_(tensor.clone())
        junk.append(use_up_freed_memory())
    assert [tokens] == expected


def test_weights_of_another_form_are_refused(lm: LanguageModel) -> None:
    write(lm)
    norm = lm.model.weights.final_norm
    norm.weight.set_(torch.ones(3))
    with pytest.raises(SettingError, match="in place"):
        write(lm)


@pytest.mark.parametrize("kind", ["dynamic", "quantized"])
def test_keys_that_move_are_found_again(lm: LanguageModel, kind: str) -> None:
    model, ids = lm.model, torch.arange(5, 60)[None]
    caches = [model.new_cache(kind, 1, 128) for _ in range(2)]
    for cache in caches:
        model.forward(ids, cache)
        model.forward(ids[:, :1], cache)
    moved = caches[0]
    held = moved._buffers if kind == "dynamic" else [t for store in moved._store.layers for t in store.tensors()]
    for tensor in held:
        tensor.set_(tensor.clone())
    junk = use_up_freed_memory()
    made, expected = (model.forward(ids[:, :1], cache) for cache in caches)
    assert made.path == expected.path == "library" and junk
    assert torch.equal(made.logits, expected.logits)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("mamba", "sliding_window")])
def test_outputs_and_caches_are_pickled_and_copied(lm: LanguageModel, kind: str) -> None:
    output = lm.generate(
        PROMPT, max_new_tokens=4, cache_implementation=kind, return_dict_in_generate=True, output_scores=True
    ).output
    assert output is not None
    for copied in (way(output) for way in COPIES.values()):
        assert type(copied) is type(output) and list(copied) == list(output)
        assert torch.equal(copied.sequences, output.sequences) and torch.equal(copied["scores"][3], output.scores[3])
        assert copied.stats.new_tokens == 4
        assert copied.past_key_values.lengths == output.past_key_values.lengths
    again = COPIES["pickle"](output.past_key_values)
    if again.room is not None:
        return  # nothing can follow
    longer = torch.cat((output.sequences, torch.tensor([[7]])), dim=1)
    made = [
        unspool.generate(lm, longer, past_key_values=cache, max_new_tokens=3).tolist()
        for cache in (again, output.past_key_values)
    ]
    assert made[0] == made[1]


def test_a_cache_handed_on_shares_no_memory(lm: LanguageModel) -> None:
    cache = lm.model.new_cache()
    lm.model.forward(torch.tensor([[5, 6, 7]]), cache)
    ForkingPickler(io.BytesIO(), 4).dump(cache)
    assert not any(buffer.is_shared() for buffer in cache.places().buffers)


@pytest.mark.parametrize(
    "settings",
    [{"num_beams": 3, "return_beam_trace": True}, {"prompt_lookup_num_tokens": 3}, {"logprobs": 2}],
)
def test_a_generation_is_pickled_and_copied(lm: LanguageModel, settings: dict[str, Any]) -> None:
    answer = lm.generate(PROMPT, max_new_tokens=6, **settings)
    for way in COPIES.values():
        assert way(answer) == answer
    pieces = list(lm.stream(PROMPT, max_new_tokens=4))
    assert [(p, p.row, p.token_ids) for p in COPIES["pickle"](pieces)] == [(p, p.row, p.token_ids) for p in pieces]

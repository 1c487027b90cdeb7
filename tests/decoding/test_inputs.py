"""What may stand before the first step: ids and masks, embeddings, a cache that knows part of the text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.conformance.cases import load_model
from tests.fakes import FakeModel, decode_slowly, new_fake_cache, pad_left
from unspool import DynamicCache, EncoderDecoderCache, generate, stream
from unspool.api.starting import UNBUILT
from unspool.decoding.prompts import Prompts
from unspool.errors import InputError, SettingError, UnspoolError, UnsupportedError

ROWS = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]
NEW = 6


def expect(model: FakeModel, rows: list[list[int]], num_new: int = NEW) -> list[list[int]]:
    return [decode_slowly(model, row, num_new) for row in rows]


# --- ids and masks that can't be decoded from ---------------------------------------------------------------

IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"input_ids": torch.tensor([1, 2])}, r"must have the shape \(rows, length\), not \(2,\)"),
        ({"input_ids": torch.zeros(1, 2, 3, dtype=torch.long)}, r"not \(1, 2, 3\)"),
        ({"input_ids": [1, 2, 3]}, "list of rows of whole numbers"),
        ({"input_ids": "hello"}, "list of rows of whole numbers"),
        ({"input_ids": 5}, "list of rows of whole numbers"),
        ({"input_ids": [[1, 2**70]]}, "list of rows of whole numbers"),
        ({"input_ids": [[1, 2], [3]]}, r"rows of different lengths \[1, 2\]"),
        ({"input_ids": [[0.5, 1.0]]}, "whole numbers, not torch.float32"),
        ({"input_ids": torch.tensor([[True, False]])}, "whole numbers, not torch.bool"),
        ({"input_ids": []}, "must have the shape"),
        ({"input_ids": [[]]}, "nothing to continue"),
        ({"input_ids": torch.zeros(0, 3, dtype=torch.long)}, "has 0 rows"),
        ({"input_ids": [[1, 23]]}, "the id 23, outside the model's vocabulary of 23"),
        ({"input_ids": [[1, -1]]}, "the id -1, outside"),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 2)}, r"shape \(2, 2\) and the input \(2, 3\)"),
        ({"input_ids": IDS, "attention_mask": torch.ones(2, 3) * 2}, "zeros and ones alone"),
        ({"input_ids": IDS, "attention_mask": torch.full((2, 3), torch.nan)}, "zeros and ones alone"),
        ({"input_ids": IDS, "attention_mask": [1, 1, 1]}, "attention_mask must be a tensor or a list of rows"),
        ({"input_ids": IDS, "attention_mask": [[0, 1, 1], [0, 0, 0]]}, "row 1 is empty"),
        ({"input_ids": [[1, 2], [0, 0]], "pad_token_id": 0}, "row 1 holds nothing but pad tokens"),
        ({}, "no prompt was given"),
        ({"attention_mask": torch.ones(1, 3)}, "attention_mask was given without"),
        ({"bos_token_id": 30}, "bos_token_id holds the id 30"),
        ({"decoder_input_ids": [[1]]}, "decoder_input_ids belongs to encoder-decoder models"),
        ({"input_ids": IDS, "inputs_embeds": torch.zeros(2, 2, 4)}, "of different lengths"),
        ({"inputs_embeds": torch.zeros(2, 3)}, r"shape \(rows, length, 4\)"),
        ({"inputs_embeds": torch.zeros(2, 3, 5)}, "the model's width is 4"),
        ({"inputs_embeds": torch.zeros(2, 0, 4)}, "the model's width is 4"),
        ({"inputs_embeds": torch.zeros(2, 3, 4, dtype=torch.long)}, "floating-point"),
        ({"inputs_embeds": torch.full((2, 3, 4), torch.nan)}, "NaN"),
    ],
)
def test_bad_inputs_are_refused_before_the_first_pass(arguments: dict[str, Any], told: str) -> None:
    model = FakeModel()
    with pytest.raises(InputError, match=told):
        generate(model, **arguments, max_new_tokens=3)
    assert model.num_passes == 0


def test_two_names_of_one_argument() -> None:
    with pytest.raises(SettingError, match="two names"):
        generate(FakeModel(), IDS, input_ids=IDS)


@pytest.mark.parametrize("name", ["eos_token_id", "pad_token_id", "bos_token_id"])
@pytest.mark.parametrize("value", ["x", 2.5, True])
def test_token_ids_in_settings_are_checked_first(name: str, value: Any) -> None:
    with pytest.raises(SettingError, match=name):
        generate(FakeModel(), IDS, **{name: value})


@pytest.mark.parametrize("name", ["eos_token_id", "pad_token_id"])
def test_token_ids_in_settings_lie_in_the_vocabulary(name: str) -> None:
    with pytest.raises(SettingError, match=f"`{name}`=23 is outside the model's vocabulary of 23"):
        generate(FakeModel(), IDS, **{name: 23})


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32, torch.uint8])
def test_ids_of_any_whole_number_type(dtype: torch.dtype) -> None:
    model = FakeModel()
    found = generate(model, IDS.to(dtype), attention_mask=torch.ones(2, 3).bool(), max_new_tokens=2)
    assert found.dtype == torch.int64 and found[:, 3:].tolist() == expect(model, IDS.tolist(), 2)


def test_lists_are_as_good_as_tensors() -> None:
    model = FakeModel()
    found = generate(model, [[0, 1, 2], [3, 4, 5]], attention_mask=[[0, 1, 1], [1, 1, 1]], max_new_tokens=2)
    assert found[:, 3:].tolist() == expect(model, [[1, 2], [3, 4, 5]], 2)


# --- embeddings ---------------------------------------------------------------------------------------------

WAYS = [{}, {"use_cache": False}, {"cache_implementation": "static"}, {"prefill_chunk_size": 2}]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_embeddings_alone_return_the_new_tokens(way: dict[str, Any]) -> None:
    model = FakeModel()
    given = pad_left(ROWS)
    found = generate(
        model,
        inputs_embeds=model.embed(given["input_ids"]),
        attention_mask=given["attention_mask"],
        max_new_tokens=NEW,
        **way,
    )
    assert found.tolist() == expect(model, ROWS)


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_embeddings_win_over_the_ids_beside_them(way: dict[str, Any]) -> None:
    """With both, the embeddings are read and the ids are what comes back (and what processors see)."""
    model = FakeModel()
    given = pad_left(ROWS)
    others = (given["input_ids"] + 1) * given["attention_mask"]
    seen = []

    def look(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(input_ids.clone())
        return scores

    found = generate(
        model,
        input_ids=others,
        inputs_embeds=model.embed(given["input_ids"]),
        attention_mask=given["attention_mask"],
        max_new_tokens=NEW,
        logits_processor=[look],
        **way,
    )
    assert found[:, :5].tolist() == others.tolist() and seen[0].tolist() == others.tolist()
    assert found[:, 5:].tolist() == expect(model, ROWS)


@pytest.mark.parametrize("side", ["left", "middle", "right"])
def test_pad_tokens_among_the_ids_beside_embeddings_are_masked_as_without_them(side: str) -> None:
    """Which tokens are real is read off the ids, whether the model reads these or their embeddings."""
    model, pad = FakeModel(), 22
    column = {"left": 0, "middle": 2, "right": 4}[side]
    ids = torch.tensor([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])
    ids[1, column] = pad
    rest = [token for token in ids[1].tolist() if token != pad]
    settings: dict[str, Any] = {"max_new_tokens": NEW, "pad_token_id": pad}
    found = generate(model, ids, inputs_embeds=model.embed(ids), **settings)
    assert found.tolist() == generate(model, ids, **settings).tolist()
    assert found[:, 5:].tolist() == expect(model, [ids[0].tolist(), rest])
    as_tokens = generate(
        model, ids, inputs_embeds=model.embed(ids), attention_mask=torch.ones_like(ids), **settings
    )  # a mask that is given is what counts
    assert as_tokens[:, 5:].tolist() == expect(model, ids.tolist())


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_embeddings_with_several_sequences_and_rows_that_leave(way: dict[str, Any]) -> None:
    model = FakeModel()
    given = pad_left(ROWS)
    settings = {"do_sample": True, "seed": [1, 2, 3], "top_k": 0, "num_return_sequences": 2, "temperature": 2.0}
    settings |= {"eos_token_id": [3, 4, 5, 6, 7, 8], "pad_token_id": 22, "max_new_tokens": 8}
    from_ids = generate(model, **given, **settings)[:, 5:]
    model.rows_of_passes.clear()
    found = generate(
        model,
        inputs_embeds=model.embed(given["input_ids"]),
        attention_mask=given["attention_mask"],
        **settings,
        **way,
    )
    assert torch.equal(found, from_ids)
    assert len(set(model.rows_of_passes)) > 1


def test_embeddings_count_as_positions_of_max_length() -> None:
    model = FakeModel()
    embeds = model.embed(torch.tensor([[1, 2, 3]]))
    assert generate(model, inputs_embeds=embeds, max_length=8).shape == (1, 5)
    assert generate(model, inputs_embeds=embeds, max_new_tokens=5).shape == (1, 5)
    assert generate(model, torch.tensor([[1, 2, 3]]), inputs_embeds=embeds, max_length=8).shape == (1, 8)
    with pytest.raises(SettingError, match="the prompt has 3 tokens and `max_length` is 3"):
        generate(model, inputs_embeds=embeds, max_length=3)


def test_masked_embeddings_count_as_positions_of_lengths_as_masked_ids_do() -> None:
    model, ids, mask = FakeModel(), torch.tensor([[1, 2, 0, 3]]), torch.tensor([[1, 1, 0, 1]])
    given = {"inputs_embeds": model.embed(ids), "attention_mask": mask}
    [first] = generate(model, **given, max_new_tokens=1)[0].tolist()
    for settings in ({"max_length": 8}, {"max_new_tokens": 6, "min_length": 4, "eos_token_id": first}):
        assert torch.equal(
            generate(model, **given, **settings), generate(model, ids, attention_mask=mask, **settings)[:, 4:]
        )


def test_a_model_that_reads_no_embeddings_says_so() -> None:
    model = FakeModel(can=frozenset())
    with pytest.raises(UnsupportedError, match="a fake model can't read inputs_embeds"):
        generate(model, inputs_embeds=torch.zeros(1, 2, 4))


# --- a cache that knows part of the text --------------------------------------------------------------------


def first_turn(model: FakeModel, rows: list[list[int]], cache: Any = None, **settings: Any) -> tuple[Any, Any]:
    """A call whose cache is kept; the rows with what it wrote, and the cache."""
    kept = {"past_key_values": cache} if cache is not None else {}
    settings = {"max_new_tokens": 4, "return_dict_in_generate": True} | settings
    output = generate(model, **pad_left(rows), **kept, **settings)
    width = max(map(len, rows))
    new = output.sequences[:, width:].tolist()
    eos = settings.get("eos_token_id", [])
    ended = [tokens[: next((i + 1 for i, t in enumerate(tokens) if t in eos), len(tokens))] for tokens in new]
    return [row + tokens for row, tokens in zip(rows, ended, strict=True)], output.past_key_values


CACHES: dict[str, Any] = {
    "made by the call": lambda: None,
    "dynamic": DynamicCache,
    "static": lambda: new_fake_cache("static", 3, 40),
}


@pytest.mark.parametrize("kind", CACHES)
def test_a_second_turn_reads_only_what_is_new(kind: str) -> None:
    model = FakeModel()
    rows, cache = first_turn(model, ROWS, CACHES[kind]())
    assert cache.lengths == [len(row) - 1 for row in rows]  # the last token has not been read
    rows = [row + more for row, more in zip(rows, ([1, 2], [3], [4, 5, 6]), strict=True)]
    model.num_tokens_read = 0
    found = generate(model, **pad_left(rows), past_key_values=cache, max_new_tokens=NEW)
    width = max(map(len, rows))
    assert found[:, width:].tolist() == expect(model, rows)
    assert model.num_tokens_read == (1 + 2 + 1 + 1 + 1 + 3) + 3 * (NEW - 1)


def test_rows_that_ended_early_go_on_from_their_own_tokens() -> None:
    """Padding after a row's end is no part of it, and no row may leave a cache that is the caller's."""
    model = FakeModel()
    eos = [decode_slowly(model, ROWS[0], 4)[0]]
    for cache in (None, DynamicCache()):
        rows, cache = first_turn(model, ROWS, cache, max_new_tokens=6, eos_token_id=eos, pad_token_id=0)
        assert len({len(row) for row in rows}) > 1 and len(rows[0]) == len(ROWS[0]) + 1
        assert len(cache.lengths) == 3
        rows = [[*row, 5, 6] for row in rows]
        found = generate(model, **pad_left(rows), past_key_values=cache, max_new_tokens=NEW)
        assert found[:, max(map(len, rows)) :].tolist() == expect(model, rows)


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("hides", ["the mask", "the pad token"])
def test_a_token_that_a_cache_holds_is_not_hidden(kind: str, hides: str) -> None:
    """Its key has a position, so that without the token all others behind it would stand at wrong ones."""
    model = FakeModel()
    rows, cache = first_turn(model, ROWS, CACHES[kind]())
    pad = rows[1][-3]  # one that was written
    rows = [row + more for row, more in zip(rows, ([1, 2], [3], [4, 5, 6]), strict=True)]
    given = pad_left(rows)
    shown = {**given, "past_key_values": cache, "max_new_tokens": NEW, "pad_token_id": pad}
    kept = cache.clone()
    expected = generate(model, **shown)[:, max(map(len, rows)) :].tolist()
    assert expected == expect(model, rows)
    shown["past_key_values"] = kept
    if hides == "the mask":
        shown["attention_mask"] = given["attention_mask"] * given["input_ids"].ne(pad)
    else:
        ids = given["input_ids"].clone()
        ids[given["attention_mask"] == 0] = pad
        shown |= {"input_ids": ids, "attention_mask": None}
    model.num_passes = 0
    with pytest.raises(SettingError, match=f"past_key_values hold the token {pad} at position .* attention_mask hides"):
        generate(model, **shown)
    assert model.num_passes == 0


def test_a_callers_cache_keeps_its_rows_without_an_output_object() -> None:
    model = FakeModel()
    eos = [decode_slowly(model, ROWS[0], 4)[0]]
    cache = DynamicCache()
    generate(model, **pad_left(ROWS), past_key_values=cache, max_new_tokens=6, eos_token_id=eos)
    assert cache.lengths[0] == len(ROWS[0]) + 1 and len(cache.lengths) == 3


def test_an_interrupted_turn_leaves_a_cache_to_go_on_from() -> None:
    model = FakeModel()
    cache = DynamicCache()
    steps = stream(model, **pad_left(ROWS), past_key_values=cache, max_new_tokens=9)
    written = [next(steps).tokens, next(steps).tokens]
    steps.close()
    rows = [row + written[0][i] + written[1][i] for i, row in enumerate(ROWS)]
    found = generate(model, **pad_left(rows), past_key_values=cache, max_new_tokens=3)
    assert found[:, max(map(len, rows)) :].tolist() == expect(model, rows, 3)


def test_tuples_are_taken_back() -> None:
    model = FakeModel()
    rows = [[1, 2, 3], [4, 5, 6]]
    rows, legacy = first_turn(model, rows, return_legacy_cache=True)
    assert isinstance(legacy, tuple) and legacy[0][0].shape == (2, 1, 6, 1)
    assert legacy[0][0][:, 0, :, 0].tolist() == [row[:6] for row in rows]
    found = generate(model, **pad_left(rows), past_key_values=legacy, max_new_tokens=NEW)
    assert found[:, 7:].tolist() == expect(model, rows)


def test_a_cache_and_embeddings() -> None:
    """The embeddings stand for the whole text too; only those past what is held are read."""
    model = FakeModel()
    rows, cache = first_turn(model, ROWS)
    rows = [row + more for row, more in zip(rows, ([1, 2], [3], [4, 5, 6]), strict=True)]
    given = pad_left(rows)
    embeds = model.embed(given["input_ids"])
    for ids in ({}, {"input_ids": torch.zeros_like(given["input_ids"])}):
        held = DynamicCache.from_batch_splits(cache.batch_split(3, 1))
        model.num_tokens_read = 0
        found = generate(
            model,
            inputs_embeds=embeds,
            attention_mask=given["attention_mask"],
            past_key_values=held,
            max_new_tokens=NEW,
            **ids,
        )
        assert found[:, -NEW:].tolist() == expect(model, rows)
        assert model.num_tokens_read == 9 + 3 * (NEW - 1)


@pytest.mark.parametrize(
    ("cache", "settings", "told"),
    [
        (lambda held: held, {"input_ids": [[1, 2]]}, "hold 3 rows and the prompt has 1"),
        (lambda held: held, {"input_ids": [[1, 2]] * 3}, "hold 6 positions of row 0 and its prompt has 2 tokens"),
        (lambda held: held, {"use_cache": False}, "`use_cache` is False"),
        (lambda held: held, {"cache_implementation": "dynamic"}, "`cache_implementation` says what cache to make"),
        (lambda held: new_fake_cache("static", 3, 10), {}, r"room for 10 positions, .* needs 14"),
        (lambda held: EncoderDecoderCache(held, DynamicCache()), {}, "a fake model decodes with a DynamicCache"),
        (lambda held: {"keys": 1}, {}, "a cache of unspool's, not a dict"),
        (lambda held: (1, 2), {}, "each layer's keys and values"),
        (lambda held: held, {"prompt_logprobs": 0, "return_dict_in_generate": True}, "hide the prompt's first part"),
    ],
)
def test_caches_that_do_not_fit_are_refused(cache: Any, settings: dict[str, Any], told: str) -> None:
    model = FakeModel()
    held = DynamicCache()
    held.begin(3, 6), held.write(0, torch.zeros(3, 6, 2, 1, 1)), held.end()
    arguments = pad_left([[1] * 9, [2] * 8, [3] * 7]) | {"max_new_tokens": NEW} | settings
    if "input_ids" in settings:
        del arguments["attention_mask"]
    with pytest.raises(SettingError, match=told):
        generate(model, past_key_values=cache(held), **arguments)
    assert model.num_passes == 0 and held.lengths == [6, 6, 6]


def test_a_static_cache_with_just_enough_room() -> None:
    model = FakeModel()
    cache = new_fake_cache("static", 1, 8)
    found = generate(model, [[1, 2, 3]], past_key_values=cache, max_new_tokens=6)
    assert found[:, 3:].tolist() == expect(model, [[1, 2, 3]])
    assert cache.lengths == [8]


def test_legacy_tuples_of_ragged_rows_are_refused_before_the_first_pass() -> None:
    model = FakeModel()
    for way in ({}, {"cache_implementation": "static"}):
        with pytest.raises(SettingError, match="`return_legacy_cache` gives tuples"):
            generate(model, **pad_left(ROWS), return_dict_in_generate=True, return_legacy_cache=True, **way)
    assert model.num_passes == 0


# --- arguments that are yet to come -------------------------------------------------------------------------


ARGUMENTS: dict[str, Any] = {
    "assistant_model": FakeModel(),
    "assistant_tokenizer": object(),
    "negative_prompt_ids": torch.tensor([[1, 2], [3, 4]]),
    "negative_prompt_attention_mask": torch.ones(2, 2),
    "synced_gpus": True,
}


@pytest.mark.parametrize("name", sorted(UNBUILT))
def test_arguments_to_come_are_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedError, match=f"`{name}` needs"):
        generate(FakeModel(), IDS, **{name: ARGUMENTS[name]})
    assert generate(FakeModel(), IDS, max_new_tokens=1, **{name: None}).shape == (2, 4)


def test_synced_gpus_may_be_off() -> None:
    assert generate(FakeModel(), IDS, max_new_tokens=1, synced_gpus=False).shape == (2, 4)


def test_a_model_is_given_and_not_its_name() -> None:
    with pytest.raises(UnspoolError, match=r"'llama' names a model, .* lm = unspool\.load\('llama'\)"):
        generate("llama", IDS)


@pytest.mark.parametrize("model", [object(), None])
def test_what_is_no_model(model: Any) -> None:
    with pytest.raises(UnspoolError, match=r"load one with unspool\.load"):
        generate(model, IDS)


def test_a_config_must_be_a_config() -> None:
    with pytest.raises(SettingError, match="must be a GenerationConfig, not a dict"):
        generate(FakeModel(), IDS, generation_config={"max_length": 5})


@pytest.mark.parametrize(
    ("mask", "kept"),
    [
        ([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]], [[3, 5, 7], [2, 4, 6, 8, 9]]),  # on the right
        ([[0, 1, 0, 1, 0], [1, 0, 0, 0, 1]], [[5, 8], [2, 9]]),  # with holes
    ],
)
@pytest.mark.parametrize("told", [{}, {"num_beams": 2}, {"prompt_lookup_num_tokens": 2}])
def test_a_masked_token_is_as_if_it_were_not_there(mask: Any, kept: Any, told: Any) -> None:
    model, ids = FakeModel(23), torch.tensor([[3, 5, 7, 8, 1], [2, 4, 6, 8, 9]])
    found = generate(model, ids, attention_mask=mask, max_new_tokens=4, eos_token_id=None, **told)
    assert torch.equal(found[:, :5], ids)
    for row, tokens in enumerate(kept):
        alone = generate(model, [tokens], max_new_tokens=4, eos_token_id=None, **told)
        assert found[row, 5:].tolist() == alone[0, len(tokens) :].tolist()


def test_pad_tokens_after_a_prompt_are_padding() -> None:
    model = FakeModel(23)
    found = generate(model, [[5, 6, 0, 0]], pad_token_id=0, max_new_tokens=3, eos_token_id=None)
    alone = generate(model, [[5, 6]], max_new_tokens=3, eos_token_id=None)
    assert found.tolist() == [[5, 6, 0, 0, *alone[0, 2:].tolist()]]


@pytest.mark.parametrize("width", [3, 30])
def test_without_a_length_twenty_tokens_are_written(width: int) -> None:
    ids = torch.randint(1, 20, (2, width), generator=torch.Generator().manual_seed(0))
    assert generate(FakeModel(23), ids, eos_token_id=None).shape == (2, width + 20)


def test_ids_are_sent_to_a_device_when_they_are_read() -> None:
    ids = torch.tensor([[1, 2, 3]])
    prompts = Prompts(ids, [3], on_host=ids, device=torch.device("meta"))
    assert (prompts.num_rows, prompts.width) == (1, 3) and vars(prompts)["_ids"] is ids
    moved = prompts.ids
    assert moved.device.type == "meta" and prompts.ids is moved and prompts.on_host is ids
    assert replace(prompts, lengths=[2]).ids is moved


def test_pad_tokens_beside_embeddings_are_padding() -> None:
    model = load_model("llama").model
    ids = torch.tensor([[0, 0, 5, 6], [7, 8, 9, 10]])
    embeds = model.get_input_embeddings()(ids)
    told: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 2, "max_new_tokens": 4}
    found = generate(model, input_ids=ids, inputs_embeds=embeds, **told)
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    assert torch.equal(found, generate(model, input_ids=ids, attention_mask=mask, **told))
    assert torch.equal(found, generate(model, input_ids=ids, **told))
    told["eos_token_id"] = 0  # which also ends a text, so that it marks nothing
    found = generate(model, input_ids=ids, inputs_embeds=embeds, **told)
    assert torch.equal(found, generate(model, input_ids=ids, **told))

"""The short way: prompts of every kind in, and errors before any work is done."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.api.dictation import CHAT, TEXTS
from tests.fakes import pad_left

import unspool
from unspool import LanguageModel
from unspool.errors import InputError, SettingError, UnspoolError, UnsupportedError

# --- prompts ------------------------------------------------------------------------------------------------


def new_tokens(lm: LanguageModel, ids: list[int], num_new: int = 6) -> list[int]:
    """What the model writes after ids, by the other front door."""
    found = unspool.generate(lm.model, torch.tensor([ids]), max_new_tokens=num_new)
    return found[0, len(ids) :].tolist()


def test_a_text(lm: LanguageModel) -> None:
    result = lm.generate(TEXTS[0], max_new_tokens=6)
    ids = lm.tokenizer.encode(TEXTS[0])
    assert result.prompt_token_ids == [ids]
    assert result.token_ids == [new_tokens(lm, ids)]
    assert result.texts == [lm.tokenizer.decode(result.token_ids[0], skip_special_tokens=True)]
    assert result.text == str(result) == result.texts[0]
    assert result.finish_reasons == ["eos" if result.token_ids[0][-1] == 2 else "length"]
    assert (result.stats.prompt_tokens, result.stats.new_tokens) == (len(ids), len(result.token_ids[0]))
    assert result.logprobs is None and result.output is None


def test_texts_in_a_batch_are_texts_alone(lm: LanguageModel) -> None:
    for settings in ({}, {"do_sample": True, "seed": [4, 5, 6], "temperature": [0.7, 1.3, 1.0]}):
        batch = lm.generate(TEXTS, max_new_tokens=6, **settings)
        for row, text in enumerate(TEXTS):
            own = {name: value[row] if isinstance(value, list) else value for name, value in settings.items()}
            alone = lm.generate(text, max_new_tokens=6, **own)
            assert (batch.texts[row], batch.token_ids[row]) == (alone.text, alone.token_ids[0])
            assert batch.prompt_token_ids[row] == alone.prompt_token_ids[0]


def test_chats(lm: LanguageModel) -> None:
    ids = lm.tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert lm.tokenizer.decode(ids) == "user: hello\nassistant:"
    one = lm.generate(CHAT, max_new_tokens=4)
    assert one.prompt_token_ids == [ids] and one.token_ids == [new_tokens(lm, ids, 4)]
    assert lm.generate("hello", chat=True, max_new_tokens=4).prompt_token_ids == [ids]
    longer = [*CHAT, {"role": "assistant", "content": "a"}, {"role": "user", "content": "the cat"}]
    several = lm.generate([longer, CHAT], max_new_tokens=4)
    longer_ids = lm.tokenizer.apply_chat_template(longer, add_generation_prompt=True).input_ids
    assert several.prompt_token_ids == [longer_ids, ids]
    assert several.token_ids[1] == one.token_ids[0]
    assert lm.generate(["hello", "a"], chat=True, max_new_tokens=4).prompt_token_ids[0] == ids
    with_tools = lm.generate(CHAT, tools=[{"type": "function", "function": {"name": "f"}}], max_new_tokens=1)
    assert lm.tokenizer.decode(with_tools.prompt_token_ids[0]) == "user: hello\n1 tools\nassistant:"


def test_ids_of_every_form(lm: LanguageModel) -> None:
    rows = [lm.tokenizer.encode(text) for text in TEXTS]
    expected = [new_tokens(lm, ids) for ids in rows]
    padded = pad_left(rows)
    for prompt, extra in (
        (rows, {}),
        ([torch.tensor(row) for row in rows], {}),
        (tuple(map(tuple, rows)), {}),
        (padded["input_ids"], {"attention_mask": padded["attention_mask"]}),
        (padded["input_ids"], {}),  # the pad token tells
        (padded, {}),
        (None, padded),
        (lm.tokenizer(TEXTS), {}),
        (lm.tokenizer(TEXTS, padding=True), {}),
        (lm.tokenizer(TEXTS, padding=True, return_tensors="pt"), {}),
        ({**padded, "token_type_ids": torch.zeros_like(padded["input_ids"])}, {}),
        ([TEXTS[0], rows[1], TEXTS[2]], {}),
    ):
        result = lm.generate(prompt, max_new_tokens=6, **extra)
        assert result.token_ids == expected
        assert result.prompt_token_ids == rows


def test_one_row_of_ids_of_every_form(lm: LanguageModel) -> None:
    ids = lm.tokenizer.encode(TEXTS[2])
    for prompt in (
        ids,
        [ids],
        torch.tensor(ids),
        torch.tensor([ids]),
        lm.tokenizer(TEXTS[2]),
        lm.tokenizer(TEXTS[2], return_tensors="pt"),
    ):
        result = lm.generate(prompt, max_new_tokens=6)
        assert (result.token_ids, result.prompt_token_ids) == ([new_tokens(lm, ids)], [ids])


def test_encode_gives_the_rows(lm: LanguageModel) -> None:
    rows = [lm.tokenizer.encode(text) for text in TEXTS]
    assert lm.encode(TEXTS) == rows
    assert lm.encode(rows[0]) == lm.encode([rows[0]]) == lm.encode(torch.tensor(rows[0])) == [rows[0]]
    assert lm.encode(CHAT) == lm.encode("hello", chat=True) == lm.encode([CHAT])


def test_embeddings_and_no_prompt(lm: LanguageModel) -> None:
    ids = lm.tokenizer.encode(TEXTS[0])
    embeds = lm.model.get_input_embeddings()(torch.tensor([ids]))
    result = lm.generate(inputs_embeds=embeds, max_new_tokens=6)
    assert (result.token_ids, result.prompt_token_ids) == ([new_tokens(lm, ids)], [[]])
    assert lm.generate(max_new_tokens=6).token_ids == [new_tokens(lm, [1])]  # from the start token


@pytest.mark.parametrize(
    ("prompt", "settings", "error", "told"),
    [
        ("", {}, InputError, "the prompt is empty"),
        (["a", ""], {}, InputError, "the prompt is empty"),
        ([], {}, InputError, "an empty list"),
        ([[]], {}, InputError, "an empty list"),
        ([[], [1]], {}, InputError, "an empty list"),
        (5, {}, InputError, "not a int"),
        (2.5, {}, InputError, "not a float"),
        (b"hello", {}, InputError, "not a bytes"),
        ({"a", "b"}, {}, InputError, "not a set"),
        ([1, "a"], {}, InputError, "not a list of int, str"),
        ([True, False], {}, InputError, "not a list of bool"),
        ([[1.5, 2.5]], {}, InputError, "not a list of float"),
        ([[["a"]]], {}, InputError, "not a list of list"),
        ([[[1, 2], [3, 4]]], {}, InputError, "not a list of list"),
        ([["a", "b"], "c"], {}, InputError, "not a list of str"),
        ([None], {}, InputError, "not a NoneType"),
        ({}, {}, InputError, "what a tokenizer returns"),
        ({"role": "user", "content": "hello"}, {}, InputError, "a chat is a list of messages"),
        ({"input_ids": [[1, 2]], "pixel_values": 1}, {}, UnsupportedError, "reads text alone"),
        ({"input_ids": [1.5]}, {}, InputError, "whole numbers"),
        ([[1, 2**70]], {}, InputError, "can't be a token id"),
        ([1, 160], {}, InputError, "the id 160, outside the model's vocabulary of 160"),
        ([[5], [-1]], {}, InputError, "the id -1"),
        (torch.tensor([[1.0, 2.0]]), {}, InputError, "whole numbers"),
        (torch.zeros(1, 2, 3, dtype=torch.long), {}, InputError, "not a list of list"),
        (torch.tensor(5), {}, InputError, "not a int"),
        ("a", {"attention_mask": [[1]]}, SettingError, "`attention_mask` and a prompt were given"),
        ("a", {"input_ids": [[1]]}, SettingError, "`input_ids` and a prompt were given"),
        ([1, 2], {"chat": True}, SettingError, "past it; give messages"),
        ({"input_ids": [1, 2]}, {"chat": True}, SettingError, "past it; give messages"),
        (None, {"input_ids": [[1, 2]], "tools": []}, SettingError, "past it; give messages"),
        ("a", {"tools": []}, SettingError, "tools go with a chat"),
        ("a", {"temperatur": 1}, SettingError, "did you mean 'temperature'"),
        ("a", {"top_k": 3, "do_sample": False}, SettingError, "only read when sampling"),
        ([{"role": "user"}], {}, UnspoolError, "content"),
        ("\ud800", {}, InputError, "not valid Unicode"),
    ],
)
def test_mistakes_are_told_before_any_work(
    lm: LanguageModel, passes: list[int], prompt: Any, settings: dict[str, Any], error: type, told: str
) -> None:
    with pytest.raises(error, match=told):
        lm.generate(prompt, **settings)
    with pytest.raises(error, match=told):
        lm.stream(prompt, **settings)  # at the call, not at the first piece
    assert passes == []


def test_deep_nesting_is_no_way_in(lm: LanguageModel) -> None:
    nested: Any = [1]
    for _ in range(5000):
        nested = [nested]
    with pytest.raises(InputError):
        lm.generate(nested)

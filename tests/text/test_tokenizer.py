"""The tokenizer's surface, against the one of transformers that it follows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tokenizers
import torch

from unspool.errors import InputError, SettingError, UnsupportedError
from unspool.text import Encoding, Tokenizer
from unspool.text.offsets import find_offsets

TEXTS = ["Hello, world!", "A longer text with 12 digits and 日本語.", "x"]


@pytest.fixture(scope="module")
def reference(smollm2: Tokenizer) -> Any:
    import transformers

    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=smollm2.backend_tokenizer,
        **smollm2.special_tokens_map,
        chat_template=smollm2.chat_template,
        padding_side="left",
    )


def test_lists(smollm2: Tokenizer, reference: Any) -> None:
    one, several = smollm2(TEXTS[0]), smollm2(TEXTS)
    assert isinstance(one, Encoding)
    assert one["input_ids"] == one.input_ids == reference(TEXTS[0])["input_ids"] == smollm2.encode(TEXTS[0])
    assert one.attention_mask == [1] * len(one.input_ids)
    assert several.input_ids == reference(TEXTS)["input_ids"]
    assert smollm2([]).input_ids == []


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_tensors(smollm2: Tokenizer, reference: Any, side: Any) -> None:
    ours = smollm2(TEXTS, return_tensors="pt", padding=True, padding_side=side)
    theirs = reference(TEXTS, return_tensors="pt", padding=True, padding_side=side)
    assert torch.equal(ours.input_ids, theirs["input_ids"])
    assert torch.equal(ours.attention_mask, theirs["attention_mask"])
    assert ours.to("cpu") is ours
    assert smollm2(TEXTS[0], return_tensors="pt").input_ids.shape[0] == 1


def test_padding_is_on_the_left(smollm2: Tokenizer) -> None:
    encoding = smollm2(["x", "x y z"], padding=True)
    assert encoding.attention_mask == [[0, 0, 1], [1, 1, 1]]
    assert encoding.input_ids[0][:2] == [smollm2.pad_token_id] * 2


def test_encoding_names_what_it_has() -> None:
    with pytest.raises(AttributeError, match="input_ids"):
        _ = Encoding(input_ids=[1]).token_type_ids


def test_decoding(smollm2: Tokenizer, reference: Any) -> None:
    text = "<|im_start|>Hi there<|im_end|>"
    ids = smollm2.encode(text)
    for given in (ids, torch.tensor(ids), torch.tensor(ids).numpy()):
        assert smollm2.decode(given) == reference.decode(given) == text
        assert smollm2.decode(given, skip_special_tokens=True) == "Hi there"
    assert smollm2.decode(ids[1]) == reference.decode(ids[1])
    assert smollm2.decode([]) == ""
    assert smollm2.decode([10**6]) == ""
    rows = smollm2(TEXTS, return_tensors="pt", padding=True).input_ids
    assert smollm2.batch_decode(rows, skip_special_tokens=True) == TEXTS
    assert smollm2.batch_decode(smollm2(TEXTS).input_ids) == TEXTS


def test_cleaning_up_spaces(smollm2: Tokenizer) -> None:
    ids = smollm2.encode("Hi , it 's me . Do n't !")
    assert smollm2.decode(ids) == "Hi , it 's me . Do n't !"
    assert smollm2.decode(ids, clean_up_tokenization_spaces=True) == "Hi, it's me. Don't!"
    assert smollm2.decode(ids, clean_up_tokenization_spaces=False) == smollm2.decode(ids)
    with pytest.raises(SettingError, match="spaces_between"):
        smollm2.decode(ids, spaces_between_special_tokens=False)


def test_tokens(smollm2: Tokenizer, reference: Any) -> None:
    ids = smollm2.encode("Hello wörld<|im_end|>")
    tokens = smollm2.convert_ids_to_tokens(ids)
    assert tokens == reference.convert_ids_to_tokens(ids)
    assert smollm2.convert_ids_to_tokens(ids, skip_special_tokens=True) == tokens[:-1]
    assert smollm2.convert_ids_to_tokens(ids[0]) == "Hello"
    assert smollm2.convert_tokens_to_ids(tokens) == ids
    assert smollm2.convert_tokens_to_ids("Hello") == ids[0]
    assert smollm2.convert_tokens_to_ids("nosuchtoken") == smollm2.unk_token_id == reference.unk_token_id
    assert smollm2.convert_tokens_to_string(tokens) == reference.convert_tokens_to_string(tokens)
    assert smollm2.get_vocab() == reference.get_vocab()
    assert (smollm2.vocab_size, len(smollm2)) == (reference.vocab_size, len(reference))


def test_special_tokens(smollm2: Tokenizer, sentencepiece: Tokenizer) -> None:
    assert (smollm2.bos_token, smollm2.bos_token_id) == ("<|im_start|>", 1)
    assert (smollm2.unk_token, smollm2.unk_token_id) == ("<|endoftext|>", 0)
    assert sorted(smollm2.all_special_ids) == list(range(17))
    fresh = Tokenizer(sentencepiece.backend_tokenizer, special_tokens={"eos_token": "</s>"})
    assert fresh.pad_token is None
    assert fresh.pad_token_id is None
    with pytest.raises(SettingError, match="pad_token = "):
        fresh(["a", "b"], padding=True)
    fresh.pad_token = fresh.eos_token
    assert fresh.pad_token_id == 2
    fresh.pad_token_id = 1
    assert fresh.pad_token == "<s>"
    fresh.pad_token = None
    assert fresh.pad_token_id is None
    with pytest.raises(SettingError, match="not in the vocabulary"):
        fresh.pad_token = "<nosuch>"
    with pytest.raises(SettingError, match="not an id"):
        fresh.pad_token_id = 10**6
    with pytest.raises(SettingError, match="no special token"):
        Tokenizer(sentencepiece.backend_tokenizer, special_tokens={"end_token": "</s>"})


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda t: t(["a", "b c d"], return_tensors="pt"), InputError, "padding=True"),
        (lambda t: t([], return_tensors="pt"), InputError, "there are none"),
        (lambda t: t("a", return_tensors="tf"), SettingError, "'pt'"),
        (lambda t: t("a", padding="max_length"), SettingError, "padding"),
        (lambda t: t("a", padding_side="top"), SettingError, "'left'"),
        (lambda t: t([3]), InputError, "string"),
        (lambda t: t.encode(b"a"), InputError, "string"),
        (lambda t: t.encode("\ud800"), InputError, "Unicode"),
        (lambda t: t.decode([-1]), InputError, "not a token id"),
        (lambda t: t.decode([2**40]), InputError, "not a token id"),
        (lambda t: t.decode([[1], [2]]), InputError, "batch_decode"),
        (lambda t: t.decode([1.5]), InputError, "whole number"),
    ],
)
def test_bad_calls(smollm2: Tokenizer, call: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        call(smollm2)


def test_too_much_text(smollm2: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unspool.text.text_encoder.MAX_TEXT_CHARACTERS", 10)
    assert smollm2(["12345", "67890"]).input_ids
    with pytest.raises(InputError, match="at most 10"):
        smollm2(["12345", "678901"])


def test_chat_in_every_form(smollm2: Tokenizer) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    text = smollm2.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    ids = smollm2.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ids == smollm2.encode(text)
    tensor = smollm2.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    assert tensor.tolist() == [ids]
    both = smollm2.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")
    assert both.input_ids.tolist() == [ids] and both.attention_mask.tolist() == [[1] * len(ids)]
    own = smollm2.apply_chat_template(
        messages, tokenize=False, chat_template="{{ messages[0].content }}{{ eos_token }}"
    )
    assert own == "Hi<|im_end|>"
    with pytest.raises(SettingError, match="tokenize=True"):
        smollm2.apply_chat_template(messages, tokenize=False, return_tensors="pt")
    whole = smollm2.apply_chat_template(messages)
    assert smollm2.apply_chat_template(messages, max_length=3).input_ids == whole.input_ids[:3]
    several = smollm2.apply_chat_template([messages, [*messages, *messages]], padding=True, return_tensors="pt")
    longer = smollm2.apply_chat_template([*messages, *messages]).input_ids
    assert several.input_ids.shape[0] == 2 and several.input_ids[1].tolist() == longer
    with pytest.raises(InputError, match="list of messages"):
        smollm2.apply_chat_template("Hi")
    with pytest.raises(SettingError, match="use one"):
        smollm2.apply_chat_template(messages, continue_final_message=True, add_generation_prompt=True)
    with pytest.raises(InputError, match="can't be continued"):
        smollm2.apply_chat_template([{"role": "user", "content": " "}], continue_final_message=True)


def test_named_and_missing_templates(sentencepiece: Tokenizer) -> None:
    messages = [{"role": "user", "content": "the"}]
    with pytest.raises(SettingError, match="base model"):
        sentencepiece.apply_chat_template(messages)
    named = Tokenizer(
        sentencepiece.backend_tokenizer, chat_template={"default": "D", "tool_use": "T{{ tools | length }}", "rag": "R"}
    )
    assert named.apply_chat_template(messages, tokenize=False) == "D"
    assert named.apply_chat_template(messages, tokenize=False, tools=[{"name": "f"}]) == "T1"
    assert named.apply_chat_template(messages, tokenize=False, chat_template="rag") == "R"


CALLS: list[dict[str, Any]] = [
    {"padding": "longest"},
    {"padding": "max_length", "max_length": 12},
    {"padding": "max_length", "max_length": 4, "truncation": True},
    {"max_length": 2},
    {"truncation": True, "max_length": 3, "padding": True, "padding_side": "right"},
    {"truncation": "longest_first", "max_length": 3},
    {"truncation": False, "max_length": 3},
    {"padding": True, "pad_to_multiple_of": 8},
    {"padding": "do_not_pad", "return_attention_mask": False},
]


@pytest.mark.parametrize("options", CALLS, ids=str)
@pytest.mark.parametrize("side", ["left", "right"])
def test_calls_are_answered_as_transformers_does(
    smollm2: Tokenizer, reference: Any, options: dict[str, Any], side: str
) -> None:
    for tokenizer in (smollm2, reference):
        tokenizer.truncation_side = side
    try:
        ours, theirs = smollm2(TEXTS, **options), reference(TEXTS, **options)
    finally:
        smollm2.truncation_side = "right"
    assert ours == {name: theirs[name] for name in theirs}


def test_cutting_keeps_special_tokens(sentencepiece: Tokenizer) -> None:
    fresh = Tokenizer(
        tokenizers.Tokenizer.from_str(sentencepiece.backend_tokenizer.to_str()), special_tokens={"pad_token": "<unk>"}
    )
    fresh.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    whole = fresh.encode("the cat sat on the mat")
    assert whole[0] == 1 and whole[-1] == 2
    assert fresh("the cat sat on the mat", max_length=5).input_ids == [*whole[:4], 2]
    fresh.truncation_side = "left"
    assert fresh("the cat sat on the mat", max_length=5).input_ids == [1, *whole[-4:]]
    assert min(fresh.model_max_length, 512) == 512  # as scripts for transformers ask
    fresh.model_max_length = 4
    assert len(fresh("the cat sat on the mat", truncation=True).input_ids) == 4
    assert fresh("the", padding="max_length").attention_mask.count(1) == len(fresh.encode("the"))
    with pytest.raises(InputError, match="no room"):
        fresh("the cat sat", max_length=1)


def test_other_forms(smollm2: Tokenizer) -> None:
    array = smollm2(TEXTS, padding=True, return_tensors="np", return_length=True)
    assert array.input_ids.dtype == np.int64 and set(array.length) == {array.input_ids.shape[1]}
    pair = smollm2("one", text_target="two")
    assert pair.labels == smollm2.encode("two") and smollm2(text_target="two").input_ids == pair.labels
    assert smollm2.encode("one two", return_tensors="pt").tolist() == [smollm2.encode("one two")]
    rows = [smollm2("one"), smollm2("one two three")]
    assert smollm2.pad(rows).input_ids == smollm2(["one", "one two three"], padding=True).input_ids
    assert smollm2.tokenize("one two") == ["one", "Ġtwo"]
    assert smollm2.add_special_tokens({"pad_token": smollm2.eos_token}) == 0


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"return_offsets_mapping": True}, "offsets"),
        ({"text_pair": "b"}, "one by one"),
        ({"stride": 3}, "pieces"),
        ({"nosuch": 1}, "does not know 'nosuch'"),
        ({"max_length": 0}, "number of tokens"),
        ({"truncation": "middle"}, "truncation"),
        ({"pad_to_multiple_of": True, "padding": True}, "number of tokens"),
    ],
)
def test_options_that_are_not_built_are_refused(smollm2: Tokenizer, options: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        smollm2("a", **options)
    assert smollm2("a", stride=0, return_overflowing_tokens=False, verbose=True) == smollm2("a")


def test_segments_between_timestamps_have_times() -> None:
    def decode(ids: list[int]) -> str:
        return " ".join(map(str, ids))

    first = 100
    spoken = [first, 1, 2, first + 50, first + 60, 3, first + 100]
    assert find_offsets(spoken, first, decode) == [
        {"text": "1 2", "timestamp": (0.0, 1.0)},
        {"text": "3", "timestamp": pytest.approx((1.2, 2.0))},
    ]
    later = [*spoken, first + 10, 4, first + 20]  # an earlier time: the next window, after 30 seconds
    assert find_offsets(later, first, decode)[-1] == {"text": "4", "timestamp": pytest.approx((30.2, 30.4))}
    paired = [first, 1, first + 50, first + 50, first + 10, 4, first + 20]  # or after what the last pair says
    assert find_offsets(paired, first, decode)[-1] == {"text": "4", "timestamp": pytest.approx((1.2, 1.4))}
    cut = [first, 1, first + 50, 2, first + 10, 3, first + 20]  # the window ended amid a text
    assert [one["text"] for one in find_offsets(cut, first, decode)] == ["1 2 3"]
    assert find_offsets([1, 2], first, decode) == find_offsets([first, 1], first, decode) == []


def test_what_only_whispers_tokenizer_can_do(smollm2: Tokenizer) -> None:
    with pytest.raises(UnsupportedError, match=r"no token <\|startofprev\|>"):
        smollm2.get_prompt_ids("hello")
    with pytest.raises(UnsupportedError, match="output_offsets is for Whisper"):
        smollm2.decode([1, 2], output_offsets=True)

"""Trained encoder-decoders that read text: what they write, and that their beams are transformers' own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import unspool
from unspool.errors import SettingError

CHINESE = (
    "他在北京的一家大公司工作了十年，去年才回到家乡。",
    "你能帮我一个忙吗？",
)
ENGLISH = (
    "It's a nice day. Let's go for a walk in the park.",
    "He worked for 10 years in a large company in Beijing and returned home last year.",
)
TITLES = (
    "Write a title: add retry logic to the download client and log every failure with its reason",
    "Translate to German: The house is wonderful.",
)
WORDS = {
    "lighthouse": "lˈIthˌWs",
    "Philadelphia": "fˌɪlədˈɛlfiə",
    "transformer": "tɹænsfˈɔɹməɹ",
    "don't": "dˈɑnt",
    "xylophone": "zˈIləfˌOn",
}
BEAMS = {"num_beams": 4, "num_return_sequences": 3, "return_dict_in_generate": True, "output_scores": True}


def load_theirs(kind: Any, folder: Path) -> Any:
    return kind.from_pretrained(folder, dtype=torch.float32).eval()


def pad_right(lm: unspool.LanguageModel, texts: tuple[str, ...]) -> dict[str, torch.Tensor]:
    rows = [lm.tokenizer.encode(text) for text in texts]
    longest, pad = max(map(len, rows)), lm.model.info.pad_token_id
    ids = torch.tensor([[*row, *[pad] * (longest - len(row))] for row in rows])
    return {
        "input_ids": ids,
        "attention_mask": torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows]),
    }


def assert_same_beams(lm: unspool.LanguageModel, theirs: Any, texts: tuple[str, ...], **settings: Any) -> None:
    """Tokens and scores are those of transformers' own generate."""
    inputs = pad_right(lm, texts)
    expected = theirs.generate(**inputs, **BEAMS, **settings)
    found = unspool.generate(lm.model, **inputs, **BEAMS, **settings)
    assert found.sequences.tolist() == expected.sequences.tolist()
    torch.testing.assert_close(found.sequences_scores, expected.sequences_scores, atol=1e-3, rtol=1e-3)
    assert len({tuple(row) for row in expected.sequences.tolist()}) == len(texts) * BEAMS["num_return_sequences"]


@pytest.fixture(scope="module")
def marian(marian_folder: Path) -> unspool.LanguageModel:
    return unspool.load(str(marian_folder))


@pytest.fixture(scope="module")
def t5(t5_folder: Path) -> unspool.LanguageModel:
    return unspool.load(str(t5_folder))


@pytest.fixture(scope="module")
def bart(bart_folder: Path) -> unspool.LanguageModel:
    return unspool.load(str(bart_folder))


def test_a_translation_reads_as_it_should(marian: unspool.LanguageModel) -> None:
    assert marian.generate(["今天天气很好，我们去公园散步吧。", CHINESE[0]]).texts == list(ENGLISH)


def test_beams_of_a_translation_are_the_references(marian: unspool.LanguageModel, marian_folder: Path) -> None:
    assert_same_beams(marian, load_theirs(transformers.MarianMTModel, marian_folder), CHINESE, max_new_tokens=25)


def test_a_quantised_translation_says_the_same(marian_folder: Path) -> None:
    lm = unspool.load(str(marian_folder), quantize="int8")
    assert lm.generate("今天天气很好，我们去公园散步吧。").text.startswith("It's a")


def test_titles_and_translations_of_one_t5(t5: unspool.LanguageModel) -> None:
    made = t5.generate(list(TITLES), max_new_tokens=20).texts
    assert made == ["Add retry logic to download client", "Das Haus ist wunderbar."]


def test_beams_of_a_t5_are_the_references(t5: unspool.LanguageModel, t5_folder: Path) -> None:
    assert_same_beams(t5, load_theirs(transformers.T5ForConditionalGeneration, t5_folder), TITLES, max_new_tokens=20)


def test_words_are_spelt_as_they_sound(bart: unspool.LanguageModel) -> None:
    assert bart.generate(list(WORDS)).texts == list(WORDS.values())


def test_beams_of_words_are_the_references(bart: unspool.LanguageModel, bart_folder: Path) -> None:
    theirs = load_theirs(transformers.BartForConditionalGeneration, bart_folder)
    assert_same_beams(bart, theirs, tuple(WORDS), max_new_tokens=30)
    assert_same_beams(bart, theirs, tuple(WORDS), max_new_tokens=30, length_penalty=0.3, early_stopping=True)


SAME: dict[str, dict[str, Any]] = {
    "prompt lookup": {"prompt_lookup_num_tokens": 4, "max_matching_ngram_size": 1},
    "a fixed cache": {"cache_implementation": "static"},
}


@pytest.mark.parametrize("way", SAME)
def test_ways_that_must_not_change_what_is_written(bart: unspool.LanguageModel, way: str) -> None:
    expected = bart.generate(list(WORDS)).texts
    assert bart.generate(list(WORDS), **SAME[way]).texts == expected


@pytest.mark.parametrize("beams", [1, 3])
def test_texts_keep_a_grammar(
    marian: unspool.LanguageModel, t5: unspool.LanguageModel, bart: unspool.LanguageModel, beams: int
) -> None:
    houses = ["Das Haus ist alt.", "Das Haus ist wunderbar.", "The house is wonderful."]
    assert t5.generate(TITLES[1], choice=houses, num_beams=beams).text == houses[1]
    assert marian.generate(CHINESE[1], regex="[A-Za-z ]+\\?", num_beams=beams).text == "Can you do me a favor?"
    assert bart.generate("xylophone", choice=["zˈIləfˌOn", "zˈIləfˌOnz"], num_beams=beams).text == "zˈIləfˌOn"
    with pytest.raises(SettingError, match=r"no tokens for: none for '\{'"):
        t5.generate(TITLES[1], json_object=True)


def test_several_pronunciations_by_sampling_and_groups(bart: unspool.LanguageModel) -> None:
    drawn = {bart.generate("xylophone", do_sample=True, seed=seed).text for seed in range(8)}
    assert WORDS["xylophone"] in drawn and len(drawn) > 1
    groups = bart.generate("xylophone", num_beams=4, num_beam_groups=2, diversity_penalty=1.5, num_return_sequences=4)
    assert len(set(groups.texts)) == 4

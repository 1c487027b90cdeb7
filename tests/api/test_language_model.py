"""The short way: text out, with its settings, stop strings, guidance, and without a tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.api.dictation import CHAT, CONTEXT, TEXTS, Dictate, dictate
from tests.conformance.cases import GOLDENS

import unspool
from unspool import GenerationConfig, LanguageModel, Piece
from unspool.api.language_model import read_quantize
from unspool.errors import InputError, SettingError, UnspoolError

# --- settings of the short way ------------------------------------------------------------------------------


def test_friendly_defaults_end_at_the_context(lm: LanguageModel) -> None:
    result = lm.generate("a", eos_token_id=None)
    assert len(result.token_ids[0]) == CONTEXT - 1
    lm.generation_config = GenerationConfig(max_length=20, eos_token_id=None)  # as many files say
    assert len(lm.generate("a").token_ids[0]) == CONTEXT - 1
    assert lm.model.generation_config is lm.generation_config
    lm.generation_config.max_new_tokens = 3
    assert len(lm.generate("a").token_ids[0]) == 3
    assert len(lm.generate("a", max_length=9).token_ids[0]) == 8
    config = GenerationConfig(max_new_tokens=4)
    assert len(lm.generate("a", generation_config=config).token_ids[0]) == 4


def test_several_sequences_and_seeds(lm: LanguageModel) -> None:
    settings = {"do_sample": True, "num_return_sequences": 3, "seed": 1, "max_new_tokens": 8, "temperature": 2.0}
    result = lm.generate("hello", **settings)
    assert len(result.texts) == len(result.token_ids) == len(result.finish_reasons) == 3
    assert len(set(map(tuple, result.token_ids))) == 3
    assert result.token_ids == lm.generate("hello", **settings).token_ids


def test_what_else_can_come_back(lm: LanguageModel) -> None:
    settings = {"return_dict_in_generate": True, "output_scores": True, "logprobs": 2, "prompt_logprobs": 0}
    result = lm.generate(TEXTS, max_new_tokens=3, eos_token_id=None, **settings)
    assert len(result.output.scores) == 3 and result.output.scores[0].shape == (3, 160)
    assert result.output.sequences[0, -3:].tolist() == result.token_ids[0]
    for row in range(3):
        assert [told.token_id for told in result.logprobs[row]] == result.token_ids[row]
        assert [len(told.top) for told in result.logprobs[row]] == [2, 2, 2]
        ids = result.prompt_token_ids[row]
        assert [told and told.token_id for told in result.prompt_logprobs[row]] == [None, *ids[1:]]
        scores = result.output.scores[1][row]
        expected = torch.log_softmax(scores, -1)[result.token_ids[row][1]]
        assert result.logprobs[row][1].logprob == pytest.approx(float(expected), abs=1e-4)


def test_it_shows_what_it_is(lm: LanguageModel, folder: Path) -> None:
    assert repr(lm) == f"LanguageModel({str(folder)!r}, llama, float32, cpu)"
    assert lm.device == torch.device("cpu") and lm.source == folder


def test_the_other_front_door_takes_it_too(lm: LanguageModel) -> None:
    ids = torch.tensor([lm.tokenizer.encode("hello")])
    found = unspool.generate(lm, ids, **dictate(lm, " the cat stop and a"), stop_strings="stop")
    assert lm.tokenizer.decode(found[0]) == "hello the cat stop"


# --- stop strings -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "stops", "trimmed", "kept"),
    [
        (" the cat stop and a", "stop", " the cat ", " the cat stop"),
        (" the cat stop and a", ["zzz", "t s"], " the ca", " the cat s"),
        (" the cat stop and a", ["at", "cat"], " the ", " the cat"),
        (" the cat stops", "stops", " the cat ", " the cat stops"),
        ("a\n\nb", "\n\n", "a", "a\n\n"),
        ("é€日", "€", "é", "é€"),
        (" the ca", "cat", " the ca", " the ca"),  # never completed: what was held back comes at the end
    ],
)
@pytest.mark.parametrize("is_streamed", [False, True])
def test_stop_strings_end_the_text_and_stay_in_the_tokens(
    lm: LanguageModel, written: str, stops: Any, trimmed: str, kept: str, is_streamed: bool
) -> None:
    for keep, expected in ((False, trimmed), (True, kept)):
        settings = dictate(lm, written, stop_strings=stops, keep_stop_strings=keep)
        if is_streamed:
            pieces = list(lm.stream("hello", **settings))
            text, ids = "".join(pieces), [token for piece in pieces for token in piece.token_ids]
            reason = pieces[-1].finish_reason
        else:
            result = lm.generate("hello", **settings)
            text, ids, reason = result.text, result.token_ids[0], result.finish_reasons[0]
        assert text == expected
        whole = lm.tokenizer.decode(ids, skip_special_tokens=True)
        if reason == "stop_string":
            assert whole.startswith(kept) and len(ids) <= len(lm.tokenizer.encode(written))
        else:
            assert reason == "eos" and whole == written


def test_stop_strings_end_each_row_on_its_own(lm: LanguageModel) -> None:
    texts = {"hello": " the stop a a a", "a": "ing", "stop": " and the cat stop"}
    known = {
        lm.encode(prompt)[0][-1]: Dictate(lm.tokenizer.encode(text), prompt_width=1) for prompt, text in texts.items()
    }

    def dictate_by_prompt(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return known[int(ids[0, 0])](ids, scores)  # each row is shown alone

    settings = {"logits_processor": [dictate_by_prompt], "stop_strings": "stop", "max_new_tokens": 20}
    result = lm.generate(list(texts), **settings)
    assert result.texts == [" the ", "ing", " and the cat "]
    assert result.finish_reasons == ["stop_string", "eos", "stop_string"]
    assert [lm.tokenizer.decode(ids) for ids in result.token_ids] == [" the stop", "ing</s>", " and the cat stop"]


# --- without a tokenizer ------------------------------------------------------------------------------------


def test_a_model_without_a_tokenizer_speaks_ids() -> None:
    lm = unspool.load(GOLDENS / "models" / "llama", device="cpu")
    assert lm.tokenizer is None
    result = lm.generate([5, 6, 7], max_new_tokens=4, eos_token_id=None)
    assert (result.texts, len(result.token_ids[0])) == ([""], 4)
    pieces = list(lm.stream([5, 6, 7], max_new_tokens=4, eos_token_id=None))
    assert [piece.token_ids for piece in pieces] == [[token] for token in result.token_ids[0]]  # each as it comes
    assert [piece.finish_reason for piece in pieces] == [None, None, None, "length"]
    for prompt in ("hello", CHAT):
        with pytest.raises(InputError, match="came without one; pass token ids"):
            lm.generate(prompt)
    with pytest.raises(SettingError, match="tokenizer"):
        lm.generate([5, 6], stop_strings="x")


def test_an_encoder_decoder_by_ids() -> None:
    lm = unspool.load(GOLDENS / "models" / "t5", device="cpu")
    rows = [[5, 6, 7], [8, 9, 10, 11, 12], [13]]
    result = lm.generate(rows, max_new_tokens=5)
    assert result.prompt_token_ids == rows
    for row, ids in enumerate(rows):
        assert lm.generate(ids, max_new_tokens=5).token_ids[0] == result.token_ids[row]
    assert result.stats.prompt_tokens == 9


def test_a_pad_token_that_is_none(lm: LanguageModel) -> None:
    """Some files say -1: rows are filled with something all the same."""
    expected = lm.generate(TEXTS, max_new_tokens=4).token_ids
    lm.generation_config.pad_token_id = -1
    assert lm.generate(TEXTS, max_new_tokens=4).token_ids == expected


def test_pieces_are_strings() -> None:
    piece = Piece("abc", 2, [1, 2], "eos")
    assert piece == "abc" and piece.upper() == "ABC"
    assert (piece.row, piece.token_ids, piece.finish_reason, piece.logprobs) == (2, [1, 2], "eos", [])


# --- guidance and DoLa --------------------------------------------------------------------------------------


def test_a_negative_prompt_of_any_kind(lm: LanguageModel, passes: list[int]) -> None:
    settings = {"guidance_scale": 2.0, "max_new_tokens": 6}
    ids = lm.encode("a stop")
    expected = lm.generate(TEXTS, negative_prompt="a stop", **settings).token_ids
    assert passes[0] == 2 * len(TEXTS) >= max(passes)
    assert expected != lm.generate(TEXTS, max_new_tokens=6).token_ids
    for negative in (["a stop"] * 3, ids[0], ids * 3, torch.tensor(ids)):
        assert lm.generate(TEXTS, negative_prompt=negative, **settings).token_ids == expected
    assert lm.generate(TEXTS, negative_prompt_ids=ids, **settings).token_ids == expected
    mixed = lm.generate(TEXTS, negative_prompt=["a", "hello the cat and", "stop"], **settings).token_ids
    for row, (text, negative) in enumerate(zip(TEXTS, ["a", "hello the cat and", "stop"], strict=True)):
        assert lm.generate(text, negative_prompt=negative, **settings).token_ids == [mixed[row]]
        assert "".join(lm.stream(text, negative_prompt=negative, **settings)) == lm.tokenizer.decode(
            mixed[row], skip_special_tokens=True
        )
    chat = lm.generate(CHAT, negative_prompt=[{"role": "user", "content": "a"}], **settings).token_ids
    assert chat == lm.generate("hello", negative_prompt="a", chat=True, **settings).token_ids


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"negative_prompt": "a"}, "add guidance_scale"),
        ({"negative_prompt": "", "guidance_scale": 2.0}, "empty"),
        ({"negative_prompt": ["a", "b"], "guidance_scale": 2.0}, "2 rows for 3 prompts"),
        ({"negative_prompt": "a", "negative_prompt_ids": [[1]], "guidance_scale": 2.0}, "the same thing twice"),
        ({"negative_prompt": 3, "guidance_scale": 2.0}, "a prompt is text"),
    ],
)
def test_negative_prompts_that_can_not_be(
    lm: LanguageModel, passes: list[int], settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(UnspoolError, match=told):
        lm.generate(TEXTS, **settings)
    assert passes == []


def test_dola_chooses_a_layer_for_every_text(lm: LanguageModel) -> None:
    settings = {"dola_layers": [0, 1, 2, 3], "max_new_tokens": 8, "repetition_penalty": 1.2}
    together = lm.generate(TEXTS, **settings)
    for row, text in enumerate(TEXTS):
        alone = lm.generate(text, **settings)
        assert alone.token_ids == [together.token_ids[row]]
        assert alone.dola_layers == [together.dola_layers[row]]
        assert len(alone.dola_layers[0]) == len(alone.token_ids[0])
    assert len({layer for row in together.dola_layers for layer in row}) > 1
    assert lm.generate(TEXTS, max_new_tokens=2).dola_layers is None


def test_none_is_a_word_for_plain_numbers_too() -> None:
    assert read_quantize("none", False, False) is None
    assert read_quantize("auto", False, True) == "int4"


def test_a_config_of_transformers_counts_as_it_was_stated(lm: LanguageModel) -> None:
    theirs = pytest.importorskip("transformers").GenerationConfig
    lm.generation_config = GenerationConfig(num_beams=3, max_new_tokens=7, eos_token_id=None)
    greedy = lm.generate([5, 6, 7], num_beams=1, max_new_tokens=3)
    found = lm.generate([5, 6, 7], generation_config=theirs(num_beams=1, max_new_tokens=3))
    assert found.token_ids == greedy.token_ids
    assert len(lm.generate([5, 6, 7], generation_config=theirs(max_length=5)).token_ids[0]) == 2
    lm.generation_config = theirs(num_beams=1, max_new_tokens=3)  # as the model's own settings too
    assert lm.generate([5, 6, 7], max_new_tokens=3, eos_token_id=None).token_ids == greedy.token_ids
    lm.model.generation_config = theirs(num_beams=1, max_new_tokens=3)
    assert lm.generate([5, 6, 7], max_new_tokens=3, eos_token_id=None).token_ids == greedy.token_ids

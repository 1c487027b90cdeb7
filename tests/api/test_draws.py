"""Settings of sampling draw in the short way, and rows may differ in length and in whether they draw."""

from __future__ import annotations

from typing import Any

import pytest

import unspool
from unspool import GenerationConfig, LanguageModel
from unspool.errors import SettingError

COMMON: dict[str, Any] = {"max_new_tokens": 6, "eos_token_id": None}
PROMPTS = ["a", "hello you", "abc"]
HOT = {"temperature": 5.0}


@pytest.mark.parametrize(
    "settings", [{"temperature": 0.5}, {"temperature": 1.0}, {"top_p": 0.9}, {"top_k": 4}, {"min_p": 0.1}]
)
def test_a_setting_of_sampling_draws(lm: LanguageModel, settings: dict[str, Any]) -> None:
    expected = lm.generate(PROMPTS, **COMMON, **settings, seed=1, do_sample=True).token_ids
    assert lm.generate(PROMPTS, **COMMON, **settings, seed=1).token_ids == expected
    assert lm.generate(PROMPTS, **COMMON, **settings, seed=1, do_sample=None).token_ids == expected
    config = GenerationConfig(**COMMON, **settings)
    assert lm.generate(PROMPTS, generation_config=config, seed=1).token_ids == expected
    rows: list[list[int]] = [[] for _ in PROMPTS]
    for piece in lm.stream(PROMPTS, **COMMON, **settings, seed=1):
        rows[piece.row] += piece.token_ids
    assert rows == expected
    with unspool.Engine(lm) as engine:
        assert engine.submit(PROMPTS[0], **COMMON, **settings, seed=1).result().token_ids == expected[:1]


def test_beams_draw_too(lm: LanguageModel) -> None:
    settings = {**COMMON, "num_beams": 3, "temperature": 3.0, "seed": 1}
    assert lm.generate("a", **settings).token_ids == lm.generate("a", **settings, do_sample=True).token_ids


def test_what_does_not_draw_is_as_before(lm: LanguageModel) -> None:
    greedy = lm.generate("a", **COMMON).token_ids
    assert lm.generate("a", **COMMON, seed=3).token_ids == greedy
    assert lm.generate("a", **COMMON, top_p=1.0, top_k=50).token_ids == greedy
    lm.generation_config = GenerationConfig(temperature=5.0)  # a file's word is no request
    assert lm.generate("a", **COMMON).token_ids == greedy
    lm.generation_config = GenerationConfig(do_sample=False)
    assert lm.generate("a", **COMMON, **HOT, seed=1).token_ids != greedy
    contrastive = lm.generate("a", **COMMON, penalty_alpha=0.6, top_k=4)
    assert contrastive.token_ids == lm.generate("a", **COMMON, penalty_alpha=0.6, top_k=4, do_sample=False).token_ids


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.5, "do_sample": False},
        {"temperature": 0.5, "penalty_alpha": 0.6, "top_k": 4},
        {"generation_config": GenerationConfig(do_sample=False), "top_p": 0.5},
    ],
)
def test_a_setting_without_effect_is_refused(lm: LanguageModel, passes: list[int], settings: dict[str, Any]) -> None:
    with pytest.raises(SettingError, match="only read when sampling"):
        lm.generate("a", **settings)
    assert not passes


def test_the_reference_s_form_keeps_the_reference_s_rule(lm: LanguageModel) -> None:
    with pytest.raises(SettingError, match="only read when sampling"):
        unspool.generate(lm.model, [[1, 2]], max_new_tokens=2, temperature=0.5)


# --- rows that differ -------------------------------------------------------------------------------------


def test_every_row_has_its_own_length(lm: LanguageModel) -> None:
    alone = [lm.generate(one, **COMMON).token_ids[0] for one in PROMPTS]
    result = lm.generate(PROMPTS, **{**COMMON, "max_new_tokens": [2, 6, 2]}, logprobs=1)
    assert result.token_ids == [alone[0][:2], alone[1], alone[2][:2]]
    assert result.finish_reasons == ["length"] * 3
    assert [len(row) for row in result.logprobs or []] == [2, 6, 2]
    assert result.prompt_token_ids == lm.generate(PROMPTS, **COMMON).prompt_token_ids
    assert result.stats.new_tokens == 10
    rows: list[list[int]] = [[] for _ in PROMPTS]
    for piece in lm.stream(PROMPTS, **{**COMMON, "max_new_tokens": [2, 6, 2]}):
        rows[piece.row] += piece.token_ids
    assert rows == result.token_ids


def test_every_row_draws_or_does_not(lm: LanguageModel) -> None:
    greedy = lm.generate(PROMPTS, **COMMON).token_ids
    drawn = lm.generate(PROMPTS, **COMMON, **HOT, seed=4).token_ids
    result = lm.generate(PROMPTS, **COMMON, **HOT, seed=4, do_sample=[True, False, True])
    assert result.token_ids == [drawn[0], greedy[1], drawn[2]]
    mixed = {"temperature": [5.0, 0.1, 2.0], "seed": [1, 2, 3], "do_sample": [False, True, None]}
    result = lm.generate(PROMPTS, **COMMON, **mixed)
    each = [{}, {"temperature": 0.1, "seed": 2}, {"temperature": 2.0, "seed": 3}]
    assert result.token_ids == [
        lm.generate(one, **COMMON, **own).token_ids[0] for one, own in zip(PROMPTS, each, strict=True)
    ]


def test_copies_stay_with_their_row(lm: LanguageModel) -> None:
    lengths = [3, 2, 3]
    result = lm.generate(PROMPTS, max_new_tokens=lengths, eos_token_id=None, num_return_sequences=2, num_beams=2)
    assert [len(row) for row in result.token_ids] == [3, 3, 2, 2, 3, 3]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"max_new_tokens": [2]}, "`max_new_tokens` has 1 values for 3 prompts"),
        ({"max_new_tokens": [2, 0, 3]}, "must be greater than 0"),
        ({"max_new_tokens": [2, "x", 3]}, "must be a whole number"),
        ({"do_sample": [True, 2, False]}, "`do_sample` must be true or false for each prompt"),
        ({"do_sample": [False] * 3, "temperature": 0.5}, "only read when sampling"),
        ({"max_new_tokens": [2, 3, 4], "streamer": print}, "streamer"),
    ],
)
def test_mistakes_are_told_before_any_work(
    lm: LanguageModel, passes: list[int], settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(SettingError, match=told):
        lm.generate(PROMPTS, **settings)
    assert not passes

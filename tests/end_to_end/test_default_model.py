"""The default model, as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import unspool

RECORDED = json.loads((Path(__file__).parent / "smollm2_answers.json").read_text())


@pytest.fixture(scope="module")
def lm() -> unspool.LanguageModel:
    return unspool.load("smollm2-135m")


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: f"{case['kind']}-{case['prompt'][:20]!r}")
def test_greedy_answers_equal_the_reference(lm: unspool.LanguageModel, case: dict[str, Any]) -> None:
    prompt = [{"role": "user", "content": case["prompt"]}] if case["kind"] == "chat" else case["prompt"]
    answer = lm.generate(prompt, max_new_tokens=RECORDED["max_new_tokens"], do_sample=False)
    assert answer.prompt_token_ids == [case["prompt_ids"]]
    assert answer.token_ids == [case["new_ids"]]
    assert answer.text == case["text"]


def test_a_batch_of_all_prompts_gives_the_same_answers(lm: unspool.LanguageModel) -> None:
    cases = RECORDED["cases"][:10]
    answer = lm.generate([case["prompt"] for case in cases], max_new_tokens=24, do_sample=False)
    for case, tokens in zip(cases, answer.token_ids, strict=True):
        assert tokens == case["new_ids"][: len(tokens)]
        assert len(tokens) == min(24, len(case["new_ids"]))

"""The default model, as a user meets it: as plain numbers beside the reference, and as the blocks of its file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import unspool
from unspool.kernels.cpu import find_library, why_missing
from unspool.protocols import Want

RECORDED = json.loads((Path(__file__).parent / "smollm2_answers.json").read_text())


@pytest.fixture(scope="module")
def lm() -> unspool.LanguageModel:
    return unspool.load("smollm2-135m", quantize=None)


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda case: f"{case['kind']}-{case['prompt'][:20]!r}")
def test_greedy_answers_equal_the_reference(lm: unspool.LanguageModel, case: dict[str, Any]) -> None:
    """Every fifth step by step to its end, the others by some steps and one pass over the whole answer."""
    prompt = [{"role": "user", "content": case["prompt"]}] if case["kind"] == "chat" else case["prompt"]
    num_new = 8 if RECORDED["cases"].index(case) % 5 else RECORDED["max_new_tokens"]
    answer = lm.generate(prompt, max_new_tokens=num_new, do_sample=False)
    assert answer.prompt_token_ids == [case["prompt_ids"]]
    assert answer.token_ids == [case["new_ids"][:num_new]]
    assert case["text"].startswith(answer.text.rstrip("\ufffd"))  # a character may be cut where the answer is
    assert answer.text == case["text"] or len(case["new_ids"]) > num_new
    ids = torch.tensor([case["prompt_ids"] + case["new_ids"]])
    logits = lm.model.forward(ids, lm.model.new_cache(), want=Want(logits="all")).logits[0]
    assert logits[len(case["prompt_ids"]) - 1 : -1].argmax(-1).tolist() == case["new_ids"]


def test_a_batch_of_all_prompts_gives_the_same_answers(lm: unspool.LanguageModel) -> None:
    cases = RECORDED["cases"][:10]
    answer = lm.generate([case["prompt"] for case in cases], max_new_tokens=24, do_sample=False)
    for case, tokens in zip(cases, answer.token_ids, strict=True):
        assert tokens == case["new_ids"][: len(tokens)]
        assert len(tokens) == min(24, len(case["new_ids"]))


@pytest.fixture(scope="module")
def packed() -> unspool.LanguageModel:
    if find_library() is None:
        pytest.skip(f"no CPU library: {why_missing()}")
    return unspool.load("smollm2-135m")


def measure_perplexity(lm: unspool.LanguageModel, text: str) -> float:
    assert lm.tokenizer is not None
    ids = torch.tensor([lm.tokenizer.encode(text)])
    logits = lm.model.forward(ids, lm.model.new_cache(), want=Want(logits="all")).logits[0]
    return float(torch.nn.functional.cross_entropy(logits[:-1], ids[0, 1:]).exp())


def test_the_files_blocks_keep_the_quality(lm: unspool.LanguageModel, packed: unspool.LanguageModel) -> None:
    text = (Path(__file__).parents[2] / "benchmarks" / "texts" / "harbour.txt").read_text(encoding="utf-8")[:1000]
    assert abs(measure_perplexity(packed, text) / measure_perplexity(lm, text) - 1) < 0.02
    assert packed.model.weights_bytes < lm.model.weights_bytes / 5


def test_blocks_answer_alike_alone_and_in_a_batch(packed: unspool.LanguageModel) -> None:
    prompts = [case["prompt"] for case in RECORDED["cases"][:4]]
    together = packed.generate(prompts, max_new_tokens=12)
    for prompt, tokens in zip(prompts, together.token_ids, strict=True):
        assert packed.generate(prompt, max_new_tokens=12).token_ids == [tokens]


def test_drafts_change_nothing_for_blocks(packed: unspool.LanguageModel) -> None:
    prompt = "one two three one two three one two"
    plain = packed.generate(prompt, max_new_tokens=20)
    for drafter in ({"prompt_lookup_num_tokens": 4}, {"assistant_early_exit": 20, "num_assistant_tokens": 2}):
        assert packed.generate(prompt, max_new_tokens=20, **drafter).token_ids == plain.token_ids


@pytest.mark.parametrize("config", [{"nbits": 8}, {"nbits": 4, "q_group_size": 32, "residual_length": 32}])
def test_quantised_caches_give_the_tokens_of_operators(lm: unspool.LanguageModel, config: dict[str, Any]) -> None:
    if find_library() is None:
        pytest.skip(f"no CPU library: {why_missing()}")
    prompts = [
        "The harbour lay still under the fog, and the keeper of the light wrote down what he heard. " * 9,
        "Here is a list of the rivers of Europe and the towns that stand on them: " * 6,
    ]

    def answer() -> tuple[list[list[int]], str]:
        made = lm.generate(
            prompts,
            max_new_tokens=8,
            do_sample=False,
            eos_token_id=None,
            cache_implementation="quantized",
            cache_config=config,
        )
        return made.token_ids, made.stats.path

    made, path = answer()
    assert path == "library"
    with lm.model.without_paths("library"):
        tokens, path = answer()
        assert tokens == made and path == "eager"

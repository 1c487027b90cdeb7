"""Texts that keep their structure: every strategy, alone and in batches, on tiny models and a real one."""

from __future__ import annotations

import json
import re
from typing import Any

import jsonschema
import pytest
import torch

import unspool
from tests.grammar.tiny import load_tiny, make_tokenizer
from unspool.errors import SettingError, UnfulfilledError

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 4, "pattern": "^[a-z]*$"},
        "n": {"type": "integer", "minimum": 0, "maximum": 50},
        "ok": {"type": "boolean"},
        "tags": {"type": "array", "items": {"enum": ["ab", "no"]}, "maxItems": 2},
    },
    "required": ["name", "n", "ok", "tags"],
    "additionalProperties": False,
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "seed": 5},
    "beams": {"num_beams": 3},
    "beam sampling": {"num_beams": 3, "do_sample": True, "seed": 2},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 1.0},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "dola": {"dola_layers": "low"},
    "guidance": {"guidance_scale": 1.5},
    "lookup": {"prompt_lookup_num_tokens": 3},
    "sampled lookup": {"prompt_lookup_num_tokens": 3, "do_sample": True, "seed": 5},
    "forced": {"drafter": "grammar"},
    "several": {"do_sample": True, "seed": 1, "num_return_sequences": 3},
}
PROMPTS = [[5, 17, 90], [40, 41], [100, 7, 8, 9, 60]]


@pytest.mark.parametrize(
    ("name", "strategy"),
    [*(("llama", strategy) for strategy in STRATEGIES), ("gpt2", "beams"), ("t5", "beams"), ("t5", "sampling")],
)
def test_every_finished_document_keeps_its_schema(name: str, strategy: str) -> None:
    lm = load_tiny(name)
    answer = lm.generate(PROMPTS, json_schema=SCHEMA, max_new_tokens=110, eos_token_id=2, **STRATEGIES[strategy])
    assert "eos" in answer.finish_reasons or strategy in ("guidance", "dola") or name == "gpt2"
    for row, reason in enumerate(answer.finish_reasons):
        if reason == "eos":
            jsonschema.validate(answer.parse(row), SCHEMA)
        else:
            with pytest.raises(UnfulfilledError, match="before it was whole"):
                answer.parse(row)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_row_alone_is_a_row_in_a_batch_with_structures_of_their_own(strategy: str) -> None:
    lm = load_tiny("llama")
    patterns = ["(ab|no){1,6}", None, "[a-z]{3,9}!"]
    settings = {"max_new_tokens": 24, "eos_token_id": 2, **STRATEGIES[strategy]}
    if "seed" in settings:
        settings["seed"] = [3, 4, 5]
    if strategy == "dola":
        settings["dola_layers"] = [1]  # without a choice of layers for the whole batch
    whole = lm.generate(PROMPTS, regex=patterns, **settings)
    copies = settings.get("num_return_sequences", 1)
    for row, (prompt, pattern) in enumerate(zip(PROMPTS, patterns, strict=True)):
        alone_settings = {**settings, "seed": settings["seed"][row]} if "seed" in settings else settings
        if pattern is None and strategy == "forced":
            alone_settings = {name: value for name, value in alone_settings.items() if name != "drafter"}
        alone = lm.generate([prompt], regex=pattern, **alone_settings)
        assert alone.token_ids == whole.token_ids[row * copies : (row + 1) * copies]
        for place, text in enumerate(alone.texts):
            if pattern is not None and alone.finish_reasons[place] == "eos":
                assert re.fullmatch(pattern, text)


@pytest.mark.parametrize("strategy", ["greedy", "beams", "groups", "lookup", "forced"])
def test_one_prompt_with_several_structures(strategy: str) -> None:
    """Rows that have the same tokens for a while are told apart by their grammars."""
    lm, patterns = load_tiny("llama"), ["(ab|no){1,6}", "(ab|no){2,4}!", "(ab){1,3}", "[a-z]{3,9}!"]
    settings = {"max_new_tokens": 24, "eos_token_id": 2, **STRATEGIES[strategy]}
    whole = lm.generate([PROMPTS[0]] * len(patterns), regex=patterns, **settings)
    for row, pattern in enumerate(patterns):
        assert whole.token_ids[row] == lm.generate(PROMPTS[:1], regex=pattern, **settings).token_ids[0]


@pytest.mark.parametrize("strategy", ["greedy", "sampling"])
def test_drafts_change_nothing(strategy: str) -> None:
    lm = load_tiny("llama")
    common = {"json_schema": SCHEMA, "max_new_tokens": 110, "eos_token_id": 2, **STRATEGIES[strategy]}
    plain = lm.generate(PROMPTS[:1], drafter=False, **common)
    by_itself = lm.generate(PROMPTS[:1], **common)
    assert plain.speculation is None
    assert by_itself.speculation is not None
    assert sum(by_itself.speculation.accepted) > 0
    assert by_itself.stats.forward_passes < plain.stats.forward_passes
    for found in (by_itself, lm.generate(PROMPTS[:1], drafter="grammar", **common)):
        assert found.token_ids == plain.token_ids
    assert "".join(lm.stream(PROMPTS[:1], **common)) == plain.text


def test_greedy_is_the_best_masked_path() -> None:
    """Against a mask that is found by trying every token's text with Python's own regular expressions."""
    lm, tokenizer = load_tiny("llama"), make_tokenizer()
    words = [f"{first}{second}{third}" for first in "ab" for second in ("12", "yes", "x") for third in ("", "no")]
    prompt = [5, 17, 90]
    found = lm.generate([prompt], choice=words, max_new_tokens=12, eos_token_id=2)
    ids, text = list(prompt), ""
    while True:
        scores = lm.model(torch.tensor([ids])).logits[0, -1]
        allowed = []
        for token in range(3, 160):
            longer = text + tokenizer.decode([token])
            if any(word.startswith(longer) for word in words) and longer != text:
                allowed.append(token)
        if text in words:
            allowed.append(2)
        best = max(allowed, key=lambda token: scores[token].item())
        ids.append(best)
        if best == 2:
            break
        text += tokenizer.decode([best])
    assert found.token_ids[0] == ids[len(prompt) :]


def test_other_end_tokens_end_a_text_and_no_text_holds_one() -> None:
    lm = load_tiny("llama")
    for ends in ([2], [120], [2, 121]):
        found = lm.generate(PROMPTS, regex="(ab){1,3}", max_new_tokens=20, eos_token_id=ends)
        assert all(ids[-1] in ends and not set(ids[:-1]) & set(ends) for ids in found.token_ids)


def test_without_an_end_token_or_a_tokenizer_it_is_refused() -> None:
    lm = load_tiny("llama")
    with pytest.raises(SettingError, match="end token"):
        lm.generate(PROMPTS, regex="a", eos_token_id=None)
    with pytest.raises(SettingError, match="tokenizer"):
        unspool.generate(lm.model, torch.tensor([[5, 6]]), regex="a", eos_token_id=2)
    ids = unspool.generate(lm.model, torch.tensor([[5, 6]]), regex="ab", eos_token_id=2, tokenizer=make_tokenizer())
    assert make_tokenizer().decode(ids[0, 2:], skip_special_tokens=True) == "ab"


def test_structures_inside_free_text() -> None:
    lm = load_tiny("llama")
    tag = {"triggers": ["<f"], "structures": [{"begin": "<f>", "schema": {"type": "boolean"}, "end": "</f>"}]}
    forced = lm.generate(PROMPTS, structural_tag=tag, max_new_tokens=40, eos_token_id=2, do_sample=True, seed=3)
    for text in forced.texts:
        for inside in re.findall(r"<f(.*)", text):
            assert re.match(r"(>(\s*(t(r(u(e.*)?)?)?|f(a(l(s(e.*)?)?)?)?)?)?)?$", inside)


def test_the_real_model_writes_what_it_is_asked_for() -> None:
    lm = unspool.load()
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 20}, "people": {"type": "integer", "maximum": 10**8}},
        "required": ["city", "people"],
        "additionalProperties": False,
    }
    found = lm.generate("Name a city and how many people live there.", chat=True, json_schema=schema, max_new_tokens=60)
    jsonschema.validate(found.parsed, schema)
    assert lm.generate("Is water wet?", chat=True, choice=["yes", "no"]).parsed in ("yes", "no")
    lone = lm.generate("Hello", json_object=True, max_new_tokens=2)
    with pytest.raises(UnfulfilledError):
        json.dumps(lone.parsed)

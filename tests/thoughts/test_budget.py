"""Budgets of thoughts: exact in every strategy, with drafts, in batches, in the engine; places found from tokens."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from tests.engine.fakes import BLOCK_BYTES
from tests.thoughts.thinking import KINDS, QUESTION, load_thinking
from unspool.engine import Engine
from unspool.errors import SettingError
from unspool.thoughts.parts import Phase
from unspool.thoughts.places import RowPlaces, find_marks

STRATEGIES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": {"do_sample": True, "seed": 4},
    "several": {"do_sample": True, "seed": 4, "num_return_sequences": 3},
    "beams": {"num_beams": 3},
    "drawn beams": {"num_beams": 2, "do_sample": True, "seed": 1},
    "groups": {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
    "contrastive": {"penalty_alpha": 0.6, "top_k": 4},
    "drafts": {"prompt_lookup_num_tokens": 3},
}


def check(lm: Any, tokens: list[int], thought: str, budget: int) -> None:
    """A row thought so many tokens, and then wrote the model's own words for an end."""
    marks = find_marks(lm.tokenizer)
    assert marks is not None
    assert tokens[budget : budget + len(marks.closing)] == list(marks.closing)
    assert thought == lm.tokenizer.decode(tokens[:budget], skip_special_tokens=True).strip()


@pytest.mark.parametrize("name", KINDS)
def test_a_thought_ends_with_its_budget(name: str) -> None:
    lm = load_thinking(name, opens=True)
    free = lm.generate(QUESTION, max_new_tokens=9)
    assert free.text == "" and free.thought
    answer = lm.generate(QUESTION, max_new_tokens=150, max_thinking_tokens=9, eos_token_id=None)
    check(lm, answer.token_ids[0], answer.thought, 9)
    assert answer.token_ids[0][:9] == free.token_ids[0] and answer.text


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("budget", [0, 5])
def test_every_strategy_keeps_it(strategy: str, budget: int) -> None:
    lm = load_thinking(opens=True)
    settings = {"max_new_tokens": 30, "max_thinking_tokens": budget, "eos_token_id": None, **STRATEGIES[strategy]}
    answer = lm.generate(QUESTION, **settings)
    assert answer.thoughts is not None
    for tokens, thought in zip(answer.token_ids, answer.thoughts, strict=True):
        check(lm, tokens, thought, budget)
    if strategy == "drafts":
        assert answer.token_ids == lm.generate(QUESTION, **{**settings, "prompt_lookup_num_tokens": None}).token_ids


def test_rows_have_budgets_of_their_own() -> None:
    lm = load_thinking(opens=True)
    prompts: Any = [QUESTION, [{"role": "user", "content": "the cat and the world stop"}], QUESTION]
    budgets: Any = [3, None, 7]
    whole = lm.generate(prompts, max_new_tokens=25, max_thinking_tokens=budgets, eos_token_id=None)
    for row, (prompt, budget) in enumerate(zip(prompts, budgets, strict=True)):
        alone = lm.generate(prompt, max_new_tokens=25, max_thinking_tokens=budget, eos_token_id=None)
        assert alone.token_ids[0] == whole.token_ids[row]


def test_the_engine_gives_each_what_it_gets_alone() -> None:
    lm = load_thinking(opens=True)
    asked: list[dict[str, Any]] = [
        {"max_thinking_tokens": 4},
        {"max_thinking_tokens": 9, "do_sample": True, "seed": 2},
        {},
        {"max_thinking_tokens": 2, "num_beams": 2},
        {"max_thinking_tokens": 6, "prompt_lookup_num_tokens": 2},
    ]
    shared: dict[str, Any] = {"max_new_tokens": 24, "eos_token_id": None}
    alone = [lm.generate(QUESTION, **shared, **one) for one in asked]
    with Engine(lm, max_rows=8, memory=BLOCK_BYTES * 4000, block_size=16) as engine:
        requests = [engine.submit(QUESTION, **shared, **one) for one in asked]
        together = [request.result() for request in requests]
    for one, other in zip(alone, together, strict=True):
        assert (one.token_ids, one.texts, one.thoughts) == (other.token_ids, other.texts, other.thoughts)


def test_a_crowd_that_comes_and_goes() -> None:
    lm = load_thinking(opens=True)
    asked = [
        {"max_new_tokens": 12 + row % 5, "max_thinking_tokens": row % 4, "do_sample": row % 2 == 0, "seed": row}
        for row in range(24)
    ]
    asked = [{name: value for name, value in one.items() if one["do_sample"] or name != "seed"} for one in asked]
    with Engine(lm, max_rows=8, memory=BLOCK_BYTES * 4000, block_size=16) as engine:
        requests = [engine.submit(QUESTION, eos_token_id=None, **one) for one in asked]
        for request, one in zip(requests, asked, strict=True):
            check(lm, request.result().token_ids[0], str(request.result().thought), int(one["max_thinking_tokens"]))


def test_places_follow_from_tokens_alone() -> None:
    """Rows that fork, move and go back are found where reading them whole finds them."""
    draw = random.Random(3)
    for name in KINDS:
        lm = load_thinking(name)
        marks = find_marks(lm.tokenizer)
        assert marks is not None
        kind = marks.kind
        words = [lm.tokenizer.encode(text) for text in (kind.begin, kind.end, "hello", "\n", "<", *kind.drops[:2])]
        phases: list[Phase] = ["free", "open", "closed", "free"]
        places, rows = RowPlaces(marks), [[1], [1], [1], [1]]
        for _ in range(30):
            token = [draw.choice(words)[0] if draw.random() < 0.3 else draw.randrange(3, 150) for _ in rows]
            word = draw.choice(words)
            added = [[one] for one in token] if draw.random() < 0.5 else [word] * 4
            rows = [row + one for row, one in zip(rows, added, strict=True)]
            longest = max(map(len, rows))
            rows = [row + [5] * (longest - len(row)) for row in rows]
            if draw.random() < 0.2:
                order = draw.sample(range(4), 4)
                rows, phases = [rows[place] for place in order], [phases[place] for place in order]
            if draw.random() < 0.1:
                rows = [row[: max(1, len(row) - 3)] for row in rows]
            found = places.find(torch.tensor(rows), [1] * 4, phases)
            assert found == [marks.follow(marks.start(phase), row[1:]) for phase, row in zip(phases, rows, strict=True)]


def test_what_can_not_be_is_refused() -> None:
    lm = load_thinking()
    with pytest.raises(SettingError, match="max_thinking_tokens"):
        lm.generate(QUESTION, max_thinking_tokens=-1)
    lm.tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    for settings in ({"max_thinking_tokens": 3}, {"thoughts": True}):
        with pytest.raises(SettingError, match="no marks"):
            lm.generate(QUESTION, **settings)
    assert lm.generate(QUESTION, max_new_tokens=2).thoughts is None

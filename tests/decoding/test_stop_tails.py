"""Stop strings are looked for in the tails of rows: by every strategy the same, without the rows' histories."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from tests.engine.fakes import Terse, make_engine, make_lm
from tests.fakes import make_tokenizer
from unspool.decoding.finish import Finish
from unspool.stopping import StoppingCriteriaList, StopStringCriteria

PROMPTS = [[3, 4], [5, 6, 7, 8, 9], [10], [3, 4, 5]]
KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True, "seed": 3, "temperature": 2.0},
    {"logprobs": 2},
    {"num_return_sequences": 2, "do_sample": True, "seed": 5, "temperature": 2.0},
    {"prompt_lookup_num_tokens": 3},
    {"penalty_alpha": 0.6, "top_k": 3},
    {"num_beams": 2},
    {"guidance_scale": 1.5},
    {"max_time": 60.0},
)


def find_end(prompt: list[int], tokens: list[int], stops: list[str]) -> int:
    """How many new tokens there are before a row ends, by what the criterion says of whole histories."""
    criterion = StopStringCriteria(make_tokenizer(), stops)
    for count in range(1, len(tokens) + 1):
        history = torch.tensor([[*prompt, *tokens[:count]]])
        if criterion(history, None)[0]:
            return count
    return len(tokens)


def pick_stops(prompt: list[int], tokens: list[int]) -> list[list[str]]:
    """Stop strings that occur, that begin in the prompt, that end inside a token, and that never come."""
    tokenizer = make_tokenizer()
    pieces = [tokenizer.decode([token], skip_special_tokens=False) for token in [*prompt, *tokens]]
    text, start = "".join(pieces), sum(map(len, pieces[: len(prompt)]))
    return [
        [text[start + 5 : start + 8]],
        [text[start - 1 : start + 2]],
        [text[start + 7 : start + 9], "never there"],
        ["never there"],
        [text[start + 4 : start + 14]],
    ]


@pytest.mark.parametrize("asked", KINDS, ids=str)
@pytest.mark.parametrize("way", ["call", "engine"])
def test_rows_end_where_whole_histories_say(asked: dict[str, Any], way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("greenlet")
    lm = make_lm(Terse(), has_tokenizer=True)
    free = {"max_new_tokens": 20, "eos_token_id": None, **asked}
    for prompt in PROMPTS:
        whole = lm.generate(prompt, **free).token_ids
        for stops in pick_stops(prompt, whole[0]):
            wanted = [row[: find_end(prompt, row, stops)] for row in whole]
            with monkeypatch.context() as patch:
                if "num_beams" not in asked:
                    patch.setattr(StopStringCriteria, "__call__", refuse)
                if way == "call":
                    found = lm.generate(prompt, stop_strings=stops, **free)
                else:
                    with make_engine(lm) as engine:
                        found = engine.submit(prompt, stop_strings=stops, **free).result(30)
            if "num_beams" in asked:  # a beam that ends leaves room for others
                assert found.token_ids == lm.generate(prompt, stop_strings=stops, **free).token_ids
                continue
            assert found.token_ids == wanted
            ends = ["stop_string" if find_end(prompt, row, stops) < len(row) else None for row in whole]
            assert all(end in (None, reason) for end, reason in zip(ends, found.finish_reasons, strict=True))


def refuse(*_: Any, **__: Any) -> Any:
    raise AssertionError("a whole history was looked at")


def test_rows_of_one_batch_have_tails_of_their_own() -> None:
    lm = make_lm(has_tokenizer=True)
    free = {"max_new_tokens": 20, "eos_token_id": None}
    whole = [lm.generate(prompt, **free).token_ids[0] for prompt in PROMPTS]
    for stops in pick_stops(PROMPTS[1], whole[1]):
        found = lm.generate(PROMPTS, stop_strings=stops, **free).token_ids
        assert found == [row[: find_end(prompt, row, stops)] for prompt, row in zip(PROMPTS, whole, strict=True)]


def test_a_request_that_was_sent_back_keeps_its_tail() -> None:
    lm = make_lm(has_tokenizer=True)
    free = {"max_new_tokens": 60, "eos_token_id": None, "do_sample": True, "temperature": 3.0, "seed": 2}
    whole = lm.generate(PROMPTS[0], **free).token_ids[0]
    stops = [make_tokenizer().decode(whole[40:46], skip_special_tokens=False)]
    assert 40 < find_end(PROMPTS[0], whole, stops) < 60
    with make_engine(lm, num_blocks=9) as engine:
        requests = [engine.submit(PROMPTS[0], stop_strings=stops, **free) for _ in range(6)]
        for request in requests:
            assert request.result(30).token_ids[0] == whole[: find_end(PROMPTS[0], whole, stops)]
        assert engine.stats.preemptions


def test_criteria_derived_from_it_are_called() -> None:
    class Own(StopStringCriteria):
        calls = 0

        def __call__(self, ids: torch.Tensor, scores: Any, **named: Any) -> torch.Tensor:
            type(self).calls += 1
            return torch.tensor([ids.shape[1] >= 6] * len(ids))

    lm = make_lm(has_tokenizer=True)
    criteria = [Own(lm.tokenizer, "never there")]
    assert len(lm.generate([3, 4], max_new_tokens=20, eos_token_id=None, stopping_criteria=criteria).token_ids[0]) == 4
    assert Own.calls == 4


def test_a_late_token_costs_what_an_early_one_does() -> None:
    tokenizer = make_tokenizer()
    criteria = StoppingCriteriaList([StopStringCriteria(tokenizer, ["never there", "nor this"])])

    def measure(count: int) -> float:
        finish = Finish(criteria)
        finish.begin([[3] * count])
        started = time.process_time()
        for step in range(2000):
            assert finish.explain_tokens([3 + step % 18], count + step, [0]) == [None]
        return time.process_time() - started

    assert min(measure(4000) for _ in range(5)) < 1.5 * min(measure(100) for _ in range(5))


def test_equal_stop_strings_share_what_is_known() -> None:
    tokenizer = make_tokenizer()
    first, second = StopStringCriteria(tokenizer, ["ab"]), StopStringCriteria(tokenizer, ["ab"])
    first(torch.tensor([[5]]), None)
    assert 5 in second.known_ends and 5 not in StopStringCriteria(tokenizer, ["cd"]).known_ends

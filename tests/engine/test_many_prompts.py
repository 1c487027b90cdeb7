"""Many prompts at once: results in order or as they come, passes and processors that they share."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import pytest

import unspool
from tests.engine.fakes import ENDLESS, Slow, make_engine, make_lm
from unspool.engine import driver, inbox


def test_generate_in_order_and_as_they_finish(lm: unspool.LanguageModel, engine: unspool.Engine) -> None:
    prompts = [[3 + place % 19, 4, 5] for place in range(40)]
    alone = [lm.generate(prompt, max_new_tokens=1 + sum(prompt) % 9).token_ids for prompt in prompts]
    requests = [engine.submit(prompt, max_new_tokens=1 + sum(prompt) % 9) for prompt in prompts]
    assert [request.result(10).token_ids for request in requests] == alone
    results = [result.token_ids for result in engine.generate(prompts, max_new_tokens=6)]
    assert results == [lm.generate(prompt, max_new_tokens=6).token_ids for prompt in prompts]
    pairs = dict(engine.generate(prompts, in_order=False, max_new_tokens=6))
    assert [pairs[place].token_ids for place in range(40)] == results


def test_an_endless_iterable_is_read_as_it_is_needed(engine: unspool.Engine) -> None:
    taken = itertools.count()

    def prompts() -> Iterator[list[int]]:
        while True:
            yield [3 + next(taken) % 19]

    results = engine.generate(prompts(), max_new_tokens=2)
    assert len(list(itertools.islice(results, 10))) == 10
    results.close()
    assert next(taken) < 200
    with pytest.raises(unspool.SettingError, match="submit"):
        engine.generate("a text")


def test_errors_of_single_prompts_can_be_results(engine: unspool.Engine) -> None:
    results = list(engine.generate([[3], [99], [4]], return_errors=True, max_new_tokens=2))
    assert isinstance(results[1], unspool.InputError) and len(results[2].token_ids[0]) >= 1
    with pytest.raises(unspool.InputError):
        list(engine.generate([[3], [99]], max_new_tokens=2))


def test_generate_batch(lm: unspool.LanguageModel, engine: unspool.Engine) -> None:
    outputs = engine.generate_batch([[3, 4], [99], [5]], max_new_tokens=4, logprobs=0)
    assert list(outputs) == ["req_0", "req_1", "req_2"]
    assert outputs["req_0"].generated_tokens == lm.generate([3, 4], max_new_tokens=4).token_ids[0]
    assert outputs["req_1"].error and outputs["req_1"].status == "failed"
    assert len(outputs["req_2"].logprobs) == len(outputs["req_2"].generated_tokens)


def test_requests_that_come_together_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "_LONGEST_WAIT", 20.0)
    monkeypatch.setattr(inbox, "_QUIET", 0.5)
    with make_engine(make_lm()) as engine:
        requests = []
        for place in range(5):  # one after the other, as a script submits them
            requests.append(engine.submit([3 + place, 4], max_new_tokens=3, eos_token_id=None))
            time.sleep(0.01)
        for request in requests:
            request.result(30)
        assert engine.stats.passes == 3


def test_an_idle_engine_waits_for_what_is_being_prepared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inbox, "_LONGEST_WAIT", 20.0)
    with make_engine(make_lm()) as engine:
        with engine.expecting():
            first = engine.submit([3, 4], max_new_tokens=3, eos_token_id=None)
            time.sleep(0.2)  # many times what it waits for those whom it does not expect
            assert engine.stats.passes == 0
            second = engine.submit([5, 4], max_new_tokens=3, eos_token_id=None)
        assert len(first.result(30).token_ids[0]) == len(second.result(30).token_ids[0]) == 3
        assert engine.stats.passes == 3
        with engine.expecting():  # somebody who runs meanwhile is not held up
            monkeypatch.setattr(inbox, "_LONGEST_WAIT", 0.01)
            assert len(engine.submit([3, 4], max_new_tokens=3, eos_token_id=None).result(30).token_ids[0]) == 3


def test_requests_in_the_queue_are_not_counted_as_rows_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """With many rows torch's operators get all threads, which spin on the library's cores afterwards."""
    seen: list[int] = []

    def note(_: object, num_rows: int) -> AbstractContextManager[None]:
        seen.append(num_rows)
        return nullcontext()

    monkeypatch.setattr(driver, "between_passes", note)
    with make_engine(make_lm(), max_rows=4) as engine:
        requests = [engine.submit([3 + place % 19], max_new_tokens=3, eos_token_id=None) for place in range(40)]
        assert all(len(request.result(30).token_ids[0]) == 3 for request in requests)
    assert max(seen) == 4


def test_plain_rows_share_processors_and_passes(lm: unspool.LanguageModel) -> None:
    model = Slow()
    lm = make_lm(model)
    with make_engine(lm, max_rows=16) as engine:
        asked = [
            {"do_sample": True, "seed": place, "temperature": 0.55 + place / 8, "top_k": 3 + place, "top_p": 0.9}
            for place in range(8)
        ]
        hold = engine.submit([3], **ENDLESS)
        next(iter(hold))
        requests = [
            engine.submit(
                [3, 4 + place], max_new_tokens=30, eos_token_id=None, repetition_penalty=1.0 + place / 10 + 0.1, **one
            )
            for place, one in enumerate(asked)
        ]
        for request in requests:
            next(iter(request))
        assert engine._driver._plain.num_chains == 2  # the greedy row's, and one for all others
        before = engine.stats.passes
        results = [request.result(10).token_ids for request in requests]
        assert engine.stats.passes - before < 3 * 30
        hold.cancel()
        for place, (tokens, one) in enumerate(zip(results, asked, strict=True)):
            penalty = 1.0 + place / 10 + 0.1
            alone = lm.generate([3, 4 + place], max_new_tokens=30, eos_token_id=None, repetition_penalty=penalty, **one)
            assert tokens == alone.token_ids

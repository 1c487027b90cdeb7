"""Log-probabilities come behind the step, as tokens do: numbers become objects where somebody reads them."""

from __future__ import annotations

import threading
from typing import Any, ClassVar

import pytest

import unspool
from tests.engine.fakes import Terse, make_engine, make_lm
from unspool.decoding import record
from unspool.protocols import Want

PROMPTS = [[3 + place, 4, 5 + place] for place in range(6)]
ASKED: tuple[dict[str, Any], ...] = (
    {"logprobs": 2},
    {"logprobs": 0},
    {"logprobs": 2, "do_sample": True, "seed": 4},
    {"logprobs": 3, "num_return_sequences": 2, "do_sample": True, "seed": 1},
    {},
    {"logprobs": 1, "repetition_penalty": 1.3},
)


def assert_alike(found: Any, wanted: Any) -> None:
    """Equal up to rounding: passes over other rows sum in another order."""
    assert [one.token_id for one in found[0]] == [one.token_id for one in wanted[0]]
    assert [one.logprob for one in found[0]] == pytest.approx([one.logprob for one in wanted[0]], abs=1e-5)


def submit(engine: unspool.Engine, **more: Any) -> list[Any]:
    return [
        engine.submit(prompt, max_new_tokens=14, **asked, **more) for prompt, asked in zip(PROMPTS, ASKED, strict=True)
    ]


def test_they_are_those_of_a_call(lm: unspool.LanguageModel) -> None:
    alone = [lm.generate(prompt, max_new_tokens=14, **asked) for prompt, asked in zip(PROMPTS, ASKED, strict=True)]
    with make_engine(lm) as engine:
        for found, wanted in zip([request.result(30) for request in submit(engine)], alone, strict=True):
            assert found.token_ids == wanted.token_ids and found.logprobs == wanted.logprobs
        for request, wanted in zip(submit(engine), alone, strict=True):
            pieces = list(request)
            own = [one for piece in pieces if piece.row == 0 for one in piece.logprobs]
            assert own == ([] if wanted.logprobs is None else wanted.logprobs[0])
            assert request.result().logprobs == request.result().logprobs == wanted.logprobs


def test_the_driving_thread_makes_none(lm: unspool.LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[str] = set()
    make = record.list_logprobs

    def watch(values: Any) -> Any:
        threads.add(threading.current_thread().name)
        return make(values)

    monkeypatch.setattr(record, "list_logprobs", watch)
    with make_engine(lm) as engine:
        request = engine.submit([3, 4], max_new_tokens=14, logprobs=2)
        assert len(request.result(30).logprobs[0]) == len(request.result().token_ids[0])
        assert [one for piece in engine.submit([3, 4], max_new_tokens=4, logprobs=2) for one in piece.logprobs]
    assert threads == {threading.current_thread().name}


def test_what_was_reported_before_a_cancel_or_a_shortage_of_blocks(lm: unspool.LanguageModel) -> None:
    asked: dict[str, Any] = {"max_new_tokens": 60, "eos_token_id": None, "logprobs": 1}
    alone = lm.generate([3, 4], **asked)
    with make_engine(lm, num_blocks=9) as engine:
        requests = [engine.submit([3, 4], **asked) for _ in range(6)]
        for request in requests:
            assert_alike(request.result(30).logprobs, alone.logprobs)
        assert engine.stats.preemptions
        request = engine.submit([3, 4], **{**asked, "max_new_tokens": 130})
        for _ in zip(range(3), request, strict=False):
            pass
        request.cancel()
        found = request.result(30)
        assert found.logprobs is not None and len(found.logprobs[0]) == len(found.token_ids[0]) < 130


def test_greedy_rows_ask_for_brief_passes() -> None:
    class Watched(Terse):
        wants: ClassVar[set[Want]] = set()

        def forward(self, *args: Any, **named: Any) -> Any:
            if args[0].shape[1] == 1:
                self.wants.add(named["want"])
            return super().forward(*args, **named)

    model = Watched()
    with make_engine(make_lm(model)) as engine:
        engine.submit([3, 4], max_new_tokens=14, logprobs=2).result(30)
    assert all(want.is_brief and not want.likeliest_only for want in model.wants) and model.wants

"""Faults end their own request, and an engine that ends takes its requests with it."""

from __future__ import annotations

import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import unspool
from tests.engine.fakes import ENDLESS, Fake, Slow, make_engine, make_lm


class Refuse:
    """Raises at the third call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        self.calls += 1
        if self.calls == 3:
            raise ZeroDivisionError("by a caller's own code")
        return scores if scores is not None and scores.dim() == 2 else False


class Stop(Refuse):
    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        super().__call__(input_ids, None)
        return False


class BrokenStreamer:
    def put(self, _: Any) -> None:
        raise ZeroDivisionError("by a streamer")

    def end(self) -> None: ...


@pytest.mark.parametrize(
    "fault",
    [{"logits_processor": [Refuse]}, {"stopping_criteria": [Stop]}, {"streamer": BrokenStreamer}],
    ids=["processor", "criterion", "streamer"],
)
def test_a_fault_ends_its_own_request(fault: dict[str, Any]) -> None:
    lm = make_lm(Slow())
    made = {name: [kind() for kind in value] if isinstance(value, list) else value() for name, value in fault.items()}
    with make_engine(lm) as engine:
        others = [engine.submit([5, 6], max_new_tokens=20), engine.submit([7], max_new_tokens=20, num_beams=2)]
        with pytest.raises(ZeroDivisionError):
            engine.submit([3, 4], **ENDLESS, **made).result(10)
        assert others[0].result(10).token_ids == lm.generate([5, 6], max_new_tokens=20).token_ids
        assert others[1].result(10).token_ids == lm.generate([7], max_new_tokens=20, num_beams=2).token_ids
        assert engine.submit([3], max_new_tokens=2).result(10).token_ids
        until = time.monotonic() + 10
        while engine.stats.blocks_used and time.monotonic() < until:
            time.sleep(0.01)  # a streamer's fault reaches the driving thread within a step
        assert not engine.stats.blocks_used


def test_code_of_a_request_does_not_end_the_program(engine: unspool.Engine) -> None:
    def leave(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] > 4:
            sys.exit(3)
        return scores

    other = engine.submit([7], max_new_tokens=20, num_beams=2)
    with pytest.raises(RuntimeError, match=r"asked to end the program: SystemExit\(3\)"):
        engine.submit([3, 4], **ENDLESS, logits_processor=[leave]).result(10)
    assert other.result(10).token_ids and engine.submit([3], max_new_tokens=2).result(10).token_ids


class Nan(Fake):
    """Its scores are NaN after the token 7."""

    def forward(self, tokens: torch.Tensor, *args: Any, **named: Any) -> Any:
        forward = super().forward(tokens, *args, **named)
        forward.logits[(tokens[:, -1] == 7)] = math.nan
        return forward


@pytest.mark.parametrize("asked", [{}, {"do_sample": True, "seed": 1, "top_k": 5}, {"num_beams": 2}])
def test_scores_that_are_nan_end_one_request(asked: dict[str, Any]) -> None:
    lm = make_lm(Nan())
    with make_engine(lm) as engine:
        good = engine.submit([4, 5], max_new_tokens=3, suppress_tokens=[7], **asked)
        bad = engine.submit([4, 7], max_new_tokens=3, **asked)
        with pytest.raises(unspool.NoTokenLeftError, match="NaN"):
            bad.result(10)
        assert len(good.result(10).token_ids[0]) >= 1
        assert engine.stats.requests_failed == 1


def test_processors_that_forbid_all_tokens_are_named(engine: unspool.Engine) -> None:
    with pytest.raises(unspool.NoTokenLeftError, match="SuppressTokens"):
        engine.submit([4], suppress_tokens=list(range(23))).result(10)


def test_the_death_of_the_driving_thread_is_known_at_once() -> None:
    lm = make_lm(Slow())
    engine = make_engine(lm)
    requests = [engine.submit([3, 4], **ENDLESS), engine.submit([5], num_beams=2, **ENDLESS)]
    engine._driver.scheduler.plan = lambda now: 1 / 0
    for request in requests:
        with pytest.raises(unspool.EngineError, match="ZeroDivisionError"):
            request.result(10)
    with pytest.raises(unspool.EngineError, match="driving thread"):
        engine.submit([3])
    assert engine._memory.pool.num_free == 200


def test_closing_ends_what_runs(lm: unspool.LanguageModel) -> None:
    engine = make_engine(make_lm(Slow()))
    with engine:
        requests = [engine.submit([3], **ENDLESS), engine.submit([3], num_beams=2, **ENDLESS)]
        next(iter(requests[0]))
    assert [request.result(10).finish_reasons for request in requests] == [["cancelled"], ["cancelled"]]
    assert engine._memory.pool.num_free == 200
    with pytest.raises(unspool.EngineError, match="closed"):
        engine.submit([3])


def test_without_greenlets_plain_requests_run(engine: unspool.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "greenlet", None)
    assert engine.submit([3], max_new_tokens=2).result(10).token_ids
    with pytest.raises(unspool.MissingExtraError, match=r"unspool\[engine\]"):
        engine.submit([3], num_beams=2)


def test_a_script_may_end_without_closing_its_engine() -> None:
    script = (
        "import unspool; from tests.conformance.cases import load_model\n"
        "engine = unspool.Engine(load_model('llama'), memory=1 << 24)\n"
        "requests = [engine.submit([5, 6, 7], max_new_tokens=120, eos_token_id=None) for _ in range(4)]\n"
        "next(iter(requests[0])); print('ends', flush=True)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")

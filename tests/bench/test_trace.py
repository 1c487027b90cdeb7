"""Traces of requests: made, read, served, drawn."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.engine.fakes import make_lm

from unspool.bench.trace import (
    ServedRequest,
    TracedRequest,
    find_figures,
    find_prompts,
    make_trace,
    read_trace,
    serve,
    serve_statically,
)
from unspool.errors import SettingError


def test_traces_are_random_and_repeatable() -> None:
    trace = make_trace(200, 10.0, 40, 20)
    assert trace == make_trace(200, 10.0, 40, 20) and trace[0].at == 0
    assert 10 < trace[-1].at < 40 and all(10 <= one.prompt <= 40 and 2 <= one.new <= 20 for one in trace)
    prompts = find_prompts(trace, range(100))
    assert [len(prompt) for prompt in prompts] == [one.prompt for one in trace]


def test_a_trace_is_served_both_ways() -> None:
    lm, trace = make_lm(), [TracedRequest(0.0, 5, 6), TracedRequest(0.01, 3, 9), TracedRequest(0.02, 8, 2)]
    prompts = find_prompts(trace, range(3, 20))
    served, stats = serve(lm, trace, prompts, 4)
    static = serve_statically(lm, trace, prompts, 4)
    for each in (served, static):
        assert [one.new for one in each] == [6, 9, 2]
        assert all(one.arrived <= one.first <= one.ended for one in each)
    assert stats.requests_done == 4


def test_figures() -> None:
    found = find_figures([ServedRequest(0.0, 1.0, 3.0, 5), ServedRequest(1.0, 4.0, 5.0, 3)])
    assert found.tokens_per_second == pytest.approx(8 / 5) and found.first_median == pytest.approx(2.0)
    assert found.between == pytest.approx(500.0) and found.seconds == pytest.approx(5.0)


@pytest.mark.parametrize(
    "line",
    ["", "nonsense", "[]", '{"at": 0}', '{"at": NaN, "prompt": 3, "new": 3}', '{"at": 0, "prompt": 0, "new": 3}',
     '{"at": 1e9, "prompt": 3, "new": 3}', '{"at": 0, "prompt": true, "new": 3}'],
)  # fmt: skip
def test_files_that_are_no_traces(tmp_path: Path, line: str) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(line)
    with pytest.raises(SettingError, match="--trace"):
        read_trace(path)
    with pytest.raises(SettingError, match="can't be read"):
        read_trace(tmp_path / "none")

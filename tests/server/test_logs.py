"""The log and the page of metrics: every line JSON with who asked, every number with its digits and its model."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.running import RunningServer, make_fake_lm
from tests.server.test_life import start_process
from unspool.server.logs import Log, RequestRecord, current
from unspool.server.metrics import Histogram, Histograms, Metrics
from unspool.server.models import Models, Served


def read_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_every_line_of_the_program_is_json(tmp_path: Path, default_model_file: Path) -> None:
    """Of requests that are answered, refused before a route and on the wire, and of its beginning and end."""
    process = start_process(tmp_path / "ready", 0, str(default_model_file))
    address = (tmp_path / "ready").read_text().strip()
    with httpx.Client(base_url=address, timeout=60) as client:
        name = {"x-request-id": "from-a-proxy.1"}
        answers = [
            client.post("/v1/completions", json={"prompt": "A", "max_tokens": 1}, headers=name),
            client.post("/v1/completions", json={"prompt": "A", "max_tokens": 1}, headers={"x-request-id": "a b"}),
            client.post("/v1/completions", content=b"{"),
            client.get("/nowhere"),
            client.get("/v1/models", headers={"host": "elsewhere"}),
            client.get("/v1/models", headers={"x": "y" * 40_000}),
        ]
    process.terminate()
    lines = read_lines(process.communicate(timeout=60)[1].decode())
    assert [one["event"] for one in lines if one["event"] != "request"] == ["ready", "draining", "drained"]
    requests = [one for one in lines if one["event"] == "request"]
    assert [one["status"] for one in requests] == [200, 200, 400, 404, 403, 431]
    assert [one["id"] for one in requests] == [answer.headers["x-request-id"] for answer in answers]
    assert {one["client"] for one in requests} == {"127.0.0.1"} and requests[0]["id"] == "from-a-proxy.1"
    assert re.fullmatch("[0-9a-f]{32}", requests[1]["id"])


def test_what_libraries_log_is_json_too() -> None:
    stream = io.StringIO()
    log = Log("requests", stream)
    stop = log.take_over()
    token = current.set(RequestRecord("an-id", "GET", "/", client="10.0.0.9"))
    try:
        logging.getLogger("unspool.server").error("%s can't be loaded: %s", "a model", "no file")
        try:
            raise ValueError("what a prompt said")
        except ValueError:
            logging.getLogger("asyncio").exception("Task exception was never retrieved\nfuture: what a prompt said")
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("something is old", stacklevel=1)
        logging.getLogger("else").info("not this")
    finally:
        current.reset(token)
        stop()
    logging.getLogger("else").warning("nor this")
    lines = read_lines(stream.getvalue())
    assert [one["message"] for one in lines[:2]] == [
        "a model can't be loaded: no file",
        "Task exception was never retrieved",
    ]
    assert "something is old" in lines[2]["message"] and len(lines) == 3
    assert all(one["id"] == "an-id" and one["client"] == "10.0.0.9" for one in lines)
    assert lines[1]["error"] == "ValueError" and lines[1]["frames"] and "prompt" not in stream.getvalue()


def test_a_model_that_can_not_be_loaded_is_in_the_log(tmp_path: Path) -> None:
    """Its answer says that the log says why."""
    code = (
        "import threading, httpx, unspool, sys\n"
        "def ask(address):\n"
        "    def go():\n"
        "        answer = httpx.post(address + '/v1/completions', json={'prompt': 'A'}, timeout=60)\n"
        "        print(answer.status_code, answer.text, flush=True)\n"
        "        import os, signal; os.kill(os.getpid(), signal.SIGTERM)\n"
        "    threading.Thread(target=go).start()\n"
        f"unspool.serve({str(tmp_path / 'gone')!r}, port=0, on_ready=ask, loads_on_demand=True)\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120, check=False, env=os.environ)
    assert ended.returncode == 0, ended.stderr
    assert b"503" in ended.stdout and b"can't be loaded" in ended.stdout
    lines = read_lines(ended.stderr.decode())
    why = next(one for one in lines if one["event"] == "log")
    asked = next(one for one in lines if one["event"] == "request")
    assert "gone" in why["message"] and why["id"] == asked["id"] and why["client"] == "127.0.0.1"


# --- metrics ----------------------------------------------------------------------------------------------------------
def read_metrics(page: str) -> dict[str, float]:
    found = [line.rpartition(" ") for line in page.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in found}


def test_numbers_keep_their_digits_and_name_their_model() -> None:
    with RunningServer({"one": make_fake_lm(), "two": make_fake_lm()}) as server:
        for model in ("one", "two", "two"):
            body = {"model": model, "prompt": "hello", "max_tokens": 3, "ignore_eos": True}
            assert server.post("/v1/completions", body).status_code == 200
        server.get("/nowhere")
        engine = server.state.models.find("one").engine
        assert engine is not None
        page = server.get("/metrics").text
    found = read_metrics(page)
    done = 'unspool_requests_total{route="/v1/completions",status="200",model="%s"}'
    assert found[done % "one"] == 1 and found[done % "two"] == 2
    assert found['unspool_requests_total{route="unknown",status="404",model=""}'] == 1
    for name in ("first_token_seconds", "token_seconds", "request_seconds"):
        assert found[f'unspool_{name}_count{{model="one"}}'] == 1 and found[f'unspool_{name}_count{{model="two"}}'] == 2
        assert found[f'unspool_{name}_bucket{{model="two",le="+Inf"}}'] == 2
    assert found['unspool_disconnects_total{model="one"}'] == 0
    assert page.count("# TYPE unspool_first_token_seconds histogram") == 1


NUMBERS = {
    "1234567": 1_234_567,
    "98765432101": 98_765_432_101,
    "0.1234567891": 0.1234567891,
    "2": 2.0,
    "0": 0,
}


@pytest.mark.parametrize("text", NUMBERS)
def test_large_counts_are_exact(text: str) -> None:
    value = NUMBERS[text]

    class Stat:
        def __getattr__(self, name: str) -> float:
            return value

    class Engine:
        stats = Stat()
        is_closed = False

    served = Served("a", lambda: make_fake_lm())
    served.engine = Engine()  # type: ignore[assignment]
    metrics = Metrics()
    metrics.tokens["a", "new"] = 10_000_019
    page = metrics.write(Models([served]), 0)
    assert f'unspool_engine_passes_total{{model="a"}} {text}\n' in page
    assert f'unspool_engine_preemptions_total{{model="a"}} {text}\n' in page
    assert 'unspool_tokens_total{model="a",kind="new"} 10000019\n' in page
    times = Histograms((1.0,))
    times.add("a", value)
    assert f'b_sum{{model="a"}} {text}' in list(times.write("b", ""))
    assert Histogram((1.0,)).counts == [0]


def test_the_image_has_the_versions_that_were_tested() -> None:
    lines = (Path(__file__).parents[2] / "deploy/Dockerfile").read_text().replace("\\\n", "").splitlines()
    installs = [part for line in lines for part in line.split("&&") if "pip install" in part]
    assert len(installs) == 2 and all(" -c constraints.txt " in one for one in installs)
    assert any(line.startswith("COPY") and "constraints.txt" in line for line in lines)

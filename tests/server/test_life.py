"""Load and faults: closed connections, slow readers, full servers, engines that die, drains, killed processes."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.running import Broken, RunningServer, Slow, make_fake_lm
from unspool.engine import inbox
from unspool.errors import SettingError
from unspool.server import generating
from unspool.server.options import ServerOptions
from unspool.server.sse import EventStream

ENDLESS = {"max_tokens": 1500, "ignore_eos": True, "temperature": 0}


def make_slow(seconds: float = 0.01) -> Any:
    model = Slow(vocab=160, max_context=2048)
    model.seconds = seconds
    return make_fake_lm(model)


def open_stream(server: RunningServer, **fields: Any) -> socket.socket:
    """A raw connection that has asked for a stream, and reads when it wants to."""
    body = json.dumps(
        {"messages": [{"role": "user", "content": "hello"}], "stream": True, **ENDLESS, **fields}
    ).encode()
    host, _, port = server.address.removeprefix("http://").partition(":")
    made = socket.create_connection((host, int(port)), timeout=30)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    made.sendall(head.encode() + body)
    return made


def test_a_closed_connection_frees_its_rows() -> None:
    with RunningServer({"slow": make_slow()}, max_rows=8) as server:
        for fields in ({}, {"num_beams": 3}, {"n": 3, "temperature": 1.0}):
            stream = open_stream(server, **fields)
            assert b"200 OK" in stream.recv(4096)
            stream.close()
            server.wait_until_idle(2.0)
        whole = open_stream(server, stream=False)
        time.sleep(0.2)
        whole.close()
        server.wait_until_idle(2.0)
        engine = server.state.models.find("slow").engine
        assert engine is not None and engine.stats.requests_cancelled == 4
        assert server.state.metrics.num_gone == 4


def test_a_storm_of_disconnects() -> None:
    with RunningServer({"slow": make_slow(0.001)}, max_rows=8) as server:
        for _ in range(3):
            streams = [open_stream(server) for _ in range(20)]
            for stream in streams[2:]:
                stream.close()
            assert server.chat(max_tokens=3, temperature=0).status_code == 200
            for stream in streams[:2]:
                stream.close()
        server.wait_until_idle()


async def test_a_reader_that_hangs_is_dropped() -> None:
    closed: list[float] = []
    started = time.monotonic()

    async def events() -> AsyncIterator[bytes]:
        for _ in range(10):
            yield b"data: {}\n\n"

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.sleep(60)  # the socket's buffers are full

    async def receive() -> Any:
        await asyncio.sleep(60)

    stream = EventStream(events(), lambda: closed.append(time.monotonic() - started), send_seconds=0.2)
    await stream({"type": "http"}, receive, send)
    assert len(closed) == 1 and 0.1 < closed[0] < 5


def test_silence_is_filled_with_pings() -> None:
    with (
        RunningServer({"slow": make_slow(0.4)}, ping_seconds=0.1) as server,
        httpx.stream(
            "POST",
            f"{server.address}/v1/chat/completions",
            json={"messages": [{"role": "user", "content": "hello"}], "stream": True, "max_tokens": 2},
            timeout=30,
        ) as answer,
    ):
        lines = list(answer.iter_lines())
        assert lines.count(": ping") >= 2 and lines[-2] == "data: [DONE]"


def test_a_full_server_says_when_to_come_back() -> None:
    with RunningServer({"slow": make_slow()}, requests=2) as server:
        streams = [open_stream(server) for _ in range(2)]
        for stream in streams:
            stream.recv(100)
        answer = server.chat()
        assert answer.status_code == 429 and 1 <= int(answer.headers["retry-after"]) <= 60
        assert answer.json()["error"]["type"] == "rate_limit_error"
        for stream in streams:
            stream.close()
        server.wait_until_idle()
        assert server.chat(max_tokens=2).status_code == 200


def test_a_request_ends_at_its_deadline_with_what_it_has() -> None:
    with RunningServer({"slow": make_slow()}, request_seconds=0.3) as server:
        answer = server.chat(**ENDLESS).json()
        assert answer["choices"][0]["finish_reason"] == "length"
        assert 1 <= answer["usage"]["completion_tokens"] < 100


@pytest.mark.parametrize("restart", [False, True])
def test_an_engine_that_dies(restart: bool) -> None:
    with RunningServer({"broken": make_fake_lm(Broken(vocab=160, max_context=2048))}, restart=restart) as server:
        assert server.chat(max_tokens=2).status_code == 200
        Broken.breaks = True
        lost = server.chat(max_tokens=2)
        assert lost.status_code == 503 and "send it again" in lost.json()["error"]["message"]
        if restart:  # without a request's help
            until = time.monotonic() + 20
            while server.get("/health").status_code != 200 and time.monotonic() < until:
                time.sleep(0.05)
            assert server.get("/health").status_code == 200
            assert server.chat(max_tokens=2).status_code == 200
            assert server.get("/health").status_code == 200
        else:
            assert server.get("/health").status_code == 503
            assert server.chat(max_tokens=2).status_code == 503


def test_many_streams_at_once_are_each_what_they_are_alone() -> None:
    lm = make_fake_lm()
    prompts = [f"hello {place % 17} the cat" for place in range(100)]
    asked = {"max_tokens": 5, "temperature": 0.9, "stream": True}
    alone = {
        prompt: lm.generate(prompt, max_new_tokens=5, do_sample=True, temperature=0.9, top_k=0, seed=len(prompt)).text
        for prompt in set(prompts)
    }

    async def read(client: httpx.AsyncClient, prompt: str) -> str:
        parts = []
        body = {"prompt": prompt, "seed": len(prompt), **asked}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    parts.append(json.loads(line[6:])["choices"][0]["text"])
        return "".join(parts)

    async def main(address: str) -> list[str]:
        limits = httpx.Limits(max_connections=200)
        async with httpx.AsyncClient(base_url=address, timeout=60, limits=limits) as client:
            return await asyncio.gather(*(read(client, prompt) for prompt in prompts))

    with RunningServer({"fake": lm}, max_rows=16, requests=400) as server:
        assert asyncio.run(main(server.address)) == [alone[prompt] for prompt in prompts]
        server.wait_until_idle()


def test_requests_that_come_together_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One is submitted at once, the other takes its time to be prepared: an idle engine waits for it."""
    monkeypatch.setattr(inbox, "_LONGEST_WAIT", 20.0)
    monkeypatch.setattr(inbox, "_QUIET", 0.5)
    submit = generating._submit

    def submit_late(state: Any, dialect: Any, served: Any, body: dict[str, Any], record: Any) -> Any:
        time.sleep(2.0 if body["prompt"] == "the cat" else 0.0)
        return submit(state, dialect, served, body, record)

    monkeypatch.setattr(generating, "_submit", submit_late)
    with RunningServer({"fake": make_fake_lm()}) as server:
        bodies = [{"prompt": text, "max_tokens": 4, "ignore_eos": True} for text in ("the cat", "hello")]

        async def main() -> None:
            async with httpx.AsyncClient(base_url=server.address, timeout=60) as client:
                answers = await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies))
                assert [answer.status_code for answer in answers] == [200, 200]

        asyncio.run(main())
        engine = server.state.models.find("fake").engine
        assert engine is not None and engine.stats.passes == 4


def test_a_drain_lets_requests_end_and_takes_no_others() -> None:
    with RunningServer({"slow": make_slow(0.02)}) as server:
        answers: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: answers.append(server.chat(max_tokens=30, ignore_eos=True)))
        asking.start()
        while not server.state.gate.num_active:
            time.sleep(0.01)
        with httpx.Client(base_url=server.address) as kept:
            assert kept.get("/ready").status_code == 200
            server.server.handle_exit(signal.SIGTERM, None)
            assert kept.get("/ready").status_code == 503
            assert kept.post("/v1/completions", json={"prompt": "hello"}).status_code == 503
        asking.join(30)
        assert answers[0].status_code == 200 and answers[0].json()["usage"]["completion_tokens"] == 30


@pytest.mark.parametrize("is_hurried", [False, True])
@pytest.mark.parametrize(
    ("path", "last"),
    [
        ("/v1/chat/completions", '"code":"ended"'),
        ("/v1/completions", '"code":"ended"'),
        ("/v1/responses", "event: error"),
        ("/v1/messages", "event: error"),
        ("/v1/trace", '"code":"ended"'),
        ("/api/chat", '{"error":'),
    ],
)
def test_a_drain_ends_streams_with_a_last_event(path: str, last: str, is_hurried: bool) -> None:
    """When its time is over, or at a second signal; those who wait for a whole answer get an error."""
    with RunningServer({"slow": make_slow()}, drain_seconds=60.0 if is_hurried else 0.3) as server:
        body: dict[str, Any] = {"ignore_eos": True, "temperature": 0, "stream": True}
        name = {"/v1/responses": "max_output_tokens", "/v1/trace": "max_new_tokens"}.get(path, "max_tokens")
        body |= {"options" if path == "/api/chat" else name: {"num_predict": 1500} if path == "/api/chat" else 1500}
        said_so = {"/v1/responses": {"input": "hello"}, "/v1/completions": {"prompt": "hello"}}
        body |= said_so.get(path, {"messages": [{"role": "user", "content": "hello"}]})
        if path == "/v1/trace":
            del body["stream"]
        whole: list[httpx.Response] = []
        asking = threading.Thread(target=lambda: whole.append(server.chat(**ENDLESS)))
        asking.start()
        with httpx.stream("POST", f"{server.address}{path}", json=body, timeout=60) as answer:
            lines = answer.iter_lines()
            assert answer.status_code == 200 and next(lines)
            while server.state.gate.num_active < 2:
                time.sleep(0.01)
            started = time.monotonic()
            for _ in range(2 if is_hurried else 1):
                server.server.handle_exit(signal.SIGTERM, None)
                time.sleep(0.2)
            said = [line for line in lines if line]
        assert time.monotonic() - started < 20
        assert last in "\n".join(said[-2:]) and "the server was ended" in said[-1], said[-3:]
        asking.join(30)
        assert whole[0].status_code == 503 and whole[0].json()["error"]["code"] == "ended"


def start_process(ready: Path, port: int, *words: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "unspool", "serve", "--port", str(port), "--ready-file", str(ready), *words]
    made = subprocess.Popen(command, stderr=subprocess.PIPE, env={**os.environ, "OMP_NUM_THREADS": "1"})
    until = time.monotonic() + 60
    while not (ready.exists() and ready.read_text().endswith("\n")):
        assert made.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    return made


def test_the_program_is_killed_started_again_and_ended(tmp_path: Path, default_model_file: Path) -> None:
    ready, keys = tmp_path / "ready", tmp_path / "keys"
    keys.write_text("# one per line\nthe-only-secret\n")
    words = ("--max-rows", "4", "--api-key-file", str(keys), str(default_model_file))
    first = start_process(ready, 0, *words)
    address = ready.read_text().strip()
    headers = {"authorization": "Bearer the-only-secret"}
    body = {"prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}
    text = httpx.post(f"{address}/v1/completions", json=body, headers=headers, timeout=60).json()["choices"][0]["text"]
    assert "Paris" in text
    first.send_signal(signal.SIGKILL)
    first.wait(30)
    ready.unlink()
    second = start_process(ready, int(address.rpartition(":")[2]), *words)
    assert ready.read_text().strip() == address
    curl = [
        "curl",
        "-s",
        "-H",
        "Authorization: Bearer the-only-secret",
        f"{address}/v1/completions",
        "-d",
        json.dumps(body),
    ]
    answer = json.loads(subprocess.run(curl, capture_output=True, timeout=60, check=True).stdout)
    assert answer["choices"][0]["text"] == text
    answers: list[httpx.Response] = []
    body |= {"max_tokens": 1500, "ignore_eos": True}
    asking = threading.Thread(
        target=lambda: answers.append(httpx.post(f"{address}/v1/completions", json=body, headers=headers, timeout=60))
    )
    asking.start()
    while b"unspool_requests_active 1" not in httpx.get(f"{address}/metrics", headers=headers).content:
        time.sleep(0.05)
    for _ in range(2):  # the second one does not wait
        second.send_signal(signal.SIGTERM)
        time.sleep(0.3)
    assert second.wait(30) == 0 and not ready.exists()
    asking.join(30)
    assert answers[0].status_code == 503 and answers[0].json()["error"]["code"] == "ended"
    for process in (first, second):
        assert b"Traceback" not in process.communicate()[1]


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -1.0])
def test_seconds_that_are_none_are_refused(seconds: float) -> None:
    with pytest.raises(SettingError, match="'drain_seconds' must be a number of seconds"):
        ServerOptions.read(drain_seconds=seconds)

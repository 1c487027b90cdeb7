"""A deployment of Ray Serve: our routes, replicas that die under load, and requests that stay with their replica."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.engine.fakes import BLOCK_BYTES
from tests.server.running import Slow, make_fake_lm
from unspool.api import LanguageModel
from unspool.errors import SettingError
from unspool.ray.cluster import Actors

pytestmark = [pytest.mark.ray, pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("cluster")]
PORT = 18723
ADDRESS = f"http://127.0.0.1:{PORT}"
BODY: dict[str, Any] = {"prompt": "abc", "max_tokens": 60, "seed": 1, "eos_token_id": None}


class Named(Slow):
    """A slow model whose process can be asked for."""

    seconds = 0.02


def make_models() -> dict[str, LanguageModel]:
    """A model under a fixed name, and one whose name is its process."""
    return {"fake": make_fake_lm(Named(vocab=160, max_context=2048)), f"pid-{os.getpid()}": make_fake_lm()}


@pytest.fixture(scope="module")
def served(cluster: Any) -> Iterator[str]:
    from ray import serve

    from unspool.ray.serving import build_application

    application = build_application(
        make_models,
        replicas=Actors(2, 2, 0.5),
        route="session",
        memory=BLOCK_BYTES * 4000,
        block_size=16,
        log="none",
        drain_seconds=2.0,
    )
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    serve.run(application, name="unspool", route_prefix="/")
    yield ADDRESS
    serve.shutdown()


def find_replica(session: str | None = None) -> int:
    """The process that answers."""
    headers = {} if session is None else {"x-session-id": session}
    listed = httpx.get(f"{ADDRESS}/v1/models", headers=headers, timeout=60).json()["data"]
    return next(int(one["id"].removeprefix("pid-")) for one in listed if one["id"].startswith("pid-"))


def ask(**fields: Any) -> httpx.Response:
    return httpx.post(f"{ADDRESS}/v1/completions", json={"model": "fake", **BODY, **fields}, timeout=120)


def test_routes_answer_and_refuse_as_ever(served: str) -> None:
    assert httpx.get(f"{served}/health", timeout=60).json() == {"status": "ok"}
    found = ask()
    assert found.status_code == 200 and found.json()["usage"]["completion_tokens"] == 60
    assert found.json()["choices"] == ask().json()["choices"]  # whichever replica answers
    refused = ask(temprature=1)
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "temprature"


def test_streams_come_piece_by_piece(served: str) -> None:
    times: list[float] = []
    whole = ""
    with httpx.stream("POST", f"{served}/v1/completions", json={"model": "fake", **BODY, "stream": True}) as answer:
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                times.append(time.monotonic())
                whole += httpx.Response(200, content=line[6:]).json()["choices"][0]["text"]
    assert len(times) > 10 and times[-1] - times[0] > 0.3
    assert whole == ask().json()["choices"][0]["text"]


def test_a_session_stays_with_its_replica(served: str) -> None:
    homes = {session: {find_replica(session) for _ in range(3)} for session in map(str, range(12))}
    assert all(len(pids) == 1 for pids in homes.values())
    assert len({pid for pids in homes.values() for pid in pids}) == 2


def test_a_replica_that_is_killed_under_load(served: str) -> None:
    """Each stream is whole, or ends in an error that its client notices; later requests find another replica."""
    ends: dict[int, str] = {}
    begun: set[int] = set()

    def stream(number: int) -> None:
        told, body = "", {"model": "fake", **BODY, "seed": number, "max_tokens": 300, "stream": True}
        headers = {"x-session-id": str(number)}
        try:
            with httpx.stream("POST", f"{served}/v1/completions", json=body, headers=headers, timeout=120) as answer:
                for line in answer.iter_lines():
                    told = line or told
                    begun.add(number)
                ends[number] = f"{answer.status_code} " + ("whole" if told == "data: [DONE]" else f"cut: {told}")
        except httpx.HTTPError as error:
            ends[number] = type(error).__name__

    homes = {number: find_replica(str(number)) for number in range(12)}
    threads = [threading.Thread(target=stream, args=(number,)) for number in homes]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 60
    while 0 not in begun and time.monotonic() < until:
        time.sleep(0.02)
    os.kill(homes[0], signal.SIGKILL)
    for thread in threads:
        thread.join(120)
    assert len(ends) == 12 and ends[0] == "RemoteProtocolError", ends  # it had begun: the connection is closed
    assert "200 whole" in ends.values() and not any("200 cut" in end for end in ends.values()), ends
    assert {home for number, home in homes.items() if ends[number] != "200 whole"} == {homes[0]}, ends
    late = [ask(max_tokens=5).status_code for _ in range(6)]
    assert late[-1] == 200 and set(late) <= {200, 500, 503}
    until = time.monotonic() + 120
    while len({find_replica(str(number)) for number in range(12)}) < 2:  # Serve makes another one
        assert time.monotonic() < until
        time.sleep(1)
    assert ask().status_code == 200


def test_what_can_not_be_is_refused_before_replicas_are_made() -> None:
    from unspool.ray.serving import build_application, serve_on_ray

    with pytest.raises(SettingError, match="balanced or session"):
        build_application("smollm2-135m", route="magic")
    with pytest.raises(SettingError, match="no option 'colour'"):
        build_application("smollm2-135m", colour="red")
    with pytest.raises(SettingError, match="lets other machines in"):
        serve_on_ray("smollm2-135m", host="0.0.0.0")

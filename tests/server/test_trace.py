"""`/v1/trace` and `/v1/parameters`: a call's events over HTTP."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.running import HELLO, RunningServer, Slow, make_fake_lm, make_layered_lm
from unspool.config import PARAMETERS


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer({"fake": make_fake_lm(), "layers": make_layered_lm()}, max_rows=16) as running:
        yield running
        running.wait_until_idle()


def read_events(text: str) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")]


def ask(server: RunningServer, **fields: Any) -> list[dict[str, Any]]:
    answer = server.post("/v1/trace", {"model": "fake", "max_tokens": 8, **fields})
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    return read_events(answer.text)


def drop_times(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events without what differs between two runs: times, names, and how passes were made."""
    return [
        {name: value for name, value in event.items() if name not in ("ms", "stats", "model")}
        | ({"id": None} if event["type"] == "start" else {})
        for event in events
    ]


def are_alike(one: Any, two: Any) -> bool:
    """Whether two values are the same up to rounding: passes over several requests add in another order."""
    if isinstance(one, dict) and isinstance(two, dict):
        return set(one) == set(two) and all(are_alike(one[name], two[name]) for name in one)
    if isinstance(one, list) and isinstance(two, list):
        return len(one) == len(two) and all(map(are_alike, one, two))
    if isinstance(one, float) or isinstance(two, float):
        return bool(one == pytest.approx(two, rel=1e-3, abs=1e-6))
    return bool(one == two)


@pytest.mark.parametrize(
    ("name", "asked", "alone"),
    [
        ("fake", {"temperature": 0}, {}),
        ("fake", {"seed": 7, "top_p": 0.9}, {"do_sample": True, "seed": 7, "top_p": 0.9, "top_k": 0}),
        ("fake", {"num_beams": 3, "n": 2}, {"num_beams": 3, "num_return_sequences": 2}),
        ("fake", {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, ...),
        ("fake", {"num_beams": 3, "force_words_ids": [[5, 6]]}, ...),
        ("fake", {"penalty_alpha": 0.6, "top_k": 4}, ...),
        ("layers", {"dola_layers": "low"}, ...),
        ("fake", {"temperature": 0, "guidance_scale": 1.5}, {"guidance_scale": 1.5}),
        ("fake", {"temperature": 0, "prompt_lookup_num_tokens": 3}, {"prompt_lookup_num_tokens": 3}),
        ("fake", {"temperature": 0, "regex": "[a-c]{3,5}"}, {"regex": "[a-c]{3,5}"}),
        ("fake", {"temperature": 0, "prefix_ids": [7, 8]}, {"prefix_ids": [7, 8]}),
    ],
)
def test_a_server_sends_what_python_yields(server: RunningServer, name: str, asked: dict[str, Any], alone: Any) -> None:
    lm = server.state.models.find(name).lm
    assert lm is not None
    expected = list(lm.trace("the cat and the cat", max_new_tokens=8, **(asked if alone is ... else alone)))
    events = ask(server, model=name, prompt="the cat and the cat", **asked)
    for one in (*events, *expected):
        if one["type"] == "start":
            one["settings"] = {key: one["settings"].get(key) for key in ("num_beams", "top_p", "regex")}
            one["strategy"] = one["strategy"].removeprefix("assisted_")
    assert are_alike(drop_times(events), drop_times(expected))


def test_a_chat_is_traced(server: RunningServer) -> None:
    lm = server.state.models.find("fake").lm
    assert lm is not None
    events = ask(server, messages=HELLO, temperature=0)
    assert events[-1]["text"] == lm.generate(HELLO, max_new_tokens=8).text
    assert "".join(one["text"] for one in events[0]["prompt"]) == "user: hello world\nassistant:"
    assert events[0]["id"].startswith("trace-") and events[0]["model"] == "fake"


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({}, "'prompt' or 'messages' is required"),
        ({"prompt": "x", "messages": HELLO}, "not both"),
        ({"prompt": ["x", "y"]}, "one prompt"),
        ({"prompt": "x", "n": 2}, "one text"),
        ({"prompt": "x", "stream": False}, "a trace is a stream"),
        ({"prompt": "x", "logprobs": 3}, "has its probabilities"),
        ({"prompt": "x", "prefix_ids": [999]}, "from 0 to 159"),
        ({"prompt": "x", "prefix_ids": [-1]}, "prefix_ids"),
        ({"prompt": "x", "prefix_ids": [5] * 8}, "`max_tokens`=8 counts them too"),
        ({"prompt": "x", "prefix_ids": "ab"}, "prefix_ids"),
        ({"prompt": "x", "topp": 0.9}, "did you mean"),
        ({"prompt": "x", "add_generation_prompt": False}, "does not go with `prompt`"),
        ({"prompt": "x", "tools": [{"type": "function"}]}, "does not go with `prompt`"),
        ({"messages": HELLO, "add_special_tokens": False}, "does not go with `messages`"),
        ({"prompt": "x", "max_tokens": 100_000}, "limit of 8192"),
        ({"prompt": "x", "output_scores": True}, "not offered"),
    ],
)
def test_what_can_not_be_is_refused(server: RunningServer, fields: dict[str, Any], told: str) -> None:
    answer = server.post("/v1/trace", {"model": "fake", "max_tokens": 8, **fields})
    assert answer.status_code == 400 and told in answer.json()["error"]["message"]


def test_an_error_on_the_way_is_the_last_event(server: RunningServer) -> None:
    fields = {"temperature": 0, "suppress_tokens": list(range(1, 160)), "bad_words_ids": [[0]]}
    first, *_, last = [*ask(server, prompt="hello", **fields)]
    assert first["type"] == "start" and last["type"] == "error"
    assert "no token is left" in last["message"] and last["code"] == "no_token_left"


def test_the_seed_repeats_a_trace(server: RunningServer) -> None:
    once = ask(server, prompt="hello", temperature=1.3)
    again = ask(server, prompt="hello", temperature=1.3, seed=once[0]["seed"])
    assert drop_times(once[1:]) == drop_times(again[1:])


def test_the_settings_are_listed(server: RunningServer) -> None:
    listed = {one["name"]: one for one in server.get("/v1/parameters").json()}
    assert {"temperature", "num_beams", "watermarking_config", "regex"} <= set(listed) <= set(PARAMETERS)
    assert "output_scores" not in listed and "cache_implementation" not in listed
    told = listed["top_p"]
    assert told["help"] == PARAMETERS["top_p"].help and told["group"] == "sampling" and told["type"] == "number"
    assert listed["num_beams"]["minimum"] == 1 and listed["early_stopping"]["choices"] == [True, False, "never"]


def make_slow() -> Any:
    model = Slow(vocab=160, max_context=2048)
    model.seconds = 0.02
    return make_fake_lm(model)


def test_a_closed_connection_ends_a_trace() -> None:
    body = {"prompt": "hello", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
    with RunningServer({"slow": make_slow()}, max_rows=8, traces=1) as server:
        for fields in ({}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 2}):
            with httpx.stream("POST", f"{server.address}/v1/trace", json={**body, **fields}, timeout=60) as stream:
                lines = (line for line in stream.iter_lines() if line)
                assert json.loads(next(lines)[6:])["type"] == "start" and next(lines)
                # While it runs, others are answered, and no second trace begins.
                assert server.chat(max_tokens=2, temperature=0).status_code == 200
                busy = server.post("/v1/trace", body)
                assert busy.status_code == 429 and busy.headers["retry-after"]
            server.wait_until_idle(5.0)
            assert server.state.gate.num_traces == 0
        assert server.state.metrics.num_gone == 3


def test_a_deadline_ends_a_trace() -> None:
    body = {"prompt": "hello", "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
    with RunningServer({"slow": make_slow()}, request_seconds=1.0) as server:
        events = read_events(server.post("/v1/trace", body).text)
    tokens = [event for event in events if event["type"] == "token"]
    assert events[-1]["finish_reason"] == "deadline" and len(tokens) < 1000
    assert events[-1]["sequences"][0]["ids"] == [event["id"] for event in tokens]
    assert events[-1]["text"].startswith("".join(event["delta"] for event in tokens))


def test_traces_run_beside_each_other(server: RunningServer) -> None:
    expected = ask(server, prompt="hello", temperature=0)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(ask(server, prompt="hello", temperature=0))) for _ in "abc"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 3 and all(are_alike(drop_times(one), drop_times(expected)) for one in found)


def test_a_key_is_needed() -> None:
    with RunningServer({"fake": make_fake_lm()}, keys=["a-secret-key"]) as server:
        for path in ("/v1/trace", "/v1/parameters"):
            asked = server.get(path) if "parameters" in path else server.post(path, {"prompt": "x"})
            assert asked.status_code == 401
        bearer = {"authorization": "Bearer a-secret-key"}
        assert server.get("/v1/parameters", headers=bearer).status_code == 200

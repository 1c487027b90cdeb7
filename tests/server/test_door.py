"""What is refused, and how: unknown fields, bad values, malformed bodies, keys, hosts, origins, sizes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from tests.server.running import RunningServer, make_fake_lm

KEYS = ("first-secret-key", "second-secret-key")
BEARER = {"authorization": f"Bearer {KEYS[0]}"}


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer({"fake": make_fake_lm()}, keys=KEYS, body_bytes=20_000, new_tokens=500) as running:
        yield running
        running.wait_until_idle()


def ask(server: RunningServer, path: str = "/v1/chat/completions", **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, **fields}
    return server.post(path, body, headers=BEARER)


@pytest.mark.parametrize(
    ("fields", "param", "told"),
    [
        ({"temprature": 1}, "temprature", "did you mean 'temperature'?"),
        ({"num_beems": 2}, "num_beems", "did you mean 'num_beams'?"),
        ({"temperature": "hot"}, "temperature", "must be a number"),
        ({"temperature": -1}, "temperature", "goes from 0"),
        ({"temperature": True}, "temperature", "must be a number"),
        ({"top_p": 5}, "top_p", "top_p"),
        ({"n": 0}, "n", "greater than 0"),
        ({"n": 1000}, "n", "at most"),
        ({"max_tokens": 501}, "max_tokens", "this server's limit of 500"),
        ({"max_completion_tokens": 3}, "max_completion_tokens", "two things"),
        ({"seed": [1, 2]}, "seed", "one value"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", "come with the model alone"),
        ({"store": True}, "store", "nothing is stored"),
        ({"logprobs": "yes"}, "logprobs", "must be"),
        ({"top_logprobs": 2}, "top_logprobs", "needs `logprobs`"),
        ({"response_format": {"type": "xml"}}, "response_format", "has the types"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "response_format", "give one of them"),
        ({"num_beams": 2, "top_p": 0.5}, "top_p", "tokens are not drawn with `num_beams`"),
        ({"length_penalty": 2.0}, "length_penalty", "read by beam search alone"),
        ({"output_scores": True}, "output_scores", "tensors"),
        ({"cache_implementation": "static"}, "cache_implementation", "where the server is started"),
        ({"logit_bias": {"999999": 1}}, "logit_bias", "ids go from 0 to 159"),
        ({"logit_bias": {"1": 1e9}}, "logit_bias", "a bias is a number"),
        ({"priority": 5}, "priority", "above what this server"),
        ({"messages": []}, "messages", "must not be empty"),
        ({"messages": [{"content": "x"}]}, "messages[0]", "a role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0]",
            "a picture is a data: URI",
        ),
        ({"tool_choice": "required"}, "tool_choice", "there are none"),
        ({"stream_options": {"include_usage": 3}}, "stream_options", "true or false"),
        ({"stop": ["a"] * 17}, "stop", "17 stop strings"),
        ({"bad_words_ids": [[999999]]}, "bad_words_ids", "bad_words_ids"),
        ({"mirostat": 1}, "mirostat", "use 2"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "leave out stream"),
    ],
)
def test_a_field_that_can_not_be_is_named(server: RunningServer, fields: dict[str, Any], param: str, told: str) -> None:
    answer = ask(server, **fields)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"] == param and told in error["message"] and error["type"] == "invalid_request_error"


def test_neutral_values_pass(server: RunningServer) -> None:
    """What clients send without meaning anything by it."""
    neutral = {
        "logit_bias": {},
        "frequency_penalty": 0,
        "presence_penalty": 0.0,
        "n": 1,
        "stop": None,
        "tools": [],
        "top_k": -1,
        "user": "somebody",
        "store": False,
        "service_tier": "auto",
        "modalities": ["text"],
        "response_format": {"type": "text"},
        "logprobs": False,
        "parallel_tool_calls": True,
        "metadata": {"a": "b"},
        "mirostat": 0,
        "repeat_penalty": 1.0,
        "min_p": 0,
        "length_penalty": 1.0,
        "num_beams": 1,
        "use_beam_search": False,
        "seed": None,
        "best_of": None,
        "stream_options": {},
    }
    neutral.pop("best_of")
    answer = ask(server, temperature=0, **neutral)
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"] == ask(server, temperature=0).json()["choices"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[1]", 400),
        (b"null", 400),
        (b'"text"', 400),
        (b'{"messages": NaN}', 400),
        (b'{"a": "\xff"}', 400),
        (b"[" * 100_00, 400),
        (b'{"messages": ' + b"[" * 300 + b"]" * 300 + b"}", 400),
        (b'{"messages": "' + b"a" * 30_000 + b'"}', 413),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        (b'{"messages": [{"role": "user", "content": "hello"}], "seed": 1' + b"0" * 400 + b"}", 400),
    ],
)
def test_malformed_bodies(server: RunningServer, body: bytes, status: int) -> None:
    answer = httpx.post(f"{server.address}/v1/chat/completions", content=body, headers=BEARER)
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["message"]


def test_a_body_of_unknown_length_is_bounded_too(server: RunningServer) -> None:
    def parts() -> Iterator[bytes]:
        yield from (b"x" * 1000 for _ in range(50))

    answer = httpx.post(f"{server.address}/v1/completions", content=parts(), headers=BEARER)
    assert answer.status_code == 413


def test_keys(server: RunningServer) -> None:
    for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": KEYS[0]}, {"x-api-key": ""}):
        for path in ("/v1/models", "/metrics", "/version", "/openapi.json", "/nowhere"):
            answer = server.get(path, headers=headers)
            assert answer.status_code == 401 and answer.headers["www-authenticate"] == "Bearer"
    for headers in (BEARER, {"x-api-key": KEYS[1]}, {"authorization": f"bearer {KEYS[1]}"}):
        assert server.get("/v1/models", headers=headers).status_code == 200
    assert server.get("/health").json() == {"status": "ok"} and server.get("/ready").status_code == 200


def test_hosts_and_origins(server: RunningServer) -> None:
    page = "http://evil.example"
    assert server.get("/v1/models", headers={**BEARER, "host": "evil.example"}).status_code == 403
    assert server.get("/v1/models", headers={**BEARER, "host": "localhost:80"}).status_code == 200
    assert server.get("/v1/models", headers={**BEARER, "origin": page}).status_code == 403
    assert server.get("/v1/models", headers={**BEARER, "origin": server.address}).status_code == 200
    with RunningServer({"fake": make_fake_lm()}, origins=["http://friend.example"]) as open_to_friends:
        friend = {"origin": "http://friend.example"}
        answer = httpx.options(f"{open_to_friends.address}/v1/models", headers=friend)
        assert answer.status_code == 204 and answer.headers["access-control-allow-origin"] == friend["origin"]
        assert open_to_friends.get("/v1/models", headers=friend).headers["access-control-allow-origin"]
        assert open_to_friends.get("/v1/models", headers={"origin": page}).status_code == 403


def test_prompts_of_different_keys_share_nothing(server: RunningServer) -> None:
    text = "the cat and the world " * 20
    engine = server.state.models.find("fake").engine
    assert engine is not None

    def read(key: str, **fields: Any) -> int:
        before = engine.stats.prompt_tokens
        body = {"prompt": text, "max_tokens": 1, **fields}
        answer = server.post("/v1/completions", body, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200
        return engine.stats.prompt_tokens - before

    whole = read(KEYS[0])
    assert read(KEYS[0]) < whole
    assert read(KEYS[1]) == whole
    assert read(KEYS[0], cache_salt="other") == whole
    assert read(KEYS[0], cache_prompt=False) == whole
    assert read(KEYS[0], cache_prompt=False, cache_salt="other") == whole


def test_other_routes(server: RunningServer) -> None:
    for method, path, status in (
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/nowhere", 404),
        ("PUT", "/health", 405),
    ):
        answer = httpx.request(method, f"{server.address}{path}", headers=BEARER)
        assert answer.status_code == status and answer.json()["error"]["message"]
    answer = server.post("/tokenize", {"prompt": "hello world"}, headers=BEARER).json()
    lm = server.state.models.find(None).lm
    assert (
        lm is not None and answer["tokens"] == lm.encode("hello world")[0] and answer["count"] == len(answer["tokens"])
    )
    assert server.post("/detokenize", {"tokens": answer["tokens"]}, headers=BEARER).json()["prompt"] == "hello world"
    messages = [{"role": "user", "content": "hello"}]
    rendered = server.post("/apply-template", {"messages": messages}, headers=BEARER).json()
    assert rendered == {"prompt": "user: hello\nassistant:"}
    assert server.post("/tokenize", {"promt": "x"}, headers=BEARER).status_code == 400
    page = server.get("/openapi.json", headers=BEARER).json()
    fields = page["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"]
    assert {"num_beams", "temperature", "penalty_alpha", "messages"} <= set(fields["properties"])
    assert "unspool_requests_total" in server.get("/metrics", headers=BEARER).text


def test_the_log_has_no_prompts_and_no_keys(capsys: pytest.CaptureFixture[str]) -> None:
    with RunningServer({"fake": make_fake_lm()}, keys=KEYS, log="requests") as server:
        ask(server)
        ask(server, nonsense="hello")
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    told = [line for line in lines if line["event"] == "request"]
    assert [line["status"] for line in told] == [200, 400] and told[0]["new_tokens"] == 4 and told[0]["key"] == 1
    assert not any(secret in json.dumps(lines) for secret in (*KEYS, "hello"))


def test_the_line_to_try_works_from_this_machine_and_names_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    from unspool.server.serving import print_ready

    print_ready("http://0.0.0.0:8000", "a model", needs_key=True)
    said = capsys.readouterr().err
    assert "serving a model at http://0.0.0.0:8000/v1" in said
    assert 'curl http://127.0.0.1:8000/v1/chat/completions -H "Authorization: Bearer $KEY" -d' in said
    print_ready("http://127.0.0.1:8000", "a model")
    assert "Authorization" not in capsys.readouterr().err


def test_the_line_to_try_is_one_that_the_model_answers() -> None:
    from unspool.server.models import Served
    from unspool.server.serving import choose_example

    def make(features: Any, template: str | None) -> Served:
        lm: Any = SimpleNamespace(
            model=SimpleNamespace(info=SimpleNamespace(features=features)),
            tokenizer=SimpleNamespace(chat_template=template),
        )
        return Served("it", lambda: lm, lm=lm)

    chat, plain, ears = make(None, "{{ messages }}"), make(None, None), make(object(), None)
    assert choose_example([chat])[0] == "chat/completions" and '"model"' not in choose_example([chat])[1]
    route, sent = choose_example([plain, chat])
    assert route == "completions" and json.loads(sent[4:-1]) == {"model": "it", "prompt": "Once upon a time"}
    assert choose_example([ears]) == ("audio/transcriptions", "-F file=@sound.wav")
    assert choose_example([ears, chat])[1].endswith("-F model=it")

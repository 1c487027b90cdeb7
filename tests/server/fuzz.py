"""Random requests against a real server: `python -m tests.server.fuzz --requests 10000`.

Bodies are made from the table of fields: some fields, each with a value that fits, nearly fits, or is hostile. No
answer may be a fault of the server, none may hang, and in the end no block may be held.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import httpx
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.server.running import RunningServer, make_fake_lm, make_layered_lm
from unspool.server.fields import Field, FieldTable
from unspool.server.names import CHAT, COMPLETIONS, MESSAGES, OLLAMA_CHAT, OLLAMA_GENERATE, RESPONSES, TRACE

ALLOWED = {200, 400, 404, 408, 413, 429}
SLOWEST = 60.0  # seconds of one request, on a machine that does other things too
_MODELS = st.sampled_from(["fake", "layers", "tools", "fake", "layers", "tools", "nobody", None, 3])
_WORDS = st.sampled_from(["hello", "the cat", "", "é€日😀", "\x00", "<s>", "</s>", "a" * 3000, "{{ 1 }}", "\ud7ff"])
_HOSTILE = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    _WORDS,
    st.lists(st.integers(-3, 200), max_size=4),
    st.dictionaries(_WORDS, st.integers(-2, 2), max_size=3),
)
_SMALL = st.integers(0, 6)
_IDS = st.integers(-1, 161)
_KINDS: dict[str, st.SearchStrategy[Any]] = {
    "flag": st.booleans(),
    "integer": _SMALL,
    "number": st.sampled_from([0, 0.0, 0.1, 0.5, 1, 1.0, 1.5, 2, -1, -0.5, 100]),
    "text": _WORDS,
    "texts": st.one_of(_WORDS, st.lists(_WORDS, min_size=1, max_size=3)),
    "ids": st.one_of(_IDS, st.lists(_IDS, max_size=3)),
    "id list": st.lists(_IDS, max_size=5),
    "id lists": st.lists(st.lists(_IDS, min_size=1, max_size=3), max_size=3),
    "layers": st.sampled_from(["low", "high", [1], [0, 2], [99]]),
    "bias": st.lists(st.tuples(st.lists(_IDS, min_size=1, max_size=2), st.floats(-5, 5)), max_size=2),
    "token bias": st.dictionaries(st.integers(0, 170).map(str), st.floats(-5, 5), max_size=3),
    "decay": st.tuples(st.integers(0, 5), st.floats(0.5, 2)),
    "forced ids": st.lists(st.tuples(_SMALL, _IDS), max_size=2),
    "schema": st.sampled_from([{"type": "object"}, {"enum": ["a", 1]}, True, {"not": {}}, {"type": "what"}, "{"]),
    "long text": st.sampled_from(["[ab]+", "hello", "(", "start: /a/", 'root ::= "a" | "b"', "a" * 500]),
    "choices": st.lists(_WORDS, max_size=3),
    "tags": st.sampled_from([{}, {"triggers": ["<"], "structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}]}]),
}
_TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
_OBJECTS: dict[str, st.SearchStrategy[Any]] = {
    "logit_bias": st.one_of(
        _KINDS["token bias"], st.lists(st.tuples(_IDS, st.sampled_from([1, -1, False])), max_size=2)
    ),
    "watermarking_config": st.sampled_from(
        [{"bias": 2.0}, {"greenlist_ratio": 3}, {"ngram_len": 5, "keys": [1, 2]}, {"x": 1}]
    ),
    "response_format": st.sampled_from(
        [{"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}, {"type": 3}]
    ),
    "structured_outputs": st.sampled_from([{"choice": ["a", "b"]}, {"regex": "[ab]"}, {"json": {}}, {"what": 1}]),
    "tools": st.sampled_from([[_TOOL], [{}], [_TOOL, _TOOL], [3], [{"name": "look", "input_schema": {}}]]),
    "tool_choice": st.sampled_from(
        ["none", "auto", "required", "look", {"type": "any"}, {"function": {"name": "look"}}]
    ),
    "stream_options": st.sampled_from([{"include_usage": True}, {"continuous_usage_stats": True}, {"x": 1}]),
    "chat_template_kwargs": st.sampled_from([{"a": 1}, {"messages": []}, {"tokenize": True}, {"a" * 2000: []}]),
    "text": st.sampled_from([{"format": {"type": "text"}}, {"format": 3}, {"x": 1}]),
    "dry_sequence_breakers": st.lists(st.one_of(_IDS, _WORDS), max_size=2),
}
_MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system", "tool", "developer", "", 3]), "content": _WORDS},
    optional={
        "tool_calls": st.sampled_from([[], [{"function": {"name": "look", "arguments": "{}"}}], [{}], 3, [3]]),
        "name": _WORDS,
    },
)
_MESSAGES = st.one_of(
    st.just([{"role": "user", "content": "hello"}]),
    st.just([{"role": "user", "content": "hello"}]),
    st.lists(_MESSAGE, max_size=3),
    st.just([{"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "image_url"}]}]),
)
_PROMPT = st.one_of(st.just("hello"), _WORDS, st.lists(_IDS, max_size=4), st.lists(_WORDS, max_size=3), _HOSTILE)
ROUTES: dict[str, tuple[FieldTable, str, st.SearchStrategy[Any]]] = {
    "/v1/chat/completions": (CHAT, "messages", _MESSAGES),
    "/v1/completions": (COMPLETIONS, "prompt", _PROMPT),
    "/v1/responses": (RESPONSES, "input", st.one_of(_WORDS, _MESSAGES)),
    "/v1/messages": (MESSAGES, "messages", _MESSAGES),
    "/v1/trace": (TRACE, "prompt", _PROMPT),
    "/api/chat": (OLLAMA_CHAT, "messages", _MESSAGES),
    "/api/generate": (OLLAMA_GENERATE, "prompt", _WORDS),
}
_SHORT = ("max_tokens", "max_completion_tokens", "max_new_tokens", "n_predict", "num_predict", "max_output_tokens")


def _make_value(known: Field) -> st.SearchStrategy[Any]:
    if known.name in _OBJECTS:
        usual: st.SearchStrategy[Any] = _OBJECTS[known.name]
    elif known.parameter.kind == "choice":
        usual = st.sampled_from([*known.parameter.all_choices, "what"])
    else:
        usual = _KINDS.get(known.parameter.kind, _HOSTILE)
    return st.one_of(usual, usual, usual, usual, _HOSTILE)


def _make_body(table: FieldTable, required: str, value: st.SearchStrategy[Any], length: str) -> st.SearchStrategy[Any]:
    names = sorted(name for name in table if name not in (required, "model", *_SHORT))
    chosen = st.lists(st.sampled_from(names), max_size=5, unique=True)
    filled = chosen.flatmap(lambda listed: st.fixed_dictionaries({name: _make_value(table[name]) for name in listed}))
    base = st.fixed_dictionaries({"model": _MODELS, required: value, length: st.integers(1, 6)})
    return st.tuples(base, filled).map(lambda parts: parts[1] | parts[0])


_LENGTHS = {"/v1/responses": "max_output_tokens", "/api/chat": "num_predict", "/api/generate": "num_predict"}
REQUESTS = st.sampled_from(sorted(ROUTES)).flatmap(
    lambda path: st.tuples(st.just(path), _make_body(*ROUTES[path], _LENGTHS.get(path, "max_tokens")))
)


def start_server() -> RunningServer:
    """A server of fakes, with limits that keep every request short."""
    models = {"fake": make_fake_lm(), "layers": make_layered_lm(), "tools": make_fake_lm(has_tools=True)}
    return RunningServer(models, max_rows=16, new_tokens=64, request_seconds=20.0, choices=8)


def check_request(client: httpx.Client, path: str, body: Any) -> int:
    """Send one request; raises AssertionError for anything that must not be. Returns the status."""
    started = time.monotonic()
    answer = client.post(path, content=json.dumps(body))
    seconds = time.monotonic() - started
    assert answer.status_code in ALLOWED, (path, body, answer.status_code, answer.text[:500])
    assert seconds < SLOWEST, (path, body, seconds)
    if answer.status_code != 200:
        told = answer.json()
        assert told.get("error"), (path, body, told)
        message = told["error"] if isinstance(told["error"], str) else told["error"]["message"]
        assert message and "Traceback" not in message and "/site-packages/" not in message, message
    elif answer.headers["content-type"].startswith("text/event-stream"):
        assert '"status": 500' not in answer.text and "something went wrong" not in answer.text, (
            path,
            body,
            answer.text,
        )
        assert answer.text.endswith("\n\n"), (path, body, answer.text[-200:])
    elif "ndjson" in answer.headers["content-type"]:
        lines = [json.loads(line) for line in answer.text.splitlines()]
        assert lines[-1].get("done") or "something went wrong" not in lines[-1].get("error", ""), (
            path,
            body,
            lines[-1],
        )
    else:
        assert answer.json()
    return answer.status_code


def run(num_requests: int, number: int = 0) -> dict[int, int]:
    """Send so many requests; the count of each status."""
    counts: dict[int, int] = {}
    with start_server() as server, httpx.Client(base_url=server.address, timeout=2 * SLOWEST) as client:

        @seed(number)
        @settings(
            max_examples=num_requests,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(REQUESTS)
        def attack(request: tuple[str, Any]) -> None:
            status = check_request(client, *request)
            counts[status] = counts.get(status, 0) + 1

        attack()
        server.wait_until_idle()
        assert server.get("/health").status_code == 200
    return counts


def main() -> int:
    """The program."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    started = time.monotonic()
    counts = run(arguments.requests, arguments.seed)
    print(f"{sum(counts.values())} requests in {time.monotonic() - started:.0f} s: {dict(sorted(counts.items()))}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

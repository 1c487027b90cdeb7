"""Tools for a template that knows of none, tools beside a form of the answer, efforts, roles, and routes of others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest

from tests.server.running import HELLO, TOOL, Reciting, RunningServer, make_fake_lm
from unspool.api import load

OTHER: Any = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {}}}}
SCHEMA = {"type": "object", "properties": {"sum": {"enum": [1, 2]}}, "required": ["sum"], "additionalProperties": False}
NO_SYSTEM = (
    "{% for message in messages %}{% if message.role not in ('user', 'assistant') %}{{ raise_exception('no') }}"
    "{% endif %}{{ message.role }}: {{ message.content }}</s>\n{% endfor %}"
)
THINKING = "{% if enable_thinking %}think {% endif %}{% for message in messages %}{{ message.content }}{% endfor %}"
EFFORT = "{{ reasoning_effort }} {% for message in messages %}{{ message.content }}{% endfor %}"


def make(template: str, model: Any = None) -> Any:
    lm = make_fake_lm(model)
    assert lm.tokenizer is not None
    lm.tokenizer.chat_template = template
    return lm


def recite(text: str) -> Any:
    """A model that says one text, and then ends."""
    lm = make_fake_lm()
    assert lm.tokenizer is not None
    return make_fake_lm(Reciting(lm.tokenizer.encode(text, add_special_tokens=False)))


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    models = {
        "fake": make_fake_lm(),
        "strict": make(NO_SYSTEM),
        "tools": make_fake_lm(has_tools=True),
        "thinking": make(THINKING),
        "effort": make(EFFORT),
        "caller": recite('<tool_call>{"name": "weather", "arguments": {"place": "rome"}}</tool_call>'),
        "answerer": recite('{"sum": 2}'),
    }
    with RunningServer(models, max_rows=8) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def theirs(server: RunningServer) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.address) as made:
        yield made


def read_prompt(server: RunningServer, model: str, **fields: Any) -> str:
    """The text of a chat's prompt."""
    body = {"model": model, "max_tokens": 1, "return_token_ids": True, **fields}
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    tokenizer = server.state.models.find(model).lm.tokenizer  # type: ignore[union-attr]
    return str(tokenizer.decode(answer.json()["prompt_token_ids"]))  # type: ignore[union-attr]


# --- templates without tools ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("model", ["fake", "strict"])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_call_that_must_come_comes(client: openai.OpenAI, model: str, choice: Any) -> None:
    tools = [TOOL] if choice == "required" else [OTHER, TOOL]
    ask: Any = {"model": model, "messages": HELLO, "tools": tools, "tool_choice": choice, "max_tokens": 200}
    answer = client.chat.completions.create(**ask, temperature=0)
    (call,) = answer.choices[0].message.tool_calls or []
    assert answer.choices[0].finish_reason == "tool_calls" and not answer.choices[0].message.content
    assert call.function.name == "weather" and json.loads(call.function.arguments)["place"] in ("rome", "oslo")
    chunks = list(client.chat.completions.create(**ask, temperature=0, stream=True))
    streamed = [one for chunk in chunks for one in chunk.choices[0].delta.tool_calls or []]
    assert "".join(one.function.arguments or "" for one in streamed if one.function) == call.function.arguments
    assert len(streamed) > 2 and [one.id for one in streamed].count(None) == len(streamed) - 1
    again: Any = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
    ]
    assert client.chat.completions.create(**{**ask, "messages": again, "tool_choice": "auto", "max_tokens": 2}).choices
    assert client.chat.completions.create(model=model, messages=again, max_tokens=2).choices


@pytest.mark.parametrize("model", ["fake", "strict"])
def test_tools_are_described_and_calls_written(server: RunningServer, model: str) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "rome"}'}}
    messages: Any = [
        {"role": "system", "content": "be kind"},
        *HELLO,
        {"role": "assistant", "content": "look", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": "sunny"},
        {"role": "tool", "tool_call_id": "2", "content": "warm"},
        {"role": "user", "content": "so"},
    ]
    written = read_prompt(server, model, messages=messages, tools=[TOOL])
    letters = "".join(one for one in written if one.isalpha())
    for text in ("be kind", "The weather of a place", "rome", "toolcallnameweatherargumentsplacerome", "sunny", "warm"):
        assert "".join(one for one in text if one.isalpha()) in letters, (text, written)
    assert letters.index("sunny") < letters.index("warm") < letters.rindex("so")
    bare = read_prompt(server, model, messages=messages[1:])
    assert "rome" in bare and "sunny" in bare and "of a place" not in bare


def test_who_may_call_can_also_answer(client: openai.OpenAI) -> None:
    ask: Any = {"messages": HELLO, "tools": [TOOL], "max_tokens": 200, "temperature": 0}
    assert client.chat.completions.create(model="caller", **ask).choices[0].message.tool_calls
    said = client.chat.completions.create(model="answerer", **ask).choices[0].message
    assert said.content and not said.tool_calls


def test_clients_of_others_call_tools_too(server: RunningServer) -> None:
    with anthropic.Anthropic(base_url=server.address, api_key="none", max_retries=0) as theirs:
        tool: Any = {"name": "weather", "input_schema": TOOL["function"]["parameters"]}
        message = theirs.messages.create(
            model="fake", messages=HELLO, tools=[tool], tool_choice={"type": "any"}, max_tokens=200
        )
        assert message.stop_reason == "tool_use"
        (used,) = [one for one in message.content if one.type == "tool_use"]
        assert used.input["place"] in ("rome", "oslo")  # type: ignore[index]
        again: Any = [
            *HELLO,
            {"role": "assistant", "content": [used.model_dump()]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": used.id, "content": "sunny"}]},
        ]
        assert theirs.messages.create(model="fake", messages=again, tools=[tool], max_tokens=2).content
    with ollama.Client(host=server.address) as other:
        said = other.chat("caller", messages=HELLO, tools=[TOOL], options={"temperature": 0, "num_predict": 120})
    assert said.message.tool_calls and said.message.tool_calls[0].function.arguments == {"place": "rome"}
    answer = httpx.post(
        f"{server.address}/v1/responses",
        json={
            "model": "fake",
            "input": "hello",
            "tools": [{"type": "function", **TOOL["function"]}],
            "tool_choice": "required",
            "max_output_tokens": 200,
        },
        timeout=60,
    ).json()
    assert [one["type"] for one in answer["output"]] == ["function_call"]


def test_the_default_model_calls(default_model_file: Path) -> None:
    with RunningServer({"smollm2": load(default_model_file)}, has_engine=False, max_rows=2) as server:
        for choice in ("required", {"type": "function", "function": {"name": "weather"}}):
            body = {"messages": HELLO, "tools": [TOOL, OTHER], "tool_choice": choice, "max_tokens": 100}
            answer = server.post("/v1/chat/completions", {**body, "temperature": 0}).json()["choices"][0]
            (call,) = answer["message"]["tool_calls"]
            assert answer["finish_reason"] == "tool_calls" and call["function"]["name"] in ("weather", "clock")
            assert isinstance(json.loads(call["function"]["arguments"]), dict)


# --- tools beside a form ----------------------------------------------------------------------------------------------
FORMS: Any = {
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    "json_object": {"response_format": {"type": "json_object"}},
    "guided_json": {"guided_json": SCHEMA},
    "choice": {"structured_outputs": {"choice": ['{"sum": 2}', "no"]}},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", ["fake", "tools"])
def test_a_call_or_the_form(server: RunningServer, form: str, model: str) -> None:
    body = {"model": model, "messages": HELLO, "tools": [TOOL], "max_tokens": 300, "temperature": 0}
    for stream in (False, True):
        for steer in ({"logit_bias": {"<": 100}, "parallel_tool_calls": False}, {"logit_bias": {"<": -100, "}": 100}}):
            answer = server.post("/v1/chat/completions", {**body, **FORMS[form], **steer, "stream": stream})
            assert answer.status_code == 200, answer.text
            if stream:
                events = [line[6:] for line in answer.text.splitlines() if line[:7] == "data: {"]
                deltas = [json.loads(event)["choices"][0] for event in events]
                text = "".join(one["delta"].get("content") or "" for one in deltas)
                calls = [call for one in deltas for call in one["delta"].get("tool_calls", [])]
            else:
                message = answer.json()["choices"][0]["message"]
                text, calls = message["content"] or "", message.get("tool_calls", [])
            if "parallel_tool_calls" in steer:
                assert calls and not text and calls[0]["function"]["name"] == "weather"
            else:
                assert not calls and (text == "no" or isinstance(json.loads(text), dict)), text


def test_a_call_that_must_come_stands_in_place_of_the_form(client: openai.OpenAI) -> None:
    ask: Any = {"model": "fake", "messages": HELLO, "tools": [TOOL], "max_tokens": 200, **FORMS["json_schema"]}
    assert client.chat.completions.create(**ask, tool_choice="required").choices[0].message.tool_calls
    said = client.chat.completions.create(**ask, tool_choice="none").choices[0].message
    assert json.loads(said.content or "")["sum"] in (1, 2)
    with pytest.raises(openai.BadRequestError, match="beside tools may be a JSON schema"):
        client.chat.completions.create(**{**ask, "response_format": None, "extra_body": {"regex": "a+"}})
    with pytest.raises(openai.BadRequestError, match="give one of them"):
        client.chat.completions.create(**ask, extra_body={"choice": ["a"]})


@pytest.mark.parametrize("nested", [True, False])
def test_allowed_tools(client: openai.OpenAI, nested: bool) -> None:
    listed = [{"type": "function", "function": {"name": "clock"}} if nested else {"type": "function", "name": "clock"}]
    for mode in ("required", "auto"):
        held = {"mode": mode, "tools": listed}
        choice: Any = {"type": "allowed_tools", **({"allowed_tools": held} if nested else held)}
        for model in ("fake", "caller", "tools"):
            answer = client.chat.completions.create(
                model=model, messages=HELLO, tools=[TOOL, OTHER], tool_choice=choice, max_tokens=200, temperature=0
            )
            names = [one.function.name for one in answer.choices[0].message.tool_calls or []]
            assert set(names) <= {"clock"} and (names or mode == "auto")
    for wrong in ({"mode": "auto", "tools": [{"name": "else"}]}, {"mode": "any", "tools": listed}, {"tools": []}, {}):
        with pytest.raises(openai.BadRequestError, match="allowed_tools"):
            client.chat.completions.create(
                model="fake", messages=HELLO, tools=[TOOL, OTHER], tool_choice={"type": "allowed_tools", **wrong}
            )


# --- efforts, roles, routes -------------------------------------------------------------------------------------------
def test_efforts_reach_templates_that_read_them(server: RunningServer) -> None:
    ask: Any = {"messages": HELLO}
    assert "think" in read_prompt(server, "thinking", **ask, reasoning_effort="low")
    assert "think" not in read_prompt(server, "thinking", **ask, reasoning_effort="none")
    assert "high" in read_prompt(server, "effort", **ask, reasoning_effort="high")
    assert read_prompt(server, "fake", **ask, reasoning_effort="none") == read_prompt(server, "fake", **ask)
    for path, body in (
        ("/v1/chat/completions", {**ask, "reasoning_effort": "low"}),
        ("/v1/responses", {"input": "hello", "reasoning": {"effort": "low"}}),
        ("/api/chat", {**ask, "think": True}),
        ("/api/generate", {"prompt": "hello", "think": "high"}),
    ):
        refused = server.post(path, {"model": "fake", **body})
        assert refused.status_code == 400 and "leave it out" in refused.text, refused.text
        length = {"/v1/responses": "max_output_tokens", "/v1/chat/completions": "max_tokens"}.get(path, "num_predict")
        answer = server.post(path, {"model": "thinking", **body, length: 2})
        assert answer.status_code == 200, answer.text
    for path, body in (
        ("/v1/responses", {"input": "a", "reasoning": {"summary": "auto"}}),
        ("/api/generate", {"prompt": "a", "raw": True, "think": True}),
    ):
        assert server.post(path, {"model": "thinking", **body}).status_code == 400
    assert server.post("/v1/chat/completions", {"model": "fake", **ask, "reasoning_effort": "most"}).status_code == 400
    stored = server.post("/v1/chat/completions", {"model": "fake", **ask, "store": True})
    assert stored.status_code == 400 and "nothing is stored; leave it out" in stored.text


CHATS = ["/v1/chat/completions", "/api/chat", "/apply-template", "/tokenize", "/v1/messages", "/v1/responses"]


@pytest.mark.parametrize("path", CHATS)
def test_roles_that_nobody_knows_are_refused(server: RunningServer, path: str) -> None:
    for role in ("wizard", "User", "system\n", "function"):
        messages: Any = [{"role": role, "content": "hello", "type": "message"}]
        body: Any = {"input": messages} if path == "/v1/responses" else {"messages": messages}
        body |= {"max_tokens": 2} if path == "/v1/messages" else {}
        if path == "/v1/messages":
            del messages[0]["type"]
        answer = server.post(path, {"model": "fake", **body})
        assert answer.status_code == 400 and "role" in answer.text, answer.text
    if path == "/v1/chat/completions":
        for role in ("developer", "system", "user", "assistant", "tool"):
            body = {"model": "fake", "messages": [*HELLO, {"role": role, "content": "a"}], "max_tokens": 1}
            assert server.post(path, body).status_code == 200


def test_a_role_of_the_template_is_known() -> None:
    template = (
        "{% for message in messages %}{% if message.role == 'wizard' %}w{% endif %}{{ message.content }}{% endfor %}"
    )
    with RunningServer({"own": make(template)}) as server:
        body = {"messages": [{"role": "wizard", "content": "hello"}], "max_tokens": 1}
        assert server.post("/v1/chat/completions", body).status_code == 200


def test_what_is_not_served_says_what_to_use(
    server: RunningServer, client: openai.OpenAI, theirs: ollama.Client
) -> None:
    with pytest.raises(openai.BadRequestError, match="have no embeddings; use a server of embedding models"):
        client.embeddings.create(model="fake", input="hello")
    for ask in (lambda: theirs.embed("fake", "hello"), lambda: theirs.embeddings("fake", "hello")):
        with pytest.raises(ollama.ResponseError, match="have no embeddings") as caught:
            ask()
        assert caught.value.status_code == 400
    with pytest.raises(ollama.ResponseError, match="chosen when the server is started"):
        theirs.pull("other")
    running = theirs.ps()
    assert {one.model for one in running.models} == {one.name for one in server.state.models.all}
    assert running.models[0].size == server.state.models.all[0].size and running.models[0].expires_at is not None
    assert "tools" in (theirs.show("fake").capabilities or [])

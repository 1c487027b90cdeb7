"""Tools over a real server: calls whole and streamed, histories with calls, one call alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from tests.engine.fakes import BLOCK_BYTES
from tests.server.running import HELLO, TOOL, TOOL_TEMPLATE, Reciting, RunningServer, make_fake_lm
from unspool.api.speaker import Piece
from unspool.engine import Engine
from unspool.errors import InputError
from unspool.grammar.call_forms import CallFormat
from unspool.server.chat import render_chat
from unspool.server.orders import Order, Target
from unspool.server.work import Work


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    half = make_fake_lm(has_tools=True)
    half.tokenizer.chat_template = TOOL_TEMPLATE.replace("or []", "or [] if not message.content")
    with RunningServer({"half": half, "tools": make_fake_lm(has_tools=True)}, max_rows=16) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_tools(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="tools", messages=HELLO, tools=[TOOL], tool_choice="required", max_tokens=200
    )
    calls = answer.choices[0].message.tool_calls
    assert calls is not None and answer.choices[0].finish_reason == "tool_calls"
    assert calls[0].function.name == "weather" and json.loads(calls[0].function.arguments)["place"] in ("rome", "oslo")
    named = {"type": "function", "function": {"name": "weather"}}
    found = []
    for chunk in client.chat.completions.create(
        model="tools", messages=HELLO, tools=[TOOL], tool_choice=named, max_tokens=200, stream=True
    ):
        found += chunk.choices[0].delta.tool_calls or []
        assert not chunk.choices[0].delta.content
    assert [one.function.name for one in found if one.function.name] == ["weather"] and chunk.choices[
        0
    ].finish_reason == "tool_calls"
    again: Any = [
        *HELLO,
        {"role": "assistant", "content": None, "tool_calls": [one.model_dump() for one in calls]},
        {"role": "tool", "tool_call_id": calls[0].id, "content": "sunny"},
    ]
    answer = client.chat.completions.create(
        model="tools", messages=again, tools=[TOOL], tool_choice="none", max_tokens=4
    )
    assert answer.choices[0].message.tool_calls is None


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_with_tools_has_every_token(server: RunningServer, choice: str, n: int) -> None:
    """Text that may become a call is held back; its tokens and their log-probabilities are not lost."""
    body = {"model": "tools", "messages": HELLO, "tools": [TOOL], "tool_choice": choice, "max_tokens": 60, "seed": 1}
    body |= {"n": n, "logprobs": True, "top_logprobs": 1, "return_token_ids": True}
    whole = server.post("/v1/chat/completions", body).json()["choices"]
    events = server.post("/v1/chat/completions", {**body, "stream": True}).text.split("\n\n")
    found: list[tuple[list[int], list[Any]]] = [([], []) for _ in range(n)]
    for event in events[:-2]:
        for one in json.loads(event.removeprefix("data: "))["choices"]:
            found[one["index"]][0].extend(one.get("token_ids", []))
            found[one["index"]][1].extend((one["logprobs"] or {"content": []})["content"])
    assert found == [(one["token_ids"], one["logprobs"]["content"]) for one in whole]


def test_calls_that_a_template_does_not_write_are_refused(client: openai.OpenAI) -> None:
    call: Any = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    messages: Any = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "1", "content": "sunny"})
    assert client.chat.completions.create(model="tools", messages=messages, max_tokens=2).choices
    messages[1]["content"] = "text"  # beside which this template leaves calls out
    with pytest.raises(openai.BadRequestError, match=r"messages\[1\] has tool_calls"):
        client.chat.completions.create(model="half", messages=messages, max_tokens=2)


@pytest.mark.parametrize("most", [1, None])
async def test_an_answer_with_all_its_calls_has_not_ended_by_its_length(most: int | None) -> None:
    text = '<call>{"name": "weather", "arguments": {}}</call> and on and on'
    call_format = CallFormat('<call>{"name": "', '", "arguments": ', "}</call>")
    order = Order("chatcmpl-", "x", "tools", [[5]], {}, {}, call_format=call_format, most_calls=most)
    lm = make_fake_lm()
    with Engine(lm, memory=BLOCK_BYTES * 400, max_rows=2) as engine:
        order.settings |= {"max_new_tokens": 1}
        work = Work(engine, order, lm.tokenizer)
        (choice,) = await work.choices()
        result = replace(work.requests[0].result(), texts=[text], finish_reasons=["length"])
        choice = work._make_choice(0, 0, 0, result)
        piece = Piece(text, row=0, token_ids=result.token_ids[0], finish_reason="length")
        (delta,) = work._make_deltas(0, piece)
    assert [one.name for one in choice.calls] == [one.name for one in delta.calls] == ["weather"]
    assert choice.finish_reason == delta.finish_reason == ("tool_calls" if most else "length")
    assert choice.text == delta.text == ("" if most else " and on and on")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize(("num_said", "n"), [(0, 1), (3, 1), (40, 2)])
def test_one_call_alone_ends_the_text(path: str, num_said: int, n: int) -> None:
    """Nothing is written behind the only call that is kept, be the answer whole or a stream."""
    call = '<call>{"name": "weather", "arguments": {"place": "rome"}}</call>'
    tokenizer = make_fake_lm(has_tools=True).tokenizer
    assert tokenizer is not None
    ids = tokenizer.encode("z" * num_said + call, add_special_tokens=False)
    lm = make_fake_lm(Reciting(ids), has_tools=True)
    body: dict[str, Any] = {"model": "reciting", "messages": HELLO, "max_tokens": 300, "temperature": 0}
    if path == "/v1/messages":
        tool = {"name": "weather", "input_schema": TOOL["function"]["parameters"]}
        body |= {"tools": [tool], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}
    else:
        body |= {"tools": [TOOL], "parallel_tool_calls": False, "n": n, "return_token_ids": True}
    with RunningServer({"reciting": lm}) as running:
        whole = running.post(path, body).json()
        events = [
            json.loads(line.removeprefix("data: "))
            for line in running.post(path, {**body, "stream": True}).text.splitlines()
            if line.startswith("data: {")
        ]
        assert running.state.metrics.tokens["reciting", "new"] < 2 * n * (2 * len(ids) + 2)
    if path == "/v1/messages":
        assert [one["type"] for one in whole["content"]].count("tool_use") == 1
        assert whole["usage"]["output_tokens"] == events[-2]["usage"]["output_tokens"]
        return
    streamed: list[list[int]] = [[] for _ in range(n)]
    for one in (one for event in events for one in event["choices"]):
        streamed[one["index"]] += one.get("token_ids", [])
    for choice, token_ids in zip(whole["choices"], streamed, strict=True):
        assert choice["finish_reason"] == "tool_calls" and len(choice["message"]["tool_calls"]) == 1
        assert choice["token_ids"] == token_ids
        assert tokenizer.decode(token_ids).endswith(f"{call}</s>")


def test_chats_with_calls_that_a_template_is_known_to_write_are_rendered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = Target("tools", make_fake_lm(has_tools=True))
    tokenizer, rendered = target.tokenizer, list[int]()
    # Calls beside a text are left out, as by templates that have the one or the other.
    tokenizer.chat_template = TOOL_TEMPLATE.replace("or []", "or [] if not message.content")
    write = tokenizer.apply_chat_template
    monkeypatch.setattr(tokenizer, "apply_chat_template", lambda *a, **n: (rendered.append(1), write(*a, **n))[1])
    call: Any = {"function": {"name": "weather", "arguments": {"place": "rome"}}}

    def render(calls: list[Any], content: str = "", **more: Any) -> int:
        rendered.clear()
        said = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
        ids = render_chat(target, [*HELLO, said], **more)
        assert not calls or "weather" in tokenizer.decode(ids, skip_special_tokens=False)
        return len(rendered)

    assert [render([]), render([call]), render([call]), render([call, call]), render([call] * 3)] == [1, 2, 1, 2, 1]
    for _ in range(2):
        with pytest.raises(InputError, match="tool_calls, which this model's chat template does not write"):
            render([call], "text")
    tokenizer.chat_template = TOOL_TEMPLATE
    assert [render([call], "text"), render([call], "text")] == [2, 1]

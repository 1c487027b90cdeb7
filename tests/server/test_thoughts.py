"""Thoughts over a real server: apart from answers in every dialect, bounded, hidden, and sent back."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import anthropic
import ollama
import openai
import pytest

from tests.server.running import HELLO, RunningServer, make_fake_lm
from tests.thoughts.thinking import make_template
from unspool.thoughts.kinds import THOUGHTS

SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
ASK: Any = {"messages": HELLO, "max_tokens": 40, "temperature": 0}


def make(name: str, *, extra: str = "", **options: Any) -> Any:
    lm = make_fake_lm()
    lm.tokenizer.chat_template = make_template(THOUGHTS[name], **options) + extra  # type: ignore[union-attr]
    return lm


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    models = {
        "think": make("think", opens=True),
        "harmony": make("harmony"),
        "switch": make("think", extra="{% if enable_thinking %}on{% endif %}"),
        "plain": make_fake_lm(),
    }
    with RunningServer(models, max_rows=8) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def expected(server: RunningServer) -> Any:
    lm = server.state.models.find("think").lm
    assert lm is not None
    answer = lm.generate(HELLO, max_new_tokens=40, max_thinking_tokens=6)
    assert answer.thought and answer.text
    return answer


def test_openai(client: openai.OpenAI, expected: Any) -> None:
    ask: Any = {"model": "think", **ASK, "extra_body": {"max_thinking_tokens": 6}}
    answer = client.chat.completions.create(**ask)
    message: Any = answer.choices[0].message
    assert (message.content, message.reasoning_content) == (expected.text, expected.thought)
    assert message.reasoning == expected.thought
    assert answer.usage is not None and answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == expected.num_thinking_tokens[0]
    text = thought = ""
    for chunk in client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        if chunk.choices:
            delta: Any = chunk.choices[0].delta
            text += delta.content or ""
            thought += getattr(delta, "reasoning_content", None) or ""
        else:
            assert chunk.usage is not None and chunk.usage.completion_tokens_details is not None
            assert chunk.usage.completion_tokens_details.reasoning_tokens == expected.num_thinking_tokens[0]
    assert (text, thought) == (expected.text, expected.thought)
    for body, shows in (
        ({"thinking_token_budget": 6, "include_reasoning": False}, False),
        ({"reasoning_budget_tokens": 6}, True),
    ):
        hidden: Any = client.chat.completions.create(**{**ask, "extra_body": body}).choices[0].message
        assert hidden.content == expected.text and (getattr(hidden, "reasoning_content", None) is not None) == shows
    whole = client.chat.completions.create(
        **{**ask, "extra_body": {"max_thinking_tokens": 6, "reasoning_format": "none"}}
    )
    assert "</think>" in str(whole.choices[0].message.content)


def test_a_schema_holds_for_the_answer(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
    for model in ("think", "harmony", "switch"):
        ask: Any = {"model": model, **ASK, "max_tokens": 200, "response_format": form}
        ask["extra_body"] = {"max_thinking_tokens": 6}
        answer = client.chat.completions.create(**ask)
        assert json.loads(answer.choices[0].message.content or "")["a"] in (1, 2)


def test_efforts(client: openai.OpenAI) -> None:
    none = client.chat.completions.create(model="think", **ASK, reasoning_effort="none")
    message: Any = none.choices[0].message
    assert message.content and not hasattr(message, "reasoning_content")
    high: Any = client.chat.completions.create(model="think", **ASK, reasoning_effort="high").choices[0].message
    assert high.reasoning_content and not high.content
    assert client.chat.completions.create(model="switch", **ASK, reasoning_effort="low").choices
    with pytest.raises(openai.BadRequestError, match="no setting for how long it thinks"):
        client.chat.completions.create(model="plain", **ASK, reasoning_effort="low")
    with pytest.raises(openai.BadRequestError, match="thinking_token_budget"):
        client.chat.completions.create(model="plain", **ASK, extra_body={"thinking_token_budget": 3})
    with pytest.raises(openai.BadRequestError, match="no place"):
        client.completions.create(model="think", prompt="hello", extra_body={"thoughts": True})


def test_responses(client: openai.OpenAI, expected: Any) -> None:
    ask: Any = {"model": "think", "input": HELLO, "max_output_tokens": 40, "temperature": 0}
    ask["extra_body"] = {"max_thinking_tokens": 6}
    answer = client.responses.create(**ask)
    thought, said = answer.output
    assert thought.type == "reasoning" and thought.content is not None and said.type == "message"
    assert (thought.content[0].text, answer.output_text) == (expected.thought, expected.text)
    assert answer.usage is not None
    assert answer.usage.output_tokens_details.reasoning_tokens == expected.num_thinking_tokens[0]
    with client.responses.stream(**ask) as stream:
        events = list(stream)
    whole = events[-1].response  # type: ignore[union-attr]
    assert [one.model_dump(exclude={"id"}) for one in whole.output] == [
        one.model_dump(exclude={"id"}) for one in answer.output
    ]
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == expected.thought
    again: Any = [*HELLO, thought.model_dump(exclude_none=True), said.model_dump(exclude_none=True), *HELLO]
    assert client.responses.create(**{**ask, "input": again}).output
    with pytest.raises(openai.BadRequestError, match="nothing follows"):
        client.responses.create(**{**ask, "input": again[:2]})


def test_anthropic(server: RunningServer, expected: Any) -> None:
    with anthropic.Anthropic(base_url=server.address, api_key="none", max_retries=0) as client:
        ask: Any = {"model": "think", "max_tokens": 40, "extra_body": {"temperature": 0}}
        ask["thinking"] = {"type": "enabled", "budget_tokens": 6}
        ask["messages"] = [{"role": "user", "content": "hello world"}]
        answer = client.messages.create(**ask)
        assert [one.type for one in answer.content] == ["thinking", "text"]
        assert answer.content[0].thinking == expected.thought  # type: ignore[union-attr]
        with client.messages.stream(**ask) as stream:
            final = stream.get_final_message()
        assert [one.model_dump(exclude_none=True) for one in final.content] == [
            one.model_dump(exclude_none=True) for one in answer.content
        ]
        again = [*ask["messages"], {"role": "assistant", "content": answer.content}, *ask["messages"]]
        assert client.messages.create(**{**ask, "messages": again}).content
        off = client.messages.create(**{**ask, "thinking": {"type": "disabled"}})
        assert [one.type for one in off.content] == ["text"]
        with pytest.raises(anthropic.BadRequestError, match="budget_tokens"):
            client.messages.create(**{**ask, "thinking": {"type": "enabled"}})


def test_ollama(server: RunningServer, expected: Any) -> None:
    with ollama.Client(host=server.address) as client:
        options = {"temperature": 0, "num_predict": 40, "max_thinking_tokens": 6}
        answer = client.chat("think", messages=HELLO, options=options)
        assert (answer.message.content, answer.message.thinking) == (expected.text, expected.thought)
        chunks = list(client.chat("think", messages=HELLO, options=options, stream=True))
        assert "".join(one.message.thinking or "" for one in chunks) == expected.thought
        assert client.generate("think", "hello world", options=options).thinking == expected.thought
        assert client.chat("think", messages=HELLO, options={"num_predict": 20}, think=False).message.thinking is None
        assert "thinking" in (client.show("think").capabilities or [])
        again: Any = [*HELLO, answer.message.model_dump(), *HELLO]
        assert client.chat("think", messages=again, options=options).message.content


def test_thoughts_go_back_into_templates(server: RunningServer) -> None:
    for name, content in (
        ("reasoning_content", "yes"),
        ("reasoning", "yes"),
        ("content", [{"type": "thinking", "thinking": "so"}, {"type": "text", "text": "yes"}]),
    ):
        said: Any = {"role": "assistant", "content": "yes", "reasoning_content": "so"}
        said = {"role": "assistant", "content": content} | ({name: "so"} if name != "content" else {})
        body = {"model": "think", "messages": [*HELLO, said, *HELLO], "max_tokens": 1, "return_token_ids": True}
        answer = server.post("/v1/chat/completions", body).json()
        lm = server.state.models.find("think").lm
        assert lm is not None and lm.tokenizer is not None
        assert "(so) yes" in lm.tokenizer.decode(answer["prompt_token_ids"])

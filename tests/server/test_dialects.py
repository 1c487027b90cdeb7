"""Other clients: responses, the anthropic, ollama and langchain-openai packages, decisions, sounds."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import anthropic
import ollama
import openai
import pytest
from langchain_openai import ChatOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.server.running import HELLO, TOOL, RunningServer, make_fake_lm


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer({"fake": make_fake_lm(), "tools": make_fake_lm(has_tools=True)}) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture(scope="module")
def expected(server: RunningServer) -> Any:
    lm = server.state.models.find("fake").lm
    assert lm is not None
    return lm.generate(HELLO, max_new_tokens=12)


@pytest.fixture(scope="module")
def responses_client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_responses_text(responses_client: openai.OpenAI, expected: Any) -> None:
    for given in (
        "hello world",
        HELLO,
        [{"role": "user", "content": [{"type": "input_text", "text": "hello world"}]}],
    ):
        answer = responses_client.responses.create(model="fake", input=given, max_output_tokens=12, temperature=0)
        assert answer.output_text == expected.text and answer.status == "incomplete"
        assert answer.usage is not None and answer.usage.output_tokens == 12
    beams = responses_client.responses.create(
        model="fake", input="hello world", max_output_tokens=6, instructions="the cat", extra_body={"num_beams": 3}
    )
    assert beams.output_text and beams.instructions == "the cat"


def test_responses_stream(responses_client: openai.OpenAI, expected: Any) -> None:
    asked: Any = {"model": "fake", "input": "hello world", "max_output_tokens": 12, "temperature": 0}
    with responses_client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
    assert kinds[0] == "response.created" and kinds[-1] == "response.incomplete"
    assert kinds.count("response.output_text.delta") > 3
    stop = expected.text[8:10]
    with responses_client.responses.stream(**asked, extra_body={"stop": [stop]}) as stream:
        whole = stream.get_final_response()
    assert whole.output_text == expected.text[: expected.text.index(stop)] and whole.status == "completed"


def test_responses_tools_and_formats(responses_client: openai.OpenAI) -> None:
    tool: Any = {"type": "function", "strict": True, **TOOL["function"]}
    asked: Any = {"model": "tools", "input": "hello", "tools": [tool], "tool_choice": "required"}
    answer = responses_client.responses.create(**asked, max_output_tokens=200)
    call = answer.output[0]
    assert call.type == "function_call" and json.loads(call.arguments)["place"] in ("rome", "oslo")
    with responses_client.responses.stream(**asked, max_output_tokens=200) as stream:
        assert stream.get_final_response().output[0].type == "function_call"
    items: Any = [
        {"role": "user", "content": "hello"},
        call.model_dump(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    again = responses_client.responses.create(
        model="tools", input=items, tools=[tool], tool_choice="none", max_output_tokens=4
    )
    assert again.output[0].type == "message"
    form: Any = {"format": {"type": "json_schema", "name": "it", "schema": {"enum": ["x", "y"]}}}
    assert json.loads(responses_client.responses.create(model="fake", input="hello", text=form).output_text) in (
        "x",
        "y",
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [("previous_response_id", "resp_1"), ("background", True), ("store", True), ("truncation", "auto"), ("n", 2)],
)
def test_responses_what_needs_a_store_is_refused(responses_client: openai.OpenAI, field: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError, match=field):
        responses_client.responses.create(model="fake", input="hello", extra_body={field: value})


def test_responses_are_what_the_client_s_types_say(server: RunningServer) -> None:
    tool: Any = {"type": "function", "strict": True, **TOOL["function"]}
    adapter: Any = TypeAdapter(ResponseStreamEvent)
    for asked in (
        {"model": "fake", "include": ["message.output_text.logprobs"], "top_logprobs": 2, "temperature": 0},
        {"model": "tools", "tools": [tool], "tool_choice": "required", "include": ["message.output_text.logprobs"]},
        {"model": "fake", "stream_options": {"include_obfuscation": False}, "text": {"format": {"type": "text"}}},
    ):
        body = {"input": "hello", "max_output_tokens": 80, "seed": 2, **asked}
        whole = server.post("/v1/responses", body).json()
        Response.model_validate(whole, strict=True)
        events = server.post("/v1/responses", {**body, "stream": True}).text.split("\n\n")[:-1]
        for place, event in enumerate(events):
            value = json.loads(event.partition("data: ")[2])
            adapter.validate_python(value, strict=True)
            assert value["sequence_number"] == place
        made = value["response"]["output"]
        assert [one["type"] for one in made] == [one["type"] for one in whole["output"]]
        if made[0]["type"] == "message":
            assert made[0]["content"] == whole["output"][0]["content"]


def test_responses_errors_name_its_own_fields(responses_client: openai.OpenAI) -> None:
    cases: list[tuple[str, Any]] = [
        ("input[0]", {"input": [{"content": "x"}]}),
        ("input[0]", {"input": [{"role": "user"}]}),
        ("text", {"text": {"format": {"type": "json_schema", "name": "it", "schema": {"uniqueItems": True}}}}),
        ("text", {"text": {"format": {"type": "json_schema", "name": "it"}}}),
    ]
    for param, body in cases:
        with pytest.raises(openai.BadRequestError) as error:
            responses_client.responses.create(**{"model": "fake", "input": "hello", **body})
        assert error.value.param == param


@pytest.fixture(scope="module")
def anthropic_client(server: RunningServer) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.address, api_key="none", max_retries=0) as made:
        yield made


def test_anthropic_text(anthropic_client: anthropic.Anthropic, expected: Any) -> None:
    answer = anthropic_client.messages.create(
        model="fake", max_tokens=12, messages=HELLO, extra_body={"temperature": 0}
    )
    assert answer.content[0].text == expected.text and answer.stop_reason == "max_tokens"
    assert answer.usage.output_tokens == 12
    assert answer.usage.input_tokens == len(expected.prompt_token_ids[0])
    with anthropic_client.messages.stream(
        model="fake", max_tokens=12, messages=HELLO, extra_body={"temperature": 0}
    ) as stream:
        assert "".join(stream.text_stream) == expected.text
        assert stream.get_final_message().usage.output_tokens == 12
    stop = expected.text[4:6]
    answer = anthropic_client.messages.create(
        model="fake",
        max_tokens=12,
        messages=HELLO,
        extra_body={"temperature": 0, "top_k": 5},
        stop_sequences=[stop],
        system="",
    )
    assert answer.stop_reason == "stop_sequence" and answer.stop_sequence == stop
    counted = anthropic_client.messages.count_tokens(model="fake", messages=HELLO)
    assert counted.input_tokens == len(expected.prompt_token_ids[0])


def test_anthropic_an_answer_that_has_begun(server: RunningServer, anthropic_client: anthropic.Anthropic) -> None:
    begun: Any = [*HELLO, {"role": "assistant", "content": "the cat"}]
    answer = anthropic_client.messages.create(model="fake", max_tokens=5, messages=begun, extra_body={"temperature": 0})
    lm = server.state.models.find("fake").lm
    assert lm is not None and lm.tokenizer is not None
    prompt = lm.tokenizer.encode("user: hello world\nassistant: the cat", add_special_tokens=False)
    assert answer.content[0].text == lm.generate(prompt, max_new_tokens=5).text


def test_anthropic_tools(anthropic_client: anthropic.Anthropic) -> None:
    function = TOOL["function"]
    tool: Any = {"name": function["name"], "description": "x", "input_schema": function["parameters"]}
    asked: Any = {"model": "tools", "max_tokens": 200, "tools": [tool], "tool_choice": {"type": "any"}}
    answer = anthropic_client.messages.create(messages=HELLO, **asked)
    assert answer.stop_reason == "tool_use" and answer.content[0].input["place"] in ("rome", "oslo")
    with anthropic_client.messages.stream(messages=HELLO, **asked) as stream:
        assert stream.get_final_message().content[0].input["place"] in ("rome", "oslo")
    result = {
        "type": "tool_result",
        "tool_use_id": answer.content[0].id,
        "content": [{"type": "text", "text": "sunny"}],
    }
    again: Any = [
        *HELLO,
        {"role": "assistant", "content": [answer.content[0].model_dump()]},
        {"role": "user", "content": [result, {"type": "text", "text": "and now?"}]},
    ]
    more = anthropic_client.messages.create(
        messages=again, **{**asked, "tool_choice": {"type": "none"}, "max_tokens": 3}
    )
    assert more.content[0].type == "text"


def test_anthropic_errors(anthropic_client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError, match="did you mean 'temperature'"):
        anthropic_client.messages.create(model="fake", max_tokens=3, messages=HELLO, extra_body={"temperatur": 1})
    with pytest.raises(anthropic.NotFoundError):
        anthropic_client.messages.create(model="claude", max_tokens=3, messages=HELLO)


def test_anthropic_formats_and_hints(anthropic_client: anthropic.Anthropic) -> None:
    form: Any = {"format": {"type": "json_schema", "schema": {"enum": ["x", "y"]}}}
    asked: Any = {"model": "fake", "max_tokens": 20, "messages": HELLO}
    answer = anthropic_client.messages.create(**asked, output_config=form, cache_control={"type": "ephemeral"})
    assert json.loads(answer.content[0].text) in ("x", "y")
    with pytest.raises(anthropic.BadRequestError, match="`output_config` has a format alone"):
        anthropic_client.messages.create(**asked, output_config={"effort": "low"})
    with pytest.raises(anthropic.BadRequestError, match=r"messages\[0\] has no content"):
        anthropic_client.messages.create(**{**asked, "messages": [{"role": "user"}]})


def test_anthropic_counts_what_is_too_long(anthropic_client: anthropic.Anthropic) -> None:
    long: Any = [{"role": "user", "content": "x" * 3000}]
    assert anthropic_client.messages.count_tokens(model="fake", messages=long).input_tokens > 3000
    with pytest.raises(anthropic.BadRequestError, match="context"):
        anthropic_client.messages.create(model="fake", max_tokens=1, messages=long)


@pytest.mark.parametrize(
    ("path", "status"), [("/v1/messages/count_tokens", 404), ("/v1/messages/batches", 404), ("/v1/messages", 405)]
)
def test_anthropic_errors_of_other_routes_have_its_form(server: RunningServer, path: str, status: int) -> None:
    answer = server.get(path) if status == 405 else server.post(path, {"model": "no", "messages": HELLO})
    told = answer.json()
    assert answer.status_code == status and told["type"] == "error" and told["error"].keys() == {"type", "message"}


@pytest.fixture(scope="module")
def ollama_client(server: RunningServer) -> Iterator[ollama.Client]:
    with ollama.Client(host=server.address) as made:
        yield made


def test_ollama_chat(ollama_client: ollama.Client, expected: Any) -> None:
    options = {"temperature": 0, "num_predict": 12, "num_ctx": 2048}
    answer = ollama_client.chat(model="fake", messages=HELLO, options=options)
    assert answer.message.content == expected.text and answer.done and answer.done_reason == "length"
    assert answer.eval_count == 12 and answer.prompt_eval_count == len(expected.prompt_token_ids[0])
    parts = list(ollama_client.chat(model="fake:latest", messages=HELLO, options=options, stream=True))
    assert "".join(part.message.content or "" for part in parts) == expected.text
    assert parts[-1].done and parts[-1].eval_count == 12
    answer = ollama_client.chat(model="fake", messages=HELLO, format={"enum": ["x", "y"]})
    assert json.loads(answer.message.content or "") in ("x", "y")


def test_ollama_generate(server: RunningServer, ollama_client: ollama.Client, expected: Any) -> None:
    options = {"temperature": 0, "num_predict": 12}
    assert ollama_client.generate(model="fake", prompt="hello world", options=options).response == expected.text
    lm = server.state.models.find("fake").lm
    assert lm is not None
    raw = ollama_client.generate(model="fake", prompt="hello world", raw=True, options={**options, "num_beams": 3})
    assert raw.response == lm.generate("hello world", max_new_tokens=12, num_beams=3).text


def test_ollama_tools(ollama_client: ollama.Client) -> None:
    answer = ollama_client.chat(model="tools", messages=HELLO, tools=[TOOL], options={"num_predict": 3})
    assert not answer.message.tool_calls


def test_ollama_models(ollama_client: ollama.Client) -> None:
    assert [one.model for one in ollama_client.list().models] == ["fake", "tools"]
    assert ollama_client.show("fake").capabilities == ["completion", "tools"]
    with pytest.raises(ollama.ResponseError, match="does not exist"):
        ollama_client.chat(model="llama3", messages=HELLO)
    with pytest.raises(ollama.ResponseError, match="tail-free"):
        ollama_client.chat(model="fake", messages=HELLO, options={"tfs_z": 0.5})


def test_ollama_errors_are_texts(server: RunningServer) -> None:
    for path in ("/api/show", "/api/nowhere", "/api/chat"):
        answer = server.post(path, {"model": "no", "messages": HELLO} if path == "/api/chat" else {"model": "no"})
        assert answer.status_code == 404 and isinstance(answer.json()["error"], str)


def test_ollama_ignores_nothing(ollama_client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="reads text alone"):
        ollama_client.chat(model="fake", messages=[{"role": "user", "content": "x", "images": [b"x"]}])
    with pytest.raises(ollama.ResponseError, match="`stream` stands beside the options"):
        ollama_client.chat(model="fake", messages=HELLO, options={"stream": False})


def test_ollama_calls_that_are_none_are_refused(server: RunningServer) -> None:
    message = {"role": "assistant", "content": "", "tool_calls": [3]}
    assert "a tool call is" in server.post("/api/chat", {"model": "tools", "messages": [message]}).json()["error"]


def test_langchain(server: RunningServer, expected: Any) -> None:
    asked: Any = {"model": "fake", "base_url": f"{server.address}/v1", "api_key": "none", "max_tokens": 12}
    model = ChatOpenAI(**asked, temperature=0)
    assert model.invoke("hello world").content == expected.text
    assert "".join(str(chunk.content) for chunk in model.stream("hello world")) == expected.text
    assert model.invoke("hello world").usage_metadata["output_tokens"] == 12
    assert ChatOpenAI(**asked, extra_body={"num_beams": 3}).invoke("hello world").content
    bound = ChatOpenAI(**{**asked, "model": "tools", "max_tokens": 200}).bind_tools([TOOL], tool_choice="weather")
    assert bound.invoke("hello").tool_calls[0]["args"]["place"] in ("rome", "oslo")


def test_decisions(server: RunningServer) -> None:
    questions = {
        "which": {
            "type": "choice",
            "instructions": "Which?",
            "criteria": {"cat": "a cat", "dog": None, "cow": "a cow"},
        },
        "much": {"type": "score", "instructions": "How much?", "criteria": ["little", "some", "much"]},
        "is": {"type": "noul", "instructions": "Is it?"},
    }
    answer = server.post("/v1/systemone", {"model": "fake", "state": {"it": "meows"}, "questions": questions})
    told = answer.json()["answers"]
    assert answer.status_code == 200 and answer.json()["usage"]["output_tokens"] == 0
    assert math.isclose(sum(told["which"]["probabilities"].values()), 1.0) and told["which"]["choice"] in (
        "cat",
        "dog",
        "cow",
    )
    assert 0 <= told["much"]["score"] <= 2 and told["much"]["legend"] == {"0": "little", "1": "some", "2": "much"}
    assert 0 <= told["is"]["noul"] <= 1
    lm = server.state.models.find("fake").lm
    assert lm is not None and lm.tokenizer is not None
    text = '{"it": "meows"}\n\nWhich?\nA. cat: a cat\nB. dog\nC. cow: a cow\nAnswer with one letter only.'
    ids = [lm.tokenizer.encode(letter, add_special_tokens=False)[0] for letter in "ABC"]
    scores = lm.generate([{"role": "user", "content": text}], max_new_tokens=1, logprobs=160).logprobs[0][0].top
    by_id = dict(scores)
    masses = [math.exp(by_id[token]) for token in ids]
    assert list(told["which"]["probabilities"].values()) == pytest.approx(
        [mass / sum(masses) for mass in masses], rel=1e-4
    )
    for bad in ({"questions": {}}, {"questions": {"a": {"type": "maybe"}}}, {"nonsense": 1}, {"state": 3}):
        assert server.post("/v1/systemone", {"state": "x", "questions": questions, **bad}).status_code == 400

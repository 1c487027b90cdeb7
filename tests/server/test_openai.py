"""The openai package against a real server: chats, completions, streams, and every setting by its own name."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.engine.fakes import FakePair
from tests.server.running import HELLO, RunningServer, make_fake_lm, make_layered_lm


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    models = {"fake": make_fake_lm(), "layers": make_layered_lm(), "tools": make_fake_lm(has_tools=True)}
    with RunningServer(models, max_rows=16) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as made:
        yield made


def find_lm(server: RunningServer, name: str) -> Any:
    return server.state.models.find(name).lm


def test_models_are_listed(client: openai.OpenAI) -> None:
    assert [one.id for one in client.models.list()] == ["fake", "layers", "tools"]
    assert client.models.retrieve("layers").id == "layers"
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.models.retrieve("gpt-4")


@pytest.mark.parametrize(
    ("name", "asked", "alone"),
    [
        ("fake", {"temperature": 0}, {}),
        ("fake", {"temperature": 0.8, "seed": 7}, {"do_sample": True, "temperature": 0.8, "seed": 7, "top_k": 0}),
        ("fake", {"seed": 7}, {"do_sample": True, "seed": 7, "top_k": 0}),
        ("fake", {"seed": 3, "top_p": 0.5}, {"do_sample": True, "seed": 3, "top_p": 0.5, "top_k": 0}),
        ("fake", {"num_beams": 4}, {"num_beams": 4}),
        ("fake", {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5}, ...),
        ("fake", {"penalty_alpha": 0.6, "top_k": 4}, ...),
        ("layers", {"dola_layers": "low"}, ...),
        ("layers", {"temperature": 0, "guidance_scale": 1.5, "negative_prompt": "the cat"}, ...),
        ("fake", {"temperature": 0, "prompt_lookup_num_tokens": 3}, ...),
        ("fake", {"temperature": 0, "repetition_penalty": 1.3, "no_repeat_ngram_size": 2}, ...),
        ("fake", {"temperature": 0, "frequency_penalty": 0.5, "presence_penalty": 0.5}, ...),
        ("fake", {"seed": 5, "min_p": 0.1, "xtc_probability": 0.5}, ...),
        ("fake", {"seed": 5, "watermarking_config": {"bias": 2.5, "seeding_scheme": "lefthash"}}, ...),
        ("fake", {"num_beams": 3, "force_words": ["cat"]}, {"num_beams": 3, "force_words_ids": [[*b"cat"]]}),
    ],
)
def test_an_answer_is_what_generate_gives(
    server: RunningServer, client: openai.OpenAI, name: str, asked: dict[str, Any], alone: Any
) -> None:
    lm = find_lm(server, name)
    if alone is ...:
        alone = {key: value for key, value in asked.items() if key != "temperature"}
        alone |= {"do_sample": True, "top_k": 0} if "seed" in asked else {}
        if "negative_prompt" in alone:
            alone["negative_prompt"] = lm.encode(alone["negative_prompt"])[0]
    if "force_words_ids" in alone:
        alone["force_words_ids"] = [lm.tokenizer.encode("cat", add_special_tokens=False)]
    expected = lm.generate(HELLO, max_new_tokens=12, **alone)
    answer = client.chat.completions.create(model=name, messages=HELLO, max_tokens=12, extra_body=asked)
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].finish_reason == ("length" if expected.finish_reasons[0] == "length" else "stop")
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len(expected.token_ids[0])
    assert answer.usage.prompt_tokens == len(expected.prompt_token_ids[0])
    stream = client.chat.completions.create(
        model=name, messages=HELLO, max_tokens=12, stream=True, stream_options={"include_usage": True}, extra_body=asked
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected.text
    assert chunks[-1].usage is not None and not chunks[-1].choices
    assert chunks[-1].usage.total_tokens == answer.usage.total_tokens
    assert chunks[-2].choices[0].finish_reason == answer.choices[0].finish_reason


@pytest.mark.parametrize(
    "asked",
    [
        {"temperature": 0},
        {"temperature": 0, "logprobs": 1},
        {"temperature": 0, "stop": ["no such text"]},
        {"temperature": 0, "prompt_lookup_num_tokens": 3},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"num_beams": 3},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"num_beams": 3, "force_words": ["cat"]},
    ],
    ids=str,
)
def test_a_text_that_a_forced_end_cuts_was_too_long(client: openai.OpenAI, asked: dict[str, Any]) -> None:
    settings = {"forced_eos_token_id": 2, "min_new_tokens": 5, "return_token_ids": True, **asked}
    ask: Any = {"model": "fake", "prompt": "hello world", "max_tokens": 6, "extra_body": settings}
    choice: Any = client.completions.create(**ask).choices[0]
    assert choice.token_ids[-1] == 2 and len(choice.token_ids) == 6
    assert choice.finish_reason == "length"
    *_, last = client.completions.create(**ask, stream=True)
    assert last.choices[0].finish_reason == "length"
    settings |= {"forced_eos_token_id": -1, "suppress_tokens": [2]}
    assert client.completions.create(**ask).choices[0].finish_reason == "length"


def test_what_was_found_in_shared_blocks_is_counted(client: openai.OpenAI) -> None:
    prompt = "the cat sat on the mat " * 20
    counts = []
    for _ in range(2):
        usage = client.completions.create(model="fake", prompt=prompt, max_tokens=2).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        counts.append(usage.prompt_tokens_details.cached_tokens)
    assert counts[0] == 0 and 0 < (counts[1] or 0) < usage.prompt_tokens


def test_several_answers(server: RunningServer, client: openai.OpenAI) -> None:
    lm = find_lm(server, "fake")
    expected = lm.generate(HELLO, max_new_tokens=6, do_sample=True, seed=1, top_k=0, num_return_sequences=3)
    answer = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=6, seed=1, n=3)
    assert [one.message.content for one in answer.choices] == expected.texts
    assert [one.index for one in answer.choices] == [0, 1, 2]
    assert answer.usage is not None and answer.usage.completion_tokens == sum(map(len, expected.token_ids))
    texts = ["", "", ""]
    for chunk in client.chat.completions.create(model="fake", messages=HELLO, max_tokens=6, seed=1, n=3, stream=True):
        for one in chunk.choices:
            texts[one.index] += one.delta.content or ""
    assert texts == expected.texts
    same = client.chat.completions.create(model="fake", messages=HELLO, max_tokens=6, temperature=0, n=2)
    assert [one.message.content for one in same.choices] == [lm.generate(HELLO, max_new_tokens=6).text] * 2
    beams = client.chat.completions.create(
        model="fake", messages=HELLO, max_tokens=6, n=2, extra_body={"use_beam_search": True}
    )
    expected = lm.generate(HELLO, max_new_tokens=6, num_beams=2, num_return_sequences=2)
    assert [one.message.content for one in beams.choices] == expected.texts


def test_logprobs(server: RunningServer, client: openai.OpenAI) -> None:
    lm = find_lm(server, "fake")
    expected = lm.generate(HELLO, max_new_tokens=4, logprobs=3)
    answer = client.chat.completions.create(
        model="fake", messages=HELLO, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    told = answer.choices[0].logprobs
    assert told is not None and told.content is not None
    assert [one.logprob for one in told.content] == pytest.approx([one.logprob for one in expected.logprobs[0]])
    assert "".join(one.token for one in told.content) == expected.text
    assert [len(one.top_logprobs) for one in told.content] == [3] * 4
    assert bytes(told.content[0].bytes or []).decode() == told.content[0].token
    streamed = [
        one
        for chunk in client.chat.completions.create(
            model="fake", messages=HELLO, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3, stream=True
        )
        if chunk.choices and chunk.choices[0].logprobs is not None
        for one in chunk.choices[0].logprobs.content or []
    ]
    assert streamed == told.content
    beams: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 4}
    expected = lm.generate(HELLO, logprobs=2, **beams)
    answer = client.chat.completions.create(
        model="fake", messages=HELLO, max_tokens=4, logprobs=True, top_logprobs=2, extra_body={"num_beams": 3}
    )
    told = answer.choices[0].logprobs
    assert told is not None and told.content is not None
    assert [one.logprob for one in told.content] == pytest.approx([one.logprob for one in expected.logprobs[0]])
    text = client.completions.create(
        model="fake", prompt=["hello"], logprobs=2, n=1, best_of=3, max_tokens=4, extra_body={"num_beams": 3}
    )
    expected = lm.generate("hello", logprobs=2, **beams)
    assert text.choices[0].text == expected.text and text.choices[0].logprobs is not None
    assert text.choices[0].logprobs.token_logprobs == pytest.approx([one.logprob for one in expected.logprobs[0]])


def test_completions(server: RunningServer, client: openai.OpenAI) -> None:
    lm = find_lm(server, "fake")
    prompts = ["the cat and", "hello"]
    answer = client.completions.create(model="fake", prompt=prompts, temperature=0, n=1)
    alone = [lm.generate(prompt, max_new_tokens=16) for prompt in prompts]
    assert [one.text for one in answer.choices] == [one.text for one in alone]
    ids = lm.encode(prompts)
    by_ids = client.completions.create(model="fake", prompt=ids, temperature=0)
    assert [one.text for one in by_ids.choices] == [one.text for one in alone]
    assert answer.usage is not None and answer.usage.prompt_tokens == sum(map(len, ids))
    texts = ["", ""]
    for chunk in client.completions.create(model="fake", prompt=prompts, temperature=0, stream=True, echo=True):
        for one in chunk.choices:
            texts[one.index] += one.text
    assert texts == [prompt + one.text for prompt, one in zip(prompts, alone, strict=True)]


def test_a_prompt_is_scored(server: RunningServer, client: openai.OpenAI) -> None:
    """What evaluation harnesses send: echo, no new token, log-probabilities."""
    lm = find_lm(server, "fake")
    expected = lm.generate("hello cat", max_new_tokens=1, prompt_logprobs=1)
    answer = client.completions.create(
        model="fake", prompt="hello cat", max_tokens=0, echo=True, logprobs=1, temperature=0
    )
    told = answer.choices[0].logprobs
    assert answer.choices[0].text == "hello cat" and told is not None and told.token_logprobs is not None
    assert told.token_logprobs[0] is None and "".join(told.tokens or []) == "hello cat"
    found = [one.logprob for one in expected.prompt_logprobs[0][1:]]
    assert told.token_logprobs[1:] == pytest.approx(found)
    assert answer.usage is not None and answer.usage.completion_tokens == 0


def test_the_likeliest_of_several(server: RunningServer, client: openai.OpenAI) -> None:
    lm = find_lm(server, "fake")
    drawn = lm.generate("hello", max_new_tokens=5, do_sample=True, top_k=0, seed=9, num_return_sequences=4, logprobs=0)
    means = [sum(one.logprob for one in row) / len(row) for row in drawn.logprobs]
    best = sorted(range(4), key=lambda row: -means[row])[:2]
    answer = client.completions.create(model="fake", prompt="hello", max_tokens=5, seed=9, n=2, best_of=4)
    assert [one.text for one in answer.choices] == [drawn.texts[row] for row in best]
    assert answer.choices[0].logprobs is None


def test_stops_and_biases(server: RunningServer, client: openai.OpenAI) -> None:
    lm = find_lm(server, "fake")
    whole = lm.generate("hello", max_new_tokens=40, eos_token_id=None)
    stop = whole.text[10:13]
    answer = client.completions.create(
        model="fake",
        prompt="hello",
        max_tokens=40,
        temperature=0,
        stop=[stop, "never"],
        extra_body={"ignore_eos": True},
    )
    assert answer.choices[0].text == whole.text[: whole.text.index(stop)] and answer.choices[0].finish_reason == "stop"
    token = whole.token_ids[0][0]
    for bias in ({str(token): -100}, [[token, False]]):
        other = server.post(
            "/v1/completions",
            {"model": "fake", "prompt": "hello", "temperature": 0, "logit_bias": bias, "return_token_ids": True},
        ).json()
        assert other["choices"][0]["token_ids"][0] != token
    ended = server.post(
        "/v1/completions",
        {"model": "fake", "prompt": "hello", "temperature": 0, "stop_token_ids": [token], "return_token_ids": True},
    ).json()
    assert ended["choices"][0]["token_ids"] == [token] and ended["choices"][0]["finish_reason"] == "stop"
    allowed = server.post(
        "/v1/completions",
        {
            "model": "fake",
            "prompt": "hello",
            "allowed_token_ids": [10, 11, 12],
            "return_token_ids": True,
            "ignore_eos": True,
        },
    ).json()
    assert set(allowed["choices"][0]["token_ids"]) <= {10, 11, 12}


def test_structured_answers(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="fake",
        messages=HELLO,
        max_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "it", "schema": schema}},
    )
    assert json.loads(answer.choices[0].message.content or "")["a"] in ("x", "y")
    for asked in ({"guided_choice": ["cat", "dog"]}, {"structured_outputs": {"choice": ["cat", "dog"]}}):
        answer = client.chat.completions.create(model="fake", messages=HELLO, extra_body=asked)
        assert answer.choices[0].message.content in ("cat", "dog")
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        client.chat.completions.create(
            model="fake", messages=HELLO, extra_body={"json_schema": {"type": "array", "uniqueItems": True}}
        )


@pytest.mark.parametrize("skips", [True, False])
def test_offsets_are_places_in_the_text(server: RunningServer, client: openai.OpenAI, skips: bool) -> None:
    """Of characters that are several tokens, and beside special tokens that the text leaves out or has."""
    asked: Any = {"model": "fake", "prompt": "<s>caf\u00e9 \u20ac \U0001f600 the</s> cat", "max_tokens": 8, "seed": 3}
    asked |= {"echo": True, "logprobs": 0, "extra_body": {"skip_special_tokens": skips, "ignore_eos": True}}
    one = client.completions.create(**asked).choices[0]
    assert one.text.startswith("caf\u00e9 \u20ac \U0001f600 the cat" if skips else asked["prompt"])
    told = one.logprobs
    assert told is not None and told.tokens is not None and told.text_offset is not None
    is_whole = ["\ufffd" not in token and not (skips and token in ("<s>", "</s>")) for token in told.tokens]
    pairs = list(zip(told.text_offset, told.tokens, is_whole, strict=True))
    prompt = find_lm(server, "fake").tokenizer.encode(asked["prompt"])
    for offset, token, whole in pairs[: len(prompt)]:
        assert not whole or one.text[offset : offset + len(token)] == token


def test_a_message_is_continued(server: RunningServer) -> None:
    lm = find_lm(server, "fake")
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "the cat"}]
    answer = server.post(
        "/v1/chat/completions",
        {"model": "fake", "messages": messages, "temperature": 0, "max_tokens": 5, "continue_final_message": True},
    ).json()
    prompt = lm.tokenizer.encode("user: hello\nassistant: the cat", add_special_tokens=False)
    assert answer["choices"][0]["message"]["content"] == lm.generate(prompt, max_new_tokens=5).text


async def test_asynchronous_clients(server: RunningServer) -> None:
    expected = find_lm(server, "fake").generate(HELLO, max_new_tokens=10).text
    async with openai.AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none") as client:
        stream = await client.chat.completions.create(
            model="fake", messages=HELLO, max_tokens=10, temperature=0, stream=True
        )
        text = "".join([chunk.choices[0].delta.content or "" async for chunk in stream])
        assert text == expected


@pytest.mark.parametrize(
    ("asked", "param", "message"),
    [
        ({"num_beams": 3, "top_p": 0.9}, "top_p", "not drawn with `num_beams` and no `temperature`"),
        ({"use_beam_search": True, "temperature": 0.7}, "temperature", "not drawn with `use_beam_search`"),
        ({"penalty_alpha": 0.6, "temperature": 0.7}, "penalty_alpha", "pass `temperature=0`, or leave `penalty_alpha`"),
        ({"num_beams": 3, "force_words": ["cat"], "temperature": 0.7}, "force_words", "set `temperature=0`"),
        ({"num_beams": 3, "mirostat": 2}, "mirostat", "`mirostat` would have no effect"),
        ({"mirostat": 2, "prompt_lookup_num_tokens": 3}, "mirostat", "`mirostat` does not go with a drafter"),
        ({"length_penalty": 2.0}, "length_penalty", "read by beam search alone; send `num_beams`"),
        ({"stop_token_ids": [160]}, "stop_token_ids", "ids from 0 to 159, not 160"),
        ({"negative_prompt": "the cat"}, "negative_prompt", "`guidance_scale`"),
        ({"n": 2, "best_of": 1}, "best_of", "`n`=2"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs", "`structured_outputs` can't be kept"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"uniqueItems": True}}}},
            "response_format",
            "uniqueItems",
        ),
    ],
)
def test_refusals_speak_of_what_was_sent(
    client: openai.OpenAI, asked: dict[str, Any], param: str, message: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=message) as error:
        client.completions.create(model="fake", prompt="hello", max_tokens=5, extra_body=asked)
    assert error.value.param == param
    said = str(error.value).replace(param, "")
    assert not any(word in said for word in ("do_sample", "_ids", "_tau", "new_tokens"))


def test_what_a_refusal_advises_is_taken(client: openai.OpenAI) -> None:
    for body in ({"num_beams": 3, "top_p": 0.9, "temperature": 0.7}, {"penalty_alpha": 0.6, "temperature": 0}):
        assert client.completions.create(model="fake", prompt="hello", max_tokens=2, extra_body=body).choices


def test_an_encoder_s_prompt_takes_no_room_from_the_text() -> None:
    lm = make_fake_lm(FakePair(vocab=160, max_context=20, longest_source=30))
    lm.generation_config.eos_token_id, lm.generation_config.decoder_start_token_id = None, 1
    with RunningServer({"pair": lm}) as running:

        def ask(length: int, most: int) -> httpx.Response:
            prompt = [5 + place % 7 for place in range(length)]
            return running.post("/v1/completions", {"model": "pair", "prompt": prompt, "max_tokens": most})

        for length in (1, 19, 25, 30):
            assert ask(length, 19).json()["usage"]["completion_tokens"] == 19
            assert "at most 19 fit" in ask(length, 20).json()["error"]["message"]
        assert "its encoder takes at most 30" in ask(31, 5).json()["error"]["message"]


def test_a_model_that_searches_by_its_own_settings_draws_only_where_it_is_told_to() -> None:
    lm = make_fake_lm()
    lm.generation_config.num_beams = 3
    with RunningServer({"searching": lm}) as running:
        body = {"model": "searching", "prompt": "hello", "max_tokens": 8}
        texts = [running.post("/v1/completions", body).json()["choices"][0]["text"] for _ in range(3)]
        assert set(texts) == {lm.generate("hello", max_new_tokens=8, do_sample=False).text}
        several = running.post("/v1/completions", {**body, "n": 3}).json()["choices"]
        assert len({one["text"] for one in several}) == 3 and several[0]["text"] == texts[0]
        drawn = [running.post("/v1/completions", {**body, "temperature": 2.0}).json() for _ in range(8)]
        assert len({one["choices"][0]["text"] for one in drawn}) > 1


def test_chats_need_a_template() -> None:
    lm = make_fake_lm()
    assert lm.tokenizer is not None
    lm.tokenizer.chat_template = None
    with RunningServer({"plain": lm}) as running:
        assert "prompt of /v1/completions" in running.chat(model="plain").json()["error"]["message"]

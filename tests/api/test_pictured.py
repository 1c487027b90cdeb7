"""Chats with pictures: by the short way, in the engine, in pipelines, and from a server's clients."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import anthropic
import ollama
import openai
import pytest
import torch

pytest.importorskip("PIL", reason="Pillow decodes pictures")

import transformers
from tests.models.adapters.pictured import save_captioner, save_pictured
from tests.pictures.files import encode_picture, make_bomb, make_picture, make_uri
from tests.server.running import RunningServer

import unspool
from unspool.errors import InputError, SettingError, UnsupportedError

FAMILIES = ("llava", "qwen2_vl", "gemma3", "idefics3")
FILE = encode_picture(make_picture())
ASK = "what is this?"
CHAT: list[dict[str, Any]] = [
    {"role": "user", "content": [{"type": "image", "image": FILE}, {"type": "text", "text": ASK}]}
]
TWO: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": [
            {"type": "text", "text": "compare "},
            {"type": "image", "image": FILE},
            {"type": "text", "text": " with "},
            {"type": "image", "image": make_picture(1, 50, 30)},
        ],
    }
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Any:
    place = tmp_path_factory.mktemp("pictured")

    @cache
    def find(name: str) -> Path:
        return (save_captioner if name == "git" else lambda folder: save_pictured(name, folder))(place / name)

    return find


@pytest.mark.parametrize("name", FAMILIES)
def test_chats_are_answered_as_transformers_does(folders: Any, name: str) -> None:
    lm, processor = unspool.load(folders(name)), unspool.AutoProcessor.from_pretrained(folders(name))
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(folders(name)).eval()
    both = lm.generate([CHAT, TWO], max_new_tokens=8)
    for row, chat in enumerate((CHAT, TWO)):
        inputs = processor.apply_chat_template(chat, add_generation_prompt=True)
        expected = theirs.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert both.token_ids[row] == expected.tolist()
        assert both.prompt_token_ids[row] == inputs["input_ids"][0].tolist()
        assert lm.generate(inputs, max_new_tokens=8).token_ids[0] == expected.tolist()
    assert "".join(lm.stream(CHAT, max_new_tokens=8)) == both.texts[0]
    assert type(lm.model).__name__ == "Decoder" and lm.generate("hello", max_new_tokens=3).token_ids


@pytest.mark.parametrize("name", ("qwen2_vl", "gemma3"))
def test_the_engine_answers_pictures_beside_texts(folders: Any, name: str) -> None:
    lm = unspool.load(folders(name))
    prompts: list[Any] = [CHAT, "hello", TWO, [1, 2, 3], CHAT]
    with unspool.Engine(lm, max_rows=8) as engine:
        found = [request.result().token_ids for request in [engine.submit(one, max_new_tokens=6) for one in prompts]]
        beams = engine.submit(CHAT, max_new_tokens=6, num_beams=3).result().token_ids
    assert found == [lm.generate(one, max_new_tokens=6).token_ids for one in prompts]
    assert beams == lm.generate(CHAT, max_new_tokens=6, num_beams=3).token_ids


def test_models_and_processors_by_their_names(folders: Any) -> None:
    model = unspool.AutoModelForImageTextToText.from_pretrained(folders("llava"))
    processor = unspool.AutoProcessor.from_pretrained(folders("llava"))
    inputs = processor(images=FILE, text=f"<image>{ASK}").to(model.device)
    made = model.generate(**inputs, max_new_tokens=5)
    assert made.shape[1] == inputs["input_ids"].shape[1] + 5
    lm = model.as_language_model()
    assert lm.generate(f"<image>{ASK}", images=FILE, max_new_tokens=5).token_ids[0] == made[0, -5:].tolist()
    assert lm.generate(ASK, chat=True, images=[FILE], max_new_tokens=5).token_ids == (
        lm.generate(CHAT, max_new_tokens=5).token_ids
    )
    with pytest.raises(OSError, match="reads no pictures"):
        unspool.AutoModelForImageTextToText.from_pretrained("smollm2-135m")


def test_pipelines(folders: Any) -> None:
    lm = unspool.load(folders("llava"))
    text = lm.generate(CHAT, max_new_tokens=5).text
    pipe = unspool.pipeline("image-text-to-text", model=str(folders("llava")))
    assert pipe(text=CHAT, max_new_tokens=5, return_full_text=False) == [{"input_text": CHAT, "generated_text": text}]
    bare = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": ASK}]}]
    assert pipe(FILE, bare, max_new_tokens=5)[0]["generated_text"][-1] == {"role": "assistant", "content": text}
    assert len(pipe(images=[FILE, FILE], text=[f"<image>{ASK}"] * 2, max_new_tokens=2)) == 2
    describe = unspool.pipeline("image-to-text", model=str(folders("llava")))
    only = [{"role": "user", "content": [{"type": "image", "image": FILE}]}]
    assert describe(FILE, max_new_tokens=5) == [{"generated_text": lm.generate(only, max_new_tokens=5).text}]
    with pytest.raises(InputError, match="1 images were given and the chat has 0 places"):
        pipe(FILE, [{"role": "user", "content": "hello"}])


def test_a_captioner(folders: Any) -> None:
    model = unspool.AutoModelForCausalLM.from_pretrained(folders("git"))
    pixels = unspool.AutoProcessor.from_pretrained(folders("git"))(images=FILE)["pixel_values"]
    expected = transformers.GitForCausalLM.from_pretrained(folders("git")).generate(
        pixel_values=pixels, max_new_tokens=6, num_beams=2
    )
    assert model.generate(pixel_values=pixels, max_new_tokens=6, num_beams=2).tolist() == expected.tolist()
    pipe = unspool.pipeline("image-to-text", model=str(folders("git")))
    written = model.as_language_model().tokenizer.decode(expected[0].tolist(), skip_special_tokens=True)
    assert pipe([FILE], max_new_tokens=6, num_beams=2) == [[{"generated_text": written}]]


def test_an_object_of_transformers_is_not_stepped_in_an_engine(folders: Any) -> None:
    with (
        unspool.Engine(unspool.load(folders("git"))) as engine,
        pytest.raises(UnsupportedError, match="whose passes no engine shares"),
    ):
        engine.submit(images=FILE, max_new_tokens=2)


def test_what_can_not_be(folders: Any) -> None:
    lm = unspool.load(folders("llava"))
    broken = [{"role": "user", "content": [{"type": "image", "image": make_bomb()}]}]
    with pytest.raises(InputError, match="pixels"):
        lm.generate(broken)
    with pytest.raises(InputError, match="0 places for what pictures"):
        lm.generate("no mark of a picture", images=FILE)
    with pytest.raises(InputError, match="empty list"):
        lm.generate("<image>", images=[])
    with pytest.raises(SettingError, match="beside one text"):
        lm.generate(CHAT, images=FILE)
    with pytest.raises(SettingError, match="two prompts"):
        lm.generate(CHAT, input_ids=torch.tensor([[1]]))
    with pytest.raises(UnsupportedError, match="reads text alone"):
        unspool.load("smollm2-135m").generate(CHAT)


# --- a server -----------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def server(folders: Any) -> Iterator[RunningServer]:
    with RunningServer({"seeing": unspool.load(folders("qwen2_vl"))}) as running:
        yield running
        running.wait_until_idle()


@pytest.fixture(scope="module")
def expected(server: RunningServer) -> str:
    lm = server.state.models.find("seeing").lm
    assert lm is not None
    return str(lm.generate(CHAT, max_new_tokens=8).text)


@pytest.fixture(scope="module")
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.address}/v1", api_key="none", max_retries=0) as made:
        yield made


def say(uri: str) -> list[Any]:
    parts = [{"type": "image_url", "image_url": {"url": uri}}, {"type": "text", "text": ASK}]
    return [{"role": "user", "content": parts}]


def test_the_openai_client(client: openai.OpenAI, expected: str) -> None:
    asked: dict[str, Any] = {"model": "seeing", "temperature": 0, "max_tokens": 8}
    answer = client.chat.completions.create(messages=say(make_uri(FILE)), **asked)
    assert answer.choices[0].message.content == expected and answer.usage.prompt_tokens > 8
    chunks = client.chat.completions.create(messages=say(make_uri(FILE)), stream=True, **asked)
    assert "".join(one.choices[0].delta.content or "" for one in chunks if one.choices) == expected
    parts = [{"type": "input_image", "image_url": make_uri(FILE)}, {"type": "input_text", "text": ASK}]
    response = client.responses.create(
        model="seeing", input=[{"role": "user", "content": parts}], max_output_tokens=8, temperature=0
    )
    assert response.output_text == expected


def test_the_anthropic_client(server: RunningServer, expected: str) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(FILE).decode()}
    messages: Any = [{"role": "user", "content": [{"type": "image", "source": source}, {"type": "text", "text": ASK}]}]
    with anthropic.Anthropic(base_url=server.address, api_key="none", max_retries=0) as made:
        answer = made.messages.create(model="seeing", max_tokens=8, messages=messages, extra_body={"temperature": 0})
        counted = made.messages.count_tokens(model="seeing", messages=messages)
    assert answer.content[0].text == expected and counted.input_tokens == answer.usage.input_tokens


def test_the_ollama_client(server: RunningServer, expected: str) -> None:
    picture = base64.b64encode(FILE).decode()
    options = {"temperature": 0, "num_predict": 8}
    message = {"role": "user", "content": ASK, "images": [picture]}
    with ollama.Client(host=server.address) as client:
        assert client.chat(model="seeing", messages=[message], options=options).message.content == expected
        assert client.generate(model="seeing", prompt=ASK, images=[picture], options=options).response == expected


@pytest.mark.parametrize(
    ("uri", "why"),
    [
        ("/etc/passwd", "a picture is a data: URI"),
        ("https://example.com/a.png", "nothing is fetched from there"),
        (make_uri(make_bomb()), "pixels"),
        (make_uri(b"text"), "no picture in a format"),
        (make_uri(FILE[:100]), "damaged"),
    ],
)
def test_a_server_refuses_what_is_no_picture(client: openai.OpenAI, uri: str, why: str) -> None:
    with pytest.raises(openai.BadRequestError, match=why):
        client.chat.completions.create(model="seeing", messages=say(uri), max_tokens=4)


def test_a_server_bounds_the_number_of_pictures(client: openai.OpenAI) -> None:
    messages = [{"role": "user", "content": say(make_uri(FILE))[0]["content"][:1] * 17}]
    with pytest.raises(openai.BadRequestError, match="17 pictures; at most 16"):
        client.chat.completions.create(model="seeing", messages=messages, max_tokens=4)

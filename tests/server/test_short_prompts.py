"""The field `compress`: prompts are shortened by the served model's losses, and read as if they had been sent so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

import unspool
from tests.compression.cases import GOLDENS
from tests.server.running import RunningServer

PIER = "The pier of Lisbon was built in 1843, and every ledger of the harbour says so again. " * 2
BREAD = "It took 91 days to find the compass that Stefan guarded near the old bridge of York."
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


@pytest.fixture(scope="module")
def lm() -> unspool.LanguageModel:
    lm = unspool.load(GOLDENS / "models" / "llama", device="cpu")
    lm.tokenizer.chat_template = TEMPLATE
    return lm


@pytest.fixture(scope="module")
def server(lm: unspool.LanguageModel) -> Iterator[RunningServer]:
    with RunningServer({"llama": lm}, has_engine=False) as running:
        yield running
        running.wait_until_idle()


def ask(server: RunningServer, route: str, **body: Any) -> httpx.Response:
    asked = {"model": "llama", "max_tokens": 6, "temperature": 0, "return_token_ids": True, **body}
    return httpx.post(f"{server.address}/v1/{route}", json=asked, timeout=60)


def test_a_completion_reads_the_short_prompt(server: RunningServer, lm: unspool.LanguageModel) -> None:
    options = {"rate": 0.4, "window": 16, "question": "When?", "keep_digits": True}
    made = ask(server, "completions", prompt=PIER, compress=options)
    assert made.status_code == 200, made.text
    short = unspool.compress_prompt(lm, PIER, question="When?", rate=0.4, window=16, keep_digits=True)
    plain = ask(server, "completions", prompt=short.text)
    assert made.json()["choices"] == plain.json()["choices"]
    assert made.json()["usage"]["prompt_tokens"] == len(lm.encode(short.text)[0])
    assert "1843" in short.text


def test_the_last_part_of_a_message_is_the_question(server: RunningServer, lm: unspool.LanguageModel) -> None:
    parts = [{"type": "text", "text": text} for text in (PIER, BREAD, "When was the pier built?")]
    messages = [{"role": "system", "content": PIER}, {"role": "user", "content": parts}]
    made = ask(server, "chat/completions", messages=messages, compress={"rate": 0.3})
    assert made.status_code == 200, made.text
    short = unspool.compress_prompt(lm, [PIER, BREAD], question="When was the pier built?", rate=0.3)
    plain = ask(server, "chat/completions", messages=[messages[0], {"role": "user", "content": short.text}])
    assert made.json()["prompt_token_ids"] == plain.json()["prompt_token_ids"]
    assert short.text.endswith("When was the pier built?")


def test_rows_of_a_batch_have_the_same_field(lm: unspool.LanguageModel) -> None:
    from unspool.batch.answers import Answers
    from unspool.batch.lines import read_row

    short = unspool.compress_prompt(lm, PIER, rate=0.5)
    with unspool.Engine(lm) as engine:
        answers = Answers(lm, engine, name="llama")
        given = {"prompt": PIER, "compress": {"rate": 0.5}, "max_tokens": 3}
        work = answers.begin(read_row(1, given))
        answers.wait(work)
        assert work.order.prompts == [lm.encode(short.text)[0]]


@pytest.mark.parametrize(
    "body",
    [
        {"prompt": PIER, "compress": {"rate": 0}},
        {"prompt": PIER, "compress": {"rate": 1.5}},
        {"prompt": PIER, "compress": {"rates": 0.5}},
        {"prompt": PIER, "compress": 0.5},
        {"prompt": PIER, "compress": {"target_token": 100_000}},
        {"prompt": PIER, "compress": {"window": 1}},
        {"prompt": [5, 6, 7], "compress": {"rate": 0.5}},
        {"prompt": "", "compress": {"rate": 0.5}},
        {"messages": [{"role": "system", "content": PIER}], "compress": {"rate": 0.5}},
        {"messages": [{"role": "user", "content": ""}], "compress": {"rate": 0.5}},
        {"messages": [{"role": "user", "content": [PIER, "Who?"]}], "compress": {"question": "When?"}},
    ],
)
def test_what_can_not_be_is_refused(server: RunningServer, body: dict[str, Any]) -> None:
    made = ask(server, "chat/completions" if "messages" in body else "completions", **body)
    assert made.status_code in (400, 422)
    assert len(made.json()["error"]["message"]) > 20


def test_texts_are_shortened_with_every_loss(server: RunningServer, lm: unspool.LanguageModel) -> None:
    body = {"context": [PIER, BREAD], "instruction": "Answer.", "question": "When?", "rate": 0.4, "keep": ["ledger"]}
    made = server.post("/v1/compress", {"model": "llama", **body})
    assert made.status_code == 200, made.text
    found = made.json()
    own = unspool.compress_prompt(lm, [PIER, BREAD], "Answer.", "When?", 0.4, keep=["ledger"]).as_dict()
    assert found["compressed_prompt"] == own["compressed_prompt"]
    assert [one["is_kept"] for one in found["tokens"]] == [one["is_kept"] for one in own["tokens"]]
    for mine, theirs in zip(found["tokens"], own["tokens"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-3)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"context": ""},
        {"context": [3]},
        {"context": PIER, "rate": 2},
        {"context": PIER, "file": "x"},
        {"context": PIER, "instruction": 3},
    ],
)
def test_odd_texts_are_refused(server: RunningServer, body: dict[str, Any]) -> None:
    made = server.post("/v1/compress", {"model": "llama", **body})
    assert made.status_code == 400 and made.json()["error"]["message"]

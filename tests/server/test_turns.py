"""Long bodies and hard grammars of some clients, and quick requests of others, through sockets."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers

from tests.server.running import HELLO, RunningServer, make_fake_lm
from unspool.server.options import ClientLimits
from unspool.server.refusals import RequestError
from unspool.server.turns import Turns
from unspool.text import Tokenizer
from unspool.text.token_texts import list_byte_letters

CHAT = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


def make_byte_lm() -> Any:
    """A model that reads every byte, so that how few tokens a text has is known by its length."""
    lm = make_fake_lm()
    letters = list(list_byte_letters())[:158]
    vocabulary = {"<s>": 0, "</s>": 1, **{letter: place + 2 for place, letter in enumerate(letters)}}
    rest = [one for one in list_byte_letters() if one not in vocabulary]
    vocabulary |= {letter: 160 + place for place, letter in enumerate(rest)}
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    lm.tokenizer = Tokenizer(backend, special_tokens={"eos_token": "</s>"}, chat_template=CHAT)
    return lm


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    limits: dict[str, Any] = {
        "costly_bytes_per_client": 36 << 20,
        "text_bytes": 50_000,
        "token_ids": 5000,
        "logit_bias": 100,
    }
    with RunningServer({"bytes": make_byte_lm(), "fake": make_fake_lm()}, max_rows=4, **limits) as running:
        yield running
        running.wait_until_idle()


def make_bomb(place: int) -> dict[str, Any]:
    """A grammar that can't be compiled in time, another one for each place."""
    patterns = [{"type": "string", "pattern": f"^(.*x{place}.*){{60}}{one}$"} for one in range(26)]
    return {"type": "object", "properties": {"a": {"allOf": patterns}}, "required": ["a"]}


def ask_one_token(server: RunningServer) -> float:
    started = time.monotonic()
    answer = server.post("/v1/completions", {"model": "fake", "prompt": "hello", "max_tokens": 1})
    assert answer.status_code == 200, answer.text
    return time.monotonic() - started


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "x" * 3_900_000}),
        ("/v1/completions", {"prompt": ["é" * 1_000_000, "b"]}),
        ("/v1/completions", {"prompt": [3] * 1_000_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 3_900_000}]}),
        ("/v1/responses", {"input": "x" * 3_900_000}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "x" * 3_900_000}], "max_tokens": 1}),
        ("/api/chat", {"messages": [{"role": "user", "content": "x" * 3_900_000}]}),
        ("/api/generate", {"prompt": "x" * 60_000}),
        ("/v1/systemone", {"state": "x" * 900_000, "questions": {str(one): {"type": "noul"} for one in range(64)}}),
    ],
)
def test_a_prompt_that_can_not_fit_is_refused_by_its_length(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    """Nobody reads its tokens."""
    tokenizer = server.state.models.find("bytes").lm.tokenizer  # type: ignore[union-attr]
    encode, longest = tokenizer.encode, list[int]()  # type: ignore[union-attr]
    monkeypatch.setattr(
        tokenizer, "encode", lambda text, *a, **n: (longest.append(len(text)), encode(text, *a, **n))[1]
    )
    answer = server.post(path, {"model": "bytes", **body})
    assert answer.status_code == 400 and max(longest, default=0) < 10_000, answer.text
    assert "the model's context ends at 2048" in answer.text


def test_what_a_body_may_have_is_bounded(server: RunningServer) -> None:
    for path, body, told in (
        ("/tokenize", {"prompt": "x" * 60_000}, "60000 bytes"),
        ("/tokenize", {"messages": [{"role": "user", "content": "x" * 60_000}]}, "60001 bytes"),
        ("/v1/messages/count_tokens", {"messages": [{"role": "user", "content": "x" * 60_000}]}, "60001 bytes"),
        ("/detokenize", {"tokens": [1] * 6000}, "6000 token ids"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {str(one): 1 for one in range(101)}}, "101 entries"),
        ("/v1/completions", {"prompt": "a", "logit_bias": [[str(one), 1] for one in range(101)]}, "101 entries"),
        ("/v1/completions", {"prompt": "a", "logit_bias": [["x" * 5000, 1]]}, "4096 characters"),
        ("/v1/completions", {"prompt": "a", "bad_words_ids": [[one] for one in range(3, 104)]}, "101 entries"),
        ("/v1/completions", {"prompt": "a", "bad_words": ["a"] * 300}, "300"),
        ("/v1/chat/completions", {"messages": HELLO * 2049}, "2049 messages"),
        ("/v1/responses", {"input": HELLO * 2049}, "2049 messages"),
    ):
        answer = server.post(path, {"model": "bytes", **body})
        assert answer.status_code == 400 and told in answer.text, (path, answer.text[:300])
    assert server.post("/tokenize", {"model": "bytes", "prompt": "x" * 50_000}).json()["count"] == 50_000
    assert server.post("/detokenize", {"model": "bytes", "tokens": [5] * 5000}).status_code == 200


def test_a_neighbour_does_not_wait_for_long_prompts_and_hard_grammars(server: RunningServer) -> None:
    alone = min(ask_one_token(server) for _ in range(5))
    form = {"type": "json_object", "schema": make_bomb(1)}
    bomb = {"model": "fake", "messages": HELLO, "response_format": form, "max_tokens": 2}
    long = {"model": "fake", "prompt": "hello w " * 200_000}  # its tokens have to be read to know that it does not fit
    with ThreadPoolExecutor(9) as pool:
        flood = [pool.submit(httpx.post, f"{server.address}/v1/completions", json=long, timeout=600) for _ in range(8)]
        flood.append(pool.submit(httpx.post, f"{server.address}/v1/chat/completions", json=bomb, timeout=600))
        time.sleep(0.5)
        waits = sorted(ask_one_token(server) for _ in range(6))
        assert not all(one.done() for one in flood)  # they were at work meanwhile
        assert {one.result().status_code for one in flood} == {400}
    assert waits[3] < 20 * alone + 2 and waits[-1] < 20 * alone + 5, (alone, waits)


def test_too_much_at_once_is_answered_429() -> None:
    """Of one client; there is room again when it is done."""
    body = {"prompt": "hello w " * 6_000}
    with RunningServer({"fake": make_fake_lm()}, costly_bytes_per_client=150_000) as running:
        with ThreadPoolExecutor(24) as pool:
            answers = list(pool.map(lambda _: running.post("/v1/completions", body), range(24)))
        assert {one.status_code for one in answers} == {400, 429}
        full = next(one for one in answers if one.status_code == 429)
        assert full.headers["retry-after"] and full.json()["error"]["code"] == "too_many_requests"
        assert running.post("/v1/completions", body).status_code == 400


def test_a_grammar_that_was_refused_is_not_tried_again(server: RunningServer) -> None:
    form = {"type": "json_object", "schema": make_bomb(0)}
    body = {"model": "fake", "messages": HELLO, "response_format": form, "max_tokens": 2}
    first = server.post("/v1/chat/completions", body)
    started = time.monotonic()
    again = server.post("/v1/chat/completions", body)
    assert first.status_code == again.status_code == 400 and first.json() == again.json()
    assert "too complex" in first.text and time.monotonic() - started < 1.0


def test_loading_and_hearing_hold_up_nobody() -> None:
    """Those that wait for a model that is being loaded take no thread from the others."""
    lm, begun = make_fake_lm(), threading.Event()
    with RunningServer({"fake": make_fake_lm(), "slow": lm}) as running:
        served = running.state.models.find("slow")
        served.close()
        served.load = lambda: (begun.set(), time.sleep(2.0), lm)[-1]  # type: ignore[return-value, func-returns-value]
        body = {"model": "slow", "prompt": "hello", "max_tokens": 1}
        with ThreadPoolExecutor(40) as pool:
            waiting = [pool.submit(running.post, "/v1/completions", body) for _ in range(40)]
            assert begun.wait(10)
            assert ask_one_token(running) < 1.5
            assert {one.result().status_code for one in waiting} == {200}


# --- turns ------------------------------------------------------------------------------------------------------------
async def test_clients_take_turns() -> None:
    turns, order, go = Turns(ClientLimits(), threads=1), list[str](), threading.Event()

    def note(name: str) -> None:
        go.wait(10)
        order.append(name)

    names = [(client, f"{client}{place}") for client, count in (("a", 4), ("b", 2)) for place in range(count)]
    jobs = [turns.run(client, partial(note, name)) for client, name in names]
    tasks = [asyncio.create_task(one) for one in jobs]
    await asyncio.sleep(0.05)
    go.set()
    await asyncio.gather(*tasks)
    assert order == ["a0", "a1", "b0", "a2", "b1", "a3"] or order == ["a0", "b0", "a1", "b1", "a2", "a3"]


async def test_no_client_has_all_threads() -> None:
    turns, go = Turns(ClientLimits(), threads=2), threading.Event()
    held = [asyncio.create_task(turns.run("a", lambda: go.wait(10))) for _ in range(5)]
    await asyncio.sleep(0.05)
    assert await asyncio.wait_for(turns.run("b", lambda: "done"), 5) == "done"
    go.set()
    assert await asyncio.gather(*held) == [True] * 5


async def test_work_of_a_client_that_has_gone_is_not_begun_or_its_result_given_away() -> None:
    turns, go = Turns(ClientLimits(), threads=1), threading.Event()
    begun, given = list[str](), list[str]()

    def work(name: str) -> str:
        begun.append(name)
        go.wait(10)
        return name

    tasks = [asyncio.create_task(turns.run("a", partial(work, name), given.append)) for name in "xyz"]
    await asyncio.sleep(0.05)
    tasks[0].cancel()
    tasks[1].cancel()
    await asyncio.sleep(0.05)  # the loop tells the queue
    go.set()
    assert await tasks[2] == "z"
    await asyncio.sleep(0.05)
    assert begun == ["x", "z"] and given == ["x"]


async def test_errors_come_back_and_room_does() -> None:
    turns = Turns(ClientLimits(costly_bytes=100, costly_bytes_per_client=60))
    with pytest.raises(ZeroDivisionError):
        await turns.run("a", lambda: 1 / 0)
    with turns.enter("a", 50), turns.enter("b", 50):
        for client, weight in (("a", 11), ("a", 1), ("c", 1)):
            with pytest.raises(RequestError) as caught:
                turns.check(client, weight)
            assert caught.value.status == 429 and caught.value.retry_after
    with turns.enter("a", 1000):  # alone, anything that a body may be
        pass
    turns.check("c", 60)

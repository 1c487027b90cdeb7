"""Several models by name, loaded when they are asked for; applications that mount a server; what serve() refuses."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

import unspool
from tests.conformance.cases import load_model
from tests.engine.fakes import BLOCK_BYTES
from tests.server.running import RunningServer, make_fake_lm
from tests.server.test_life import make_slow
from unspool.errors import LoadError, ResourceError, SettingError
from unspool.server.models import Models, Served
from unspool.server.refusals import RequestError
from unspool.server.serving import serve

ENGINE = {"memory": BLOCK_BYTES * 100, "block_size": 16}


def make_served(name: str, size: int, loads: list[str], fails: bool = False) -> Served:
    def load() -> unspool.LanguageModel:
        loads.append(name)
        if fails:
            raise LoadError("the file is damaged")
        return make_fake_lm()

    return Served(name, load, (f"{name}-alias",), ENGINE, size)


def test_options_of_an_engine_are_refused_where_there_is_none() -> None:
    """A model of sounds alone has no engine; beside others the options are theirs."""
    lm = load_model("whisper")
    with pytest.raises(SettingError, match="`memory`, `block_size` can't be set for ears: it transcribes"):
        Served("ears", lambda: lm, (), ENGINE, is_alone=True).open()
    for served in (
        Served("ears", lambda: lm, (), {"max_waiting": 5}, is_alone=True),
        Served("ears", lambda: lm, (), ENGINE),
    ):
        served.open()
        assert served.engine is None and served.is_loaded


def test_models_make_room_for_each_other() -> None:
    loads: list[str] = []
    models = Models([make_served(name, 40, loads) for name in "abc"], memory=100)

    async def main() -> None:
        a = await models.borrow("a")
        b = await models.borrow("b-alias")
        assert a.is_loaded and b.is_loaded and loads == ["a", "b"]
        with pytest.raises(RequestError, match="does not fit") as refused:
            await models.borrow("c")
        assert refused.value.status == 503 and refused.value.retry_after
        models.give_back(b)
        models.give_back(a)
        models.give_back(await models.borrow("b"))
        c = await models.borrow("c")  # a was unused longest
        assert not a.is_loaded and b.is_loaded and c.is_loaded and loads == ["a", "b", "c"]
        models.give_back(c)
        several = await asyncio.gather(*(models.borrow("a") for _ in range(5)))
        assert len({id(one) for one in several}) == 1 and loads == ["a", "b", "c", "a"]

    asyncio.run(main())
    models.close()


def test_a_model_that_can_not_be_loaded_is_its_own_trouble() -> None:
    loads: list[str] = []
    models = Models([make_served("good", 1, loads), make_served("bad", 1, loads, fails=True)])

    async def main() -> None:
        with pytest.raises(RequestError, match="can't be loaded"):
            await models.borrow("bad")
        assert models.find("bad").active == 0 and models.find("bad").failure
        models.give_back(await models.borrow("good"))

    asyncio.run(main())
    models.close()
    with pytest.raises(SettingError, match="two served models"):
        Models([make_served("a", 1, loads), make_served("a", 1, loads)])


def test_an_application_mounts_a_server() -> None:
    app = Starlette(routes=[Mount("/llm", unspool.asgi({"fake": make_fake_lm()}, **ENGINE, log="none"))])

    async def main() -> None:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            answer = await client.post("/llm/v1/completions", json={"prompt": "hello", "max_tokens": 3})
            assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 3

    asyncio.run(main())


def test_what_a_server_refuses_to_be() -> None:
    fake: Any = {"fake": make_fake_lm()}
    with pytest.raises(SettingError, match="lets other machines in"):
        serve(fake, host="0.0.0.0", port=0)
    with pytest.raises(SettingError, match="no option 'nonsense'"):
        serve(fake, nonsense=1)
    with pytest.raises(SettingError, match="8 to 512"):
        serve(fake, keys=["short"])
    with pytest.raises(SettingError, match="'requests' must be"):
        serve(fake, requests=0)
    with pytest.raises(SettingError, match="not an address"):
        serve(fake, host="no such host.invalid", allows_anyone=True)
    with pytest.raises(SettingError, match="65536 is no port"):
        serve(fake, port=65_536)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ResourceError, match="choose another"):
            serve(fake, port=taken.getsockname()[1])


def test_the_same_bytes_at_any_load_and_after_preemption() -> None:
    lm = make_fake_lm()
    asked = [
        {"prompt": f"hello {place} the cat and", "max_tokens": 40, "ignore_eos": True, "seed": place, **more}
        for place in range(8)
        for more in ({}, {"temperature": 0}, {"num_beams": 2})
    ]
    with RunningServer({"fake": lm}, max_rows=2, log="none") as server:
        alone = [server.post("/v1/completions", body).json()["choices"] for body in asked]
    with RunningServer({"fake": lm}, max_rows=16, memory=BLOCK_BYTES * 24) as server:
        with ThreadPoolExecutor(12) as pool:
            futures = [pool.submit(server.post, "/v1/completions", body) for body in reversed(asked)]
            together = [future.result() for future in futures][::-1]
        assert [one.status_code for one in together] == [200] * len(asked)
        assert [one.json()["choices"] for one in together] == alone
        engine = server.state.models.find("fake").engine
        assert engine is not None and engine.stats.preemptions > 0
        server.wait_until_idle()


def test_one_request_that_fails_harms_no_other() -> None:
    with RunningServer({"slow": make_slow(0.002)}, max_rows=8) as server:
        answers: list[httpx.Response] = []
        body = {"prompt": "hello", "max_tokens": 60, "ignore_eos": True, "temperature": 0}
        asking = [
            threading.Thread(target=lambda: answers.append(server.post("/v1/completions", body))) for _ in range(3)
        ]
        for one in asking:
            one.start()
        time.sleep(0.05)
        every = list(range(160))
        bad = server.post("/v1/completions", {"prompt": "hello", "max_tokens": 5, "suppress_tokens": every})
        assert bad.status_code == 400 and bad.json()["error"]["code"] == "no_token_left"
        streamed = server.post(
            "/v1/completions", {"prompt": "hello", "max_tokens": 5, "suppress_tokens": every, "stream": True}
        )
        assert '"code":"no_token_left"' in streamed.text and "[DONE]" not in streamed.text
        for one in asking:
            one.join()
        assert len({answer.json()["choices"][0]["text"] for answer in answers}) == 1 and len(answers) == 3

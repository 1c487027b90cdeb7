"""What a request gives: pieces, results, and its end before its time."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
import torch

import unspool
from tests.engine.fakes import ENDLESS, Fake, Slow, make_engine, make_lm


@pytest.mark.parametrize("asked", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}])
def test_pieces_are_those_of_a_stream(asked: dict[str, Any]) -> None:
    lm = make_lm(Fake(vocab=160), has_tokenizer=True)
    with make_engine(lm) as engine:
        request = engine.submit("hello world", max_new_tokens=12, **asked)
        pieces = list(request)
        expected = list(lm.stream("hello world", max_new_tokens=12, **asked))
        assert "".join(pieces) == "".join(expected)
        assert [token for piece in pieces for token in piece.token_ids] == [
            token for piece in expected for token in piece.token_ids
        ]
        assert request.result().text == "".join(expected)
        assert pieces[-1].finish_reason == expected[-1].finish_reason


def test_stop_strings_end_a_request_as_alone() -> None:
    lm = make_lm(Fake(vocab=160), has_tokenizer=True)
    whole = lm.generate("hello", max_new_tokens=30, eos_token_id=None).text
    stop = whole[8:11]
    alone = lm.generate("hello", max_new_tokens=30, eos_token_id=None, stop_strings=stop)
    assert alone.finish_reasons == ["stop_string"]
    with make_engine(lm) as engine:
        others = [engine.submit("world", max_new_tokens=30, eos_token_id=None) for _ in range(2)]
        result = engine.submit("hello", max_new_tokens=30, eos_token_id=None, stop_strings=stop).result(10)
        assert result.texts == alone.texts and result.finish_reasons == alone.finish_reasons
        assert result.token_ids == alone.token_ids
        assert all(
            other.result(10).text == lm.generate("world", max_new_tokens=30, eos_token_id=None).text for other in others
        )


def test_readers_that_come_late_get_every_piece() -> None:
    lm = make_lm(Slow())
    alone = lm.generate([3, 4], max_new_tokens=40, eos_token_id=None).token_ids[0]
    with make_engine(lm) as engine:
        for seconds in (0.0, 0.03, 0.5):  # before the first token, in between, after the end
            request = engine.submit([3, 4], max_new_tokens=40, eos_token_id=None)
            time.sleep(seconds)
            pieces = list(request)
            assert [token for piece in pieces for token in piece.token_ids] == alone
            assert request.result().token_ids == [alone] and request.stats.new_tokens == 40
            assert pieces[-1].finish_reason == "length" and 0 < request.stats.first_token_seconds < 10


def test_async_programs(lm: unspool.LanguageModel, engine: unspool.Engine) -> None:
    async def read(prompt: list[int]) -> list[int]:
        return [token async for piece in engine.submit(prompt, max_new_tokens=8) for token in piece.token_ids]

    async def main() -> list[Any]:
        prompts = [[3 + place % 19, 4] for place in range(50)]
        tokens = await asyncio.gather(*map(read, prompts))
        results = await asyncio.gather(*(engine.submit(prompt, max_new_tokens=8) for prompt in prompts[:5]))
        assert [result.token_ids[0] for result in results] == tokens[:5]
        return list(zip(prompts, tokens, strict=True))

    for prompt, tokens in asyncio.run(main()):
        assert tokens == lm.generate(prompt, max_new_tokens=8).token_ids[0]


def test_a_request_is_cancelled_within_a_step() -> None:
    lm = make_lm(Slow())
    with make_engine(lm) as engine:
        for asked in ({}, {"num_beams": 2}):
            request = engine.submit([3, 4], **ENDLESS, **asked)
            other = engine.submit([5, 6], max_new_tokens=20, eos_token_id=None)
            if not asked:
                next(iter(request))
            request.cancel()
            request.cancel()
            result = request.result(10)
            assert result.finish_reasons == ["cancelled"] and len(result.token_ids[0]) < 200
            assert other.result(10).token_ids == lm.generate([5, 6], max_new_tokens=20, eos_token_id=None).token_ids
        assert engine.stats.requests_cancelled == 2 and not engine.stats.blocks_used


def test_a_deadline_ends_a_request_with_what_it_has() -> None:
    lm = make_lm(Slow())
    with make_engine(lm) as engine:
        result = engine.submit([3, 4], deadline=0.15, **ENDLESS).result(10)
        assert result.finish_reasons == ["deadline"] and 0 < len(result.token_ids[0]) < 999
        waiting = make_engine(lm, max_rows=1)
        with waiting:
            first = waiting.submit([3], **ENDLESS)
            second = waiting.submit([4], deadline=0.1, **ENDLESS)
            assert second.result(10).token_ids == [[]] and not first.is_done


def test_a_streamer_is_fed(lm: unspool.LanguageModel, engine: unspool.Engine) -> None:
    class Keeper:
        def __init__(self) -> None:
            self.values: list[list[int]] = []
            self.ended = threading.Event()

        def put(self, value: torch.Tensor) -> None:
            self.values.append(value.flatten().tolist())

        def end(self) -> None:
            self.ended.set()

    keeper = Keeper()
    result = engine.submit([3, 4], max_new_tokens=6, streamer=keeper).result(10)
    assert keeper.ended.wait(10) and keeper.values[0] == [3, 4]
    assert [token for value in keeper.values[1:] for token in value] == result.token_ids[0]

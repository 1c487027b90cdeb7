"""The short way: text as it is written, in pieces, and streams that are left, cancelled or closed."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
import torch
from tests.api.dictation import TEXTS, dictate

from unspool import LanguageModel, Piece, TextIteratorStreamer, TextStreamer
from unspool.errors import InputError

# --- streams ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["é€日😀", "a😀", "日"])
def test_bytes_of_no_character_are_shown_at_the_end(lm: LanguageModel, written: str) -> None:
    tokens = lm.tokenizer.encode(written)
    for count in range(1, len(tokens) + 1):
        asked = dictate(lm, written, max_new_tokens=count)
        expected = lm.tokenizer.decode(tokens[:count])
        assert lm.generate("hello", **asked).text == expected
        *before, last = lm.stream("hello", **asked)
        assert "".join([*before, last]) == expected and not any("\ufffd" in piece for piece in before)
        assert [token for piece in (*before, last) for token in piece.token_ids] == tokens[:count]
    assert "\ufffd" in lm.tokenizer.decode(tokens[:-1])


@pytest.mark.parametrize("written", ["hello the world", "é€日😀", "a😀", " the cat\nstop\n", ""])
def test_pieces_join_to_the_text(lm: LanguageModel, written: str) -> None:
    pieces = list(lm.stream("hello", **dictate(lm, written)))
    assert all(isinstance(piece, Piece) and isinstance(piece, str) for piece in pieces)
    assert "".join(pieces) == written
    assert not any("\ufffd" in piece for piece in pieces)  # never half a character
    ids = [token for piece in pieces for token in piece.token_ids]
    assert ids == [*lm.tokenizer.encode(written), 2]
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + ["eos"]
    assert {piece.row for piece in pieces} == {0}


def test_rows_of_a_batch_are_interleaved(lm: LanguageModel) -> None:
    pieces = list(lm.stream(TEXTS, max_new_tokens=6, logprobs=0, eos_token_id=None))
    result = lm.generate(TEXTS, max_new_tokens=6, logprobs=0, eos_token_id=None)
    for row in range(3):
        own = [piece for piece in pieces if piece.row == row]
        assert "".join(own) == result.texts[row]
        assert [token for piece in own for token in piece.token_ids] == result.token_ids[row]
        assert [told.logprob for piece in own for told in piece.logprobs] == [
            told.logprob for told in result.logprobs[row]
        ]
        assert own[-1].finish_reason == "length"
    order = [piece.row for piece in pieces]
    assert order != sorted(order)


def test_special_tokens_are_left_out_unless_asked_for(lm: LanguageModel) -> None:
    settings = dictate(lm, " the cat")
    assert lm.generate("hello", **settings).text == " the cat"
    assert lm.generate("hello", skip_special_tokens=False, **settings).text == " the cat</s>"


def test_closing_a_stream_stops_the_work(lm: LanguageModel, passes: list[int]) -> None:
    pieces = lm.stream("hello", **dictate(lm, " the cat stop and a"))
    assert passes == []
    assert [next(pieces), next(pieces)] == [" the", " cat"]
    assert len(passes) == 2
    pieces.close()
    assert len(passes) == 2


async def test_astream_is_stream(lm: LanguageModel) -> None:
    for prompt, settings in ((TEXTS, {"max_new_tokens": 6}), ("hello", dictate(lm, "a😀 stop b", stop_strings="p b"))):
        expected = list(lm.stream(prompt, **settings))
        found = [piece async for piece in lm.astream(prompt, **settings)]
        assert found == expected
        for name in ("row", "token_ids", "finish_reason"):
            assert [getattr(piece, name) for piece in found] == [getattr(piece, name) for piece in expected]


async def test_astream_tells_mistakes(lm: LanguageModel) -> None:
    with pytest.raises(InputError, match="the prompt is empty"):
        async for _ in lm.astream(""):
            pass


async def test_cancelling_an_astream_stops_the_work(lm: LanguageModel, passes: list[int]) -> None:
    go, reached = threading.Event(), threading.Event()

    def hold(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == 3:
            reached.set()
            assert go.wait(10)
        return scores

    read: list[str] = []

    async def work() -> None:
        async for piece in lm.astream([5, 6], max_new_tokens=60, eos_token_id=None, logits_processor=[hold]):
            read.append(piece)

    task = asyncio.create_task(work())
    assert await asyncio.to_thread(reached.wait, 10)
    task.cancel()
    await asyncio.sleep(0)
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert len(passes) == 2  # the step under way was the last
    await asyncio.sleep(0.05)
    assert len(passes) == 2 and len(read) <= 1


async def test_leaving_an_astream_stops_the_work(lm: LanguageModel, passes: list[int]) -> None:
    pieces = lm.astream("hello", **dictate(lm, " the cat stop and a"))
    assert await anext(pieces) == " the"
    await pieces.aclose()
    assert len(passes) == 1


async def test_one_astream_fails_and_the_others_are_stopped(lm: LanguageModel) -> None:
    """Whatever ends a program's tasks, and however often they are cancelled, streams end without a complaint."""
    complaints: list[Any] = []

    async def work(fails: bool) -> None:
        async for piece in lm.astream([5, 6], max_new_tokens=60, eos_token_id=None, do_sample=True):
            if fails and piece.token_ids:
                raise KeyError("mine")

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        await asyncio.gather(work(True), work(False), work(False))

    def run_all() -> None:
        with pytest.raises(KeyError, match="mine"):
            asyncio.run(run())  # cancels what still runs, tasks and all, and closes what is left

    for _ in range(5):
        await asyncio.to_thread(run_all)
    assert complaints == []


async def test_an_astream_that_is_cancelled_twice_or_closed_twice(lm: LanguageModel) -> None:
    go, reached = threading.Event(), threading.Event()

    def hold(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if input_ids.shape[1] == 3:
            reached.set()
            assert go.wait(10)
        return scores

    async def work() -> None:
        async for _ in lm.astream([5, 6], max_new_tokens=60, eos_token_id=None, logits_processor=[hold]):
            pass

    task = asyncio.create_task(work())
    assert await asyncio.to_thread(reached.wait, 10)
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0.01)
    with pytest.raises(asyncio.CancelledError):
        await task  # though its thread still runs
    go.set()
    pieces = lm.astream("hello", max_new_tokens=5)
    await anext(pieces)
    for _ in range(2):
        await pieces.aclose()
    assert [piece async for piece in pieces] == []
    async for _ in lm.astream("hello", max_new_tokens=5):
        break
    assert len(lm.generate("hello", max_new_tokens=5).token_ids[0]) == 5


# --- streamers ----------------------------------------------------------------------------------------------


def test_streamers_and_the_result(lm: LanguageModel, capsys: pytest.CaptureFixture[str]) -> None:
    settings = dictate(lm, " the cat stop and", stop_strings="stop")
    streamer = TextStreamer(lm.tokenizer, skip_prompt=True, skip_special_tokens=True)
    result = lm.generate("hello", streamer=streamer, **settings)
    assert capsys.readouterr().out == " the cat stop\n"  # a streamer sees tokens
    assert (result.text, result.finish_reasons) == (" the cat ", ["stop_string"])
    reader = TextIteratorStreamer(lm.tokenizer, timeout=10)
    thread = threading.Thread(
        target=lm.generate, args=("hello",), kwargs={"streamer": reader, **dictate(lm, " the cat")}
    )
    thread.start()
    assert "".join(reader) == "hello the cat</s>"
    thread.join()


def test_a_cancelled_result_says_so(lm: LanguageModel) -> None:
    from unspool.streaming import StreamCancelled

    class Enough:
        num = 0

        def put(self, value: torch.Tensor) -> None:
            self.num += 1
            if self.num == 3:
                raise StreamCancelled("enough")

        def end(self) -> None:
            pass

    result = lm.generate("hello", streamer=Enough(), **dictate(lm, " the cat stop"))
    assert (result.text, result.finish_reasons) == (" the cat", ["cancelled"])

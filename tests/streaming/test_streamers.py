"""Streamers: the prints of transformers' streamers on the same puts, and what ours can do beside."""

from __future__ import annotations

import asyncio
import threading
import time
from queue import Empty
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unspool.errors import SettingError
from unspool.streaming import (
    AsyncTextIteratorStreamer,
    BaseStreamer,
    StreamCancelled,
    TextIteratorStreamer,
    TextStreamer,
)
from unspool.text import Tokenizer

TEXT = "Once upon a time,\n  there was 1 fox.\n\n你好世界 and 日本語 👍🏽 done<|im_end|>"


class Recording:
    """Notes what a streamer finalizes, in the place of printing it."""

    def __init__(self, streamer: Any) -> None:
        self.calls: list[tuple[str, bool]] = []
        streamer.on_finalized_text = lambda text, stream_end=False: self.calls.append((text, stream_end))


def put_all(streamer: Any, ids: list[int], sizes: list[int]) -> None:
    at = 0
    for size in [*sizes, *[1] * len(ids)]:
        if at < len(ids):
            streamer.put(torch.tensor([ids[at : at + size]]) if at == 0 else torch.tensor(ids[at : at + size]))
            at += size
    streamer.end()


@pytest.mark.parametrize("skip_prompt", [False, True])
@pytest.mark.parametrize("decode", [{}, {"skip_special_tokens": True}])
def test_prints_as_transformers(
    tokenizer: Tokenizer, skip_prompt: bool, decode: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import TextStreamer as Reference

    printed = []
    ids = tokenizer.encode(TEXT)
    for kind in (TextStreamer, Reference):
        streamer = kind(tokenizer, skip_prompt, **decode)
        for _ in range(2):  # used again after its end
            put_all(streamer, ids, [3])
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    expected = tokenizer.decode(ids[3:] if skip_prompt else ids, **decode)
    assert printed[0] == (expected + "\n") * 2


@settings(max_examples=100)
@given(
    text=st.text(max_size=40) | st.text(alphabet="ab \n你日é", max_size=40),
    sizes=st.lists(st.integers(1, 4), max_size=20),
)
def test_finalizes_step_by_step_as_transformers(tokenizer: Tokenizer, text: str, sizes: list[int]) -> None:
    from transformers import TextStreamer as Reference

    streamers = [TextStreamer(tokenizer), Reference(tokenizer)]
    records = [Recording(streamer) for streamer in streamers]
    for streamer in streamers:
        put_all(streamer, tokenizer.encode(text), sizes)
    assert records[0].calls == records[1].calls


def test_when_text_is_final(tokenizer: Tokenizer) -> None:
    streamer = TextStreamer(tokenizer)
    record = Recording(streamer)
    for piece in ("Hello", " wor", "ld", "\n", "你", "好", " end"):
        streamer.put(torch.tensor(tokenizer.encode(piece)))
    streamer.end()
    assert [text for text, _ in record.calls] == ["", "Hello ", "", "world\n", "你", "好", " ", "end"]
    assert [is_end for _, is_end in record.calls] == [False] * 7 + [True]


def test_prints_at_once(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("builtins.print", lambda *args, **kwargs: calls.append((args, kwargs)))
    streamer = TextStreamer(tokenizer)
    streamer.put(torch.tensor(tokenizer.encode("a b")))
    streamer.end()
    assert calls == [(("a ",), {"flush": True, "end": ""}), (("b",), {"flush": True, "end": "\n"})]


def test_one_row_only(tokenizer: Tokenizer) -> None:
    with pytest.raises(ValueError, match="batch size of 1"):
        TextStreamer(tokenizer).put(torch.tensor([[1, 2], [3, 4]]))


def test_the_base_class_says_what_is_missing() -> None:
    class Half(BaseStreamer):
        pass

    with pytest.raises(NotImplementedError, match="Half must define put"):
        Half().put(torch.tensor([1]))
    with pytest.raises(NotImplementedError, match="Half must define end"):
        Half().end()


def produce(streamer: Any, ids: list[int], error: Exception | None = None, forever: bool = False) -> threading.Thread:
    def run() -> None:
        try:
            for token_id in [*ids, *(ids * 100_000 if forever else [])]:
                streamer.put(torch.tensor([token_id]))
        except StreamCancelled:
            streamer.end()
            return
        if error is None:
            streamer.end()
        else:
            streamer.fail(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


def test_iterating(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    streamer = TextIteratorStreamer(tokenizer, skip_special_tokens=True)
    for _ in range(2):  # used again after its end
        thread = produce(streamer, ids)
        assert "".join(streamer) == tokenizer.decode(ids, skip_special_tokens=True)
        thread.join()
    assert streamer.text_queue.empty()
    assert streamer.stop_signal is None


def test_iterating_waits_no_longer_than_asked(tokenizer: Tokenizer) -> None:
    with pytest.raises(Empty):
        next(TextIteratorStreamer(tokenizer, timeout=0.01))


@pytest.mark.parametrize("timeout", [-1, float("nan"), float("inf"), "1", True])
def test_bad_timeouts(tokenizer: Tokenizer, timeout: Any) -> None:
    with pytest.raises(SettingError, match="timeout"):
        TextIteratorStreamer(tokenizer, timeout=timeout)


def test_an_error_reaches_the_reader(tokenizer: Tokenizer) -> None:
    streamer = TextIteratorStreamer(tokenizer)
    error = RuntimeError("out of memory")
    thread = produce(streamer, tokenizer.encode("one two three "), error)
    pieces = []
    with pytest.raises(RuntimeError, match="out of memory") as caught:
        pieces.extend(iter(streamer))
    thread.join()
    assert caught.value is error
    thread = produce(streamer, tokenizer.encode("again"))
    assert "".join(streamer) == "again"
    thread.join()


def test_cancelling_stops_the_producer(tokenizer: Tokenizer) -> None:
    streamer = TextIteratorStreamer(tokenizer)
    thread = produce(streamer, tokenizer.encode("one two three "), forever=True)
    assert next(streamer) is not None
    streamer.cancel()
    thread.join(timeout=10)
    assert not thread.is_alive()
    list(streamer)  # what was queued, and the end
    streamer.cancel()  # after the end there is nothing to cancel
    thread = produce(streamer, tokenizer.encode("again"))
    assert "".join(streamer) == "again"
    thread.join()


def test_cancelling_before_the_first_token(tokenizer: Tokenizer) -> None:
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    streamer.cancel()
    with pytest.raises(StreamCancelled):
        streamer.put(torch.tensor([1]))


async def test_iterating_in_a_coroutine(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT)
    streamer = AsyncTextIteratorStreamer(tokenizer, skip_special_tokens=True)
    for _ in range(2):
        thread = produce(streamer, ids)
        assert "".join([piece async for piece in streamer]) == tokenizer.decode(ids, skip_special_tokens=True)
        thread.join()


async def test_a_coroutine_waits_no_longer_than_asked(tokenizer: Tokenizer) -> None:
    streamer = AsyncTextIteratorStreamer(tokenizer, timeout=0.01)
    with pytest.raises(TimeoutError):
        await anext(streamer)


async def test_an_error_reaches_a_coroutine(tokenizer: Tokenizer) -> None:
    streamer = AsyncTextIteratorStreamer(tokenizer)
    error = RuntimeError("out of memory")
    thread = produce(streamer, tokenizer.encode("one two "), error)
    with pytest.raises(RuntimeError, match="out of memory"):
        _ = [piece async for piece in streamer]
    thread.join()


async def test_a_coroutine_cancels(tokenizer: Tokenizer) -> None:
    streamer = AsyncTextIteratorStreamer(tokenizer)
    thread = produce(streamer, tokenizer.encode("one two three "), forever=True)
    assert await anext(streamer) is not None
    streamer.cancel()
    await asyncio.to_thread(thread.join, 10)
    assert not thread.is_alive()


def test_a_closed_loop_is_a_cancelled_stream(tokenizer: Tokenizer) -> None:
    async def make() -> AsyncTextIteratorStreamer:
        return AsyncTextIteratorStreamer(tokenizer)

    streamer = asyncio.run(make())
    with pytest.raises(StreamCancelled, match="closed"):
        streamer.put(torch.tensor([1]))
    streamer.end()
    streamer.fail(RuntimeError("nobody hears this"))


def test_a_coroutine_is_needed(tokenizer: Tokenizer) -> None:
    with pytest.raises(RuntimeError, match="no running event loop"):
        AsyncTextIteratorStreamer(tokenizer)


def test_a_transformers_tokenizer(tokenizer: Tokenizer) -> None:
    import transformers

    other = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    streamer = TextIteratorStreamer(other)
    thread = produce(streamer, tokenizer.encode("Hello, world"))
    assert "".join(streamer) == "Hello, world"
    thread.join()


def test_put_is_quick(tokenizer: Tokenizer) -> None:
    streamer = TextIteratorStreamer(tokenizer)
    ids = tokenizer.encode("The quick brown fox jumps over the lazy dog.\n" * 30)
    start = time.process_time()
    put_all(streamer, ids, [])
    assert (time.process_time() - start) / len(ids) < 0.005

"""Streamers fed by the loop: the prompt, a token a row each step, the end, whatever happens."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
import torch

from tests.fakes import FakeModel, decode_slowly, pad_left
from unspool import AsyncTextIteratorStreamer, TextIteratorStreamer, TextStreamer, generate
from unspool.errors import InputError
from unspool.streaming import StreamCancelled

ROWS = [[1, 2, 3], [4, 5, 6, 7, 8], [9]]


class Keeper:
    """Anything with `put` and `end` is a streamer."""

    def __init__(self) -> None:
        self.values: list[torch.Tensor] = []
        self.num_ends = 0

    def put(self, value: torch.Tensor) -> None:
        assert self.num_ends == 0
        self.values.append(value)

    def end(self) -> None:
        self.num_ends += 1


class Words:
    """A tokenizer whose text is its ids."""

    def decode(self, token_ids: Any, /, **kwargs: Any) -> str:
        return "".join(f"{int(token)} " for token in token_ids)


def test_prompt_then_a_token_a_row_then_the_end() -> None:
    model = FakeModel()
    keeper = Keeper()
    eos = [decode_slowly(model, ROWS[0], 3)[2]]
    given = pad_left(ROWS)
    found = generate(model, **given, max_new_tokens=6, eos_token_id=eos, pad_token_id=0, streamer=keeper)
    prompt, *steps = keeper.values
    assert torch.equal(prompt, given["input_ids"])
    assert [value.shape for value in steps] == [(3,)] * (found.shape[1] - 5)
    assert torch.equal(torch.cat((prompt, torch.stack(steps, dim=1)), dim=1), found)
    assert keeper.num_ends == 1
    assert model.rows_of_passes[-1] < 3  # rows leave all the same


def test_several_sequences_are_rows() -> None:
    keeper = Keeper()
    settings = {"do_sample": True, "seed": 1, "num_return_sequences": 2, "max_new_tokens": 3}
    found = generate(FakeModel(), **pad_left(ROWS), streamer=keeper, **settings)
    assert keeper.values[0].shape == (6, 5)
    assert torch.equal(torch.cat((keeper.values[0], torch.stack(keeper.values[1:], dim=1)), dim=1), found)


def test_a_text_streamer_prints_the_row(capsys: pytest.CaptureFixture[str]) -> None:
    model = FakeModel()
    generate(model, [[1, 2, 3]], max_new_tokens=4, streamer=TextStreamer(Words(), skip_prompt=True))
    assert capsys.readouterr().out == Words().decode(decode_slowly(model, [1, 2, 3], 4)) + "\n"
    with pytest.raises(InputError, match="shows one row and was given 3"):
        generate(model, **pad_left(ROWS), streamer=TextStreamer(Words()))
    assert model.num_passes == 4  # it was told before any work for the three


class Breaks(Keeper):
    def __init__(self, at: int, error: BaseException) -> None:
        super().__init__()
        self.at, self.error = at, error

    def put(self, value: torch.Tensor) -> None:
        super().put(value)
        if len(self.values) == self.at:
            raise self.error


@pytest.mark.parametrize("at", [1, 3])
def test_a_streamer_that_raises_stops_the_work(at: int) -> None:
    model = FakeModel()
    streamer = Breaks(at, KeyError("lost"))
    with pytest.raises(KeyError, match="lost"):
        generate(model, [[1, 2]], max_new_tokens=50, streamer=streamer)
    assert streamer.num_ends == 1 and model.num_passes == at - 1


@pytest.mark.parametrize("at", [1, 3])
def test_a_streamer_that_cancels_stops_cleanly(at: int) -> None:
    model = FakeModel()
    streamer = Breaks(at, StreamCancelled("enough"))
    found = generate(model, [[1, 2]], max_new_tokens=50, streamer=streamer)
    assert found.tolist() == [[1, 2, *decode_slowly(model, [1, 2], at - 1)]]
    assert streamer.num_ends == 1 and model.num_passes == at - 1


class Failing(FakeModel):
    """Dies in its third pass."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.num_passes == 2:
            raise ArithmeticError("no room")
        return super().forward(*args, **kwargs)


def test_an_error_reaches_the_reader_in_the_other_thread() -> None:
    streamer = TextIteratorStreamer(Words(), skip_prompt=True, timeout=10)
    caught: list[BaseException] = []

    def work() -> None:
        try:
            generate(Failing(), [[1, 2]], max_new_tokens=9, streamer=streamer)
        except ArithmeticError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    read = []
    with pytest.raises(ArithmeticError, match="no room") as told:
        for text in streamer:
            read.append(text)
    thread.join()
    assert "".join(read) == Words().decode(decode_slowly(FakeModel(), [1, 2], 2))
    assert caught == [told.value]


def test_a_reader_that_leaves_stops_the_work() -> None:
    model = FakeModel()
    streamer = TextIteratorStreamer(Words(), skip_prompt=True, timeout=10)
    wait = threading.Event()

    def hold(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if ids.shape[1] == 4:  # two tokens are out
            assert wait.wait(10)
        return scores

    found: list[Any] = []
    arguments = {"max_new_tokens": 50, "streamer": streamer, "logits_processor": [hold]}
    thread = threading.Thread(target=lambda: found.append(generate(model, [[1, 2]], **arguments)))
    thread.start()
    next(streamer), next(streamer)
    streamer.cancel()
    wait.set()
    thread.join()
    assert found[0].tolist() == [[1, 2, *decode_slowly(model, [1, 2], 3)]]
    assert model.num_passes == 3


async def test_an_async_reader_gets_the_text_and_the_error() -> None:
    for model, num_new in ((FakeModel(), 5), (Failing(), 2)):
        streamer = AsyncTextIteratorStreamer(Words(), skip_prompt=True, timeout=10)

        def work(model: FakeModel = model, streamer: Any = streamer) -> None:
            with contextlib.suppress(ArithmeticError):
                generate(model, [[1, 2]], max_new_tokens=5, streamer=streamer)

        thread = threading.Thread(target=work)
        thread.start()
        read = []
        try:
            async for text in streamer:
                read.append(text)
        except ArithmeticError:
            assert isinstance(model, Failing)
        thread.join()
        assert "".join(read) == Words().decode(decode_slowly(FakeModel(), [1, 2], num_new))

"""Copies to the host: what is read once gives its memory to the next copy."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from unspool.kernels import sending
from unspool.kernels.sending import fetch_once, wait_by


class Event:
    """A GPU's event."""

    def __init__(self) -> None:
        self.has_come = False

    def record(self, _stream: Any) -> None:
        self.has_come = False

    def synchronize(self) -> None:
        self.has_come = True


class DeviceTensor:
    """What a copy asks of a tensor on a GPU."""

    def __init__(self, values: torch.Tensor) -> None:
        self.values, self.shape, self.dtype, self.device = values, values.shape, values.dtype, torch.device("cuda", 0)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """A device that is played by the host; the pinned memory that was taken."""
    made: list[torch.Tensor] = []

    class Pinned:
        def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
            self.held = torch.zeros(shape, dtype=dtype)

        def copy_(self, source: DeviceTensor, non_blocking: bool) -> None:
            assert non_blocking
            self.held.copy_(source.values)

        def tolist(self) -> Any:
            return self.held.tolist()

        def numel(self) -> int:
            return self.held.numel()

    def take(shape: torch.Size, dtype: torch.dtype, pin_memory: bool) -> Any:
        assert pin_memory
        made.append(Pinned(shape, dtype))
        return made[-1]

    monkeypatch.setattr(sending, "_spare", {})
    monkeypatch.setattr(torch, "empty", take)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(sending, "find_stream", lambda _: None)
    return made


def fetch(values: list[float], dtype: torch.dtype = torch.int64) -> Any:
    return fetch_once(DeviceTensor(torch.tensor(values, dtype=dtype)))


def read(fetched: Any) -> Any:
    return fetched.read(lambda held: held.tolist())


def test_memory_is_used_again_once_it_was_read(gpu: list[Any]) -> None:
    first, second = fetch([1, 2]), fetch([3, 4])
    assert len(gpu) == 2  # both are under way
    assert read(second) == [3, 4]
    with pytest.raises(AssertionError, match="another copy"):
        read(second)
    third = fetch([5, 6])
    assert len(gpu) == 2 and read(first) == [1, 2] and read(third) == [5, 6]
    assert read(fetch([1.5, 2.5], torch.float32)) == [1.5, 2.5] and read(fetch([7])) == [7]
    assert len(gpu) == 4  # other kinds of numbers, and other counts, have their own


def test_what_is_kept_is_bounded(gpu: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "_LARGEST_SPARE", 3)
    read(fetch([1, 2, 3, 4]))
    assert not sending._spare
    for count in range(200):
        for dtype in (torch.int64, torch.int32, torch.float32, torch.float64):
            monkeypatch.setattr(sending, "_LARGEST_SPARE", 1000)
            read(fetch([1] * (1 + count % 100), dtype))
    assert len(sending._spare) <= sending._MOST_SHAPES + 1
    many = [fetch([1]) for _ in range(40)]
    for one in many:
        read(one)
    assert max(map(len, sending._spare.values())) == sending._MOST_SPARE


def test_it_is_waited_for_as_the_context_says(gpu: list[Any]) -> None:
    waited: list[Any] = []
    fetched = fetch([1])
    token = sending._waits.set(None)
    try:
        wait_by(waited.append)
        assert read(fetched) == [1] and len(waited) == 1 and not waited[0].has_come
    finally:
        sending._waits.reset(token)


def test_what_is_on_the_host_is_read_as_it_is() -> None:
    values = torch.arange(6).view(2, 3)
    assert fetch_once(values).read_list() == values.tolist()
    assert fetch_once(values).read(lambda held: held is values)


def test_a_second_reading_is_noticed_on_the_host_too() -> None:
    fetched = fetch_once(torch.arange(3))
    assert fetched.read_list() == [0, 1, 2]
    with pytest.raises(AssertionError, match="read before"):
        fetched.read_list()

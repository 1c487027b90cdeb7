"""Copies between the host and a device that wait for nothing but themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, TypeVar

import torch

Wait = Callable[[torch.cuda.Event], None]
"""Returns once an event has come."""

_waits: Final[ContextVar[Wait | None]] = ContextVar("_waits", default=None)
Read = TypeVar("Read")
_MOST_SPARE: Final = 8  # pieces of pinned memory of one shape that are kept to be used again,
_MOST_SHAPES: Final = 64  # of how many shapes,
_LARGEST_SPARE: Final = 4096  # and of how many numbers
_spare: Final[dict[tuple[torch.Size, torch.dtype, torch.device], list[tuple[torch.Tensor, torch.cuda.Event]]]] = {}
_streams: Final[dict[tuple[int, int], torch.cuda.Stream]] = {}  # by device and address: torch's own are never freed


def send(numbers: Sequence[float], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """The numbers as a tensor on a device; the host does not wait for the GPU's pending work.

    A plain copy to a GPU waits for all work launched before it. A copy from pinned memory is queued, and torch does
    not reuse the memory until it has been read.
    """
    if device.type != "cuda":
        return torch.tensor(list(numbers), dtype=dtype, device=device)
    return torch.tensor(list(numbers), dtype=dtype, pin_memory=True).to(device, non_blocking=True)


def send_beside(values: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Pinned values on a GPU, copied while the work runs that was launched before; work launched later waits for them.

    A copy in the stream of that work would begin only after it.
    """
    here, beside = torch.cuda.current_stream(device), _open_stream(device)
    with torch.cuda.stream(beside):
        sent = values.to(device, non_blocking=True)
    here.wait_stream(beside)
    sent.record_stream(here)
    return sent


@cache
def _open_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@dataclass(frozen=True, slots=True)
class Fetched:
    """A tensor on its way to the host."""

    _values: torch.Tensor
    _arrived: torch.cuda.Event | None  # None: it was there

    def read(self) -> torch.Tensor:
        """The tensor, once it is there; work launched after `fetch` is not waited for."""
        if self._arrived is not None:
            _await(self._arrived)
        return self._values


def _await(arrived: torch.cuda.Event) -> None:
    wait = _waits.get()
    if wait is None:
        arrived.synchronize()
    else:
        wait(arrived)


def wait_by(wait: Wait) -> None:
    """Let what runs in this context wait for its copies by a function: one that lets others run meanwhile."""
    _waits.set(wait)


def fetch(values: torch.Tensor) -> Fetched:
    """Begin to copy a tensor to the host."""
    if values.device.type != "cuda":
        return Fetched(values, None)
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record(find_stream(values.device))
    return Fetched(host, arrived)


class FetchedOnce:
    """A tensor on its way to the host, where it is read once: the memory is used again then."""

    __slots__ = ("_arrived", "_is_read", "_key", "_values")

    def __init__(self, values: torch.Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        self._is_read = False
        if values.device.type != "cuda":
            self._values = values
            return
        self._key = (values.shape, values.dtype, values.device)
        try:
            self._values, self._arrived = _spare[self._key].pop()
        except (KeyError, IndexError):
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._arrived = torch.cuda.Event()
        self._values.copy_(values, non_blocking=True)
        self._arrived.record(find_stream(values.device))

    def read(self, make: Callable[[torch.Tensor], Read]) -> Read:
        """What a function makes of the tensor, once it is there; the function must keep no part of it."""
        assert not self._is_read, "it was read before: its memory may hold another copy by now"
        if self._arrived is not None:
            _await(self._arrived)
        made, self._is_read = make(self._values), True
        if self._arrived is not None and self._values.numel() <= _LARGEST_SPARE:
            if len(_spare) > _MOST_SHAPES:
                _spare.clear()
            spare = _spare.setdefault(self._key, [])
            if len(spare) < _MOST_SPARE:
                spare.append((self._values, self._arrived))
        return made

    def read_list(self) -> list[Any]:
        """The tensor as lists, once it is there."""
        return self.read(torch.Tensor.tolist)


def fetch_once(values: torch.Tensor) -> FetchedOnce:
    """Begin to copy a tensor to the host, to be read once."""
    return FetchedOnce(values)


def find_stream(device: torch.device) -> torch.cuda.Stream:
    """A device's current stream: torch takes longer to look it up than to record an event in it."""
    number = torch._C._cuda_getDevice() if device.index is None else device.index
    key = (number, torch._C._cuda_getCurrentRawStream(number))
    found = _streams.get(key)
    if found is None:
        found = _streams[key] = torch.cuda.current_stream(number)
    return found

"""A server's life: how many requests are at work, whether new ones are taken, and its end."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from unspool.server.options import ClientLimits
from unspool.server.refusals import RequestError

_KEPT = 64  # requests whose durations an estimate is made from


class Gate:
    """Lets requests in while there is room, and none once the server drains."""

    def __init__(self, limits: ClientLimits) -> None:
        self._limits = limits
        self.num_active = 0
        self.num_traces = 0
        self.is_draining = False
        self._by_key: Counter[int] = Counter()
        self._seconds: list[float] = []
        self._idle = asyncio.Event()
        self._is_hurried = False
        self.is_ended = False  # what is still at work is being ended
        self._enders = set[Callable[[], None]]()

    @contextmanager
    def enter(self, key: int) -> Iterator[None]:
        """Count a request of a key while it is at work; raises if there are too many."""
        if self.is_draining:
            raise RequestError(
                503, "the server is shutting down and takes no more requests", code="draining", retry_after=5
            )
        if self.num_active >= self._limits.requests:
            raise self._refuse("the server has as many requests as it takes")
        if self._by_key[key] >= self._limits.requests_per_key:
            raise self._refuse("this key has as many requests at work as it may have")
        started = time.monotonic()
        self.num_active += 1
        self._by_key[key] += 1
        try:
            yield
        finally:
            self.num_active -= 1
            self._by_key[key] -= 1
            if not self._by_key[key]:
                del self._by_key[key]
            self._seconds = [*self._seconds[1 - _KEPT :], time.monotonic() - started]
            if not self.num_active:
                self._idle.set()

    @contextmanager
    def enter_trace(self) -> Iterator[None]:
        """Count a traced request, which takes more of the engine's time than others; raises if there are too many."""
        if self.num_traces >= self._limits.traces:
            raise self._refuse("the server has as many traces at work as it takes")
        self.num_traces += 1
        try:
            yield
        finally:
            self.num_traces -= 1

    @contextmanager
    def ending(self, end: Callable[[], None]) -> Iterator[None]:
        """While something is at work, what ends it when the server does not wait for it any longer."""
        self._enders.add(end)
        if self.is_ended:
            end()
        try:
            yield
        finally:
            self._enders.discard(end)

    def end_all(self) -> None:
        """End what is at work: streams get their last event, others an error."""
        self.is_ended = True
        for end in list(self._enders):
            end()

    def hurry(self) -> None:
        """Wait no longer in `drain`."""
        self._is_hurried = True
        self._idle.set()

    def _refuse(self, why: str) -> RequestError:
        mean = sum(self._seconds) / len(self._seconds) if self._seconds else 1.0
        return RequestError(
            429, f"{why}; try again", code="too_many_requests", retry_after=max(1, min(60, round(mean)))
        )

    async def drain(self, seconds: float) -> bool:
        """Take no more requests and wait for those at work; whether all have ended in time."""
        self.is_draining, self._is_hurried = True, False
        until = time.monotonic() + seconds
        while self.num_active and not self._is_hurried and (left := until - time.monotonic()) > 0:
            self._idle.clear()
            try:
                await asyncio.wait_for(self._idle.wait(), left)
            except TimeoutError:
                break
        return not self.num_active

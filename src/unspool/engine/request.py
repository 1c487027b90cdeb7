"""A request: what `submit` returns."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import Any, Protocol

from unspool.api.answer import Answer
from unspool.api.speaker import Piece
from unspool.decoding.loop import Emitted
from unspool.decoding.record import Reported, list_reported
from unspool.engine.mailbox import Mailbox, Usher
from unspool.errors import EngineError
from unspool.forks import after_fork
from unspool.outputs import Generation, Stats

Token = tuple[int, str | None] | tuple[int, str | None, Reported]
"""What most steps add: a token of row 0, why it is the last, if it is, and its log-probabilities, if wanted."""


def _as_emitted(one: Emitted | Token) -> Emitted:
    if isinstance(one, Emitted):
        return one
    token, reason, *reported = one
    emitted = Emitted({0: [token]}, {} if reason is None else {0: reason})
    if reported:
        emitted.logprobs[0] = list_reported(reported)
    return emitted


def make_fork_error() -> EngineError:
    """What a forked child is told that asks its parent's engine for something."""
    return EngineError(
        f"this engine works in process {os.getppid()}, which this one was forked from: its thread is not here. Make an "
        "engine of your own (unspool.Engine(lm)); the model can be used as it is"
    )


def _read_all(mail: Mailbox[Emitted | Token]) -> Iterator[Emitted]:
    while (one := mail.get()) is not None:
        yield _as_emitted(one)


class Canceller(Protocol):
    """Who ends a request before its time."""

    def cancel(self, request: Request) -> None:
        """End it within a step."""
        ...

    def listen(self) -> None:
        """Hand over each token from now on: somebody waits for them."""
        ...


class Request:
    """One request at work: iterate it for pieces of text (`for`, `async for`), or ask for its result.

    Pieces are those of `lm.stream`. A request has one reader: pieces go to whoever asks first, and `result()` reads
    what is left.
    """

    def __init__(self, answer: Answer, number: int, *, priority: int = 0, deadline: float | None = None) -> None:
        self.number, self.priority, self.deadline = number, priority, deadline
        self._answer = answer
        self._mail: Mailbox[Emitted | Token] = Mailbox()
        self._feed: Mailbox[Emitted | Token] | None = None  # what a streamer is fed from
        self._pieces: deque[Piece] = deque()
        self._has_readers = False  # somebody reads pieces
        self._reading = threading.RLock()  # held by whoever waits for a piece: never taken by the driving thread
        self._calling = threading.Lock()
        self._canceller: Canceller | None = None
        self._usher: Usher | None = None
        self._callbacks: list[Callable[[Request], Any]] = []
        self.error: BaseException | None = None
        after_fork(self, Request._leave)

    def _leave(self) -> None:
        self._reading, self._calling = threading.RLock(), threading.Lock()
        error = make_fork_error()
        if not self._mail.is_closed:
            self.error = error
        for mail in (self._mail, self._feed):
            if mail is not None:
                mail.leave(error)

    def __repr__(self) -> str:
        state = "done" if self.is_done else "at work"
        return f"Request({self.number}, {state}, {sum(map(len, self._answer.run.emitted))} new tokens)"

    # --- the driving thread's side -------------------------------------------------------------------------
    @property
    def is_heard(self) -> bool:
        """Whether somebody reads pieces, so that tokens are to be handed over as they come."""
        return self._has_readers or self._feed is not None

    def deliver(self, *emitted: Emitted | Token) -> None:
        """Hand over what one or more steps added."""
        if self._mail.push(*emitted):
            if self._usher is None:
                self._mail.wake()
            else:
                self._usher.add(self._mail)
        if self._feed is not None:
            self._feed.put(*emitted)

    def finish(self, error: BaseException | None = None) -> bool:
        """End it; whether it had not ended before."""
        if error is not None and not self._mail.is_closed:
            self.error = error
        if not self._mail.close(error):
            return False
        if self._feed is not None:
            self._feed.close(error)
        self._canceller = self._usher = None  # an engine's memory is not kept by those who hold its answers
        with self._calling:
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback(self)
        return True

    def open_feed(self) -> Iterator[Emitted]:
        """What is delivered once more, for a streamer."""
        feed = self._feed = Mailbox[Emitted | Token]()
        return _read_all(feed)

    def fail(self, error: Exception) -> None:
        """End it with an error from outside, and let the driving thread know."""
        canceller = self._canceller
        if self.finish(error) and canceller is not None:
            canceller.cancel(self)

    def attach(self, canceller: Canceller, usher: Usher | None = None) -> None:
        """Say who can end it, and who wakes its readers."""
        self._canceller, self._usher = canceller, usher

    # --- the caller's side ---------------------------------------------------------------------------------
    @property
    def is_done(self) -> bool:
        """Whether it has ended; pieces may be left to read."""
        return self._mail.is_closed

    @property
    def stats(self) -> Stats:
        """The cost so far."""
        return self._answer.run.stats

    @property
    def answer(self) -> Answer:
        """The call that it is."""
        return self._answer

    def cancel(self) -> None:
        """Stop it within a step. It ends as a closed stream does: `result()` has what was written until then."""
        canceller = self._canceller
        if canceller is not None and not self.is_done:
            canceller.cancel(self)

    def when_done(self, callback: Callable[[Request], Any]) -> None:
        """Call a function once it has ended, in the driving thread; at once if it has."""
        with self._calling:
            if not self._mail.is_closed:
                self._callbacks.append(callback)
                return
        callback(self)

    def __iter__(self) -> Iterator[Piece]:
        return self._read()

    def _read(self) -> Generator[Piece, None, None]:
        while True:
            with self._reading:
                if self._pieces:
                    piece = self._pieces.popleft()
                else:
                    self._begin_reading()
                    emitted = self._mail.get()
                    if emitted is None:
                        return
                    self._pieces.extend(self._answer.write(_as_emitted(emitted)))
                    continue
            yield piece

    async def __aiter__(self) -> AsyncIterator[Piece]:
        while True:
            while self._pieces:
                yield self._pieces.popleft()
            self._begin_reading()
            emitted = await self._mail.get_async()
            if emitted is None:
                return
            self._pieces.extend(self._answer.write(_as_emitted(emitted)))

    async def turns(self) -> AsyncIterator[Emitted]:
        """What each turn added, for a reader that makes the text itself."""
        self._begin_reading()
        while (emitted := await self._mail.get_async()) is not None:
            yield _as_emitted(emitted)

    def _begin_reading(self) -> None:
        if not self._has_readers:
            self._has_readers = True
            canceller = self._canceller
            if canceller is not None:
                canceller.listen()

    def result(self, timeout: float | None = None) -> Generation:
        """What `lm.generate` returns, once it has ended; raises the error that it ended with.

        After `timeout` seconds it raises TimeoutError, and the request goes on.
        """
        self._mail.wait(timeout)
        with self._reading:
            if not self._has_readers:  # its text is written at once, not piece by piece
                self._has_readers = True
                self._mail.clear()
                self._answer.read_back()
        for _ in self._read():
            pass
        return self._answer.result()

    async def wait(self) -> Generation:
        """`result()` for asynchronous programs; `await request` is the same."""
        async for _ in self:
            pass
        return self._answer.result()

    def __await__(self) -> Generator[Any, None, Generation]:
        return self.wait().__await__()

"""An order at work in an engine: its answers when they are whole, or what is added to them as it comes."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from unspool.api.speaker import Piece
from unspool.engine import Engine, Request
from unspool.grammar.haste import SlowGrammarError
from unspool.outputs import Generation, TokenLogprob
from unspool.server.calls import Call, CallPart, CallReader
from unspool.server.orders import Order
from unspool.server.refusals import RequestError, read_error
from unspool.text import Tokenizer

FINISH = {
    "eos": "stop",
    "stop_string": "stop",
    "criteria": "stop",
    "repetition": "stop",
    "length": "length",
    "time": "length",
    "deadline": "length",
    "cancelled": "length",
}


@dataclass
class Delta:
    """What a step adds to one choice."""

    index: int
    text: str = ""
    thought: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    calls: list[Call] = field(default_factory=list)  # that end with it
    parts: list[CallPart] = field(default_factory=list)  # of calls
    reason: str | None = None  # why it is the last, in the engine's words
    has_calls: bool = False  # the choice has called a tool
    stop: str | None = None  # the stop string that it ended with

    @property
    def finish_reason(self) -> str | None:
        """Why it is the last, in OpenAI's words."""
        if self.reason is None:
            return None
        return "tool_calls" if self.has_calls and self.reason != "length" else FINISH.get(self.reason, "stop")


@dataclass
class Choice:
    """One whole answer."""

    index: int
    text: str
    token_ids: list[int]
    reason: str
    logprobs: list[TokenLogprob] | None = None
    calls: list[Call] = field(default_factory=list)
    stop: str | None = None  # the stop string that it ended with
    prompt_ids: list[int] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob | None] | None = None
    thought: str = ""  # what was thought before the text

    @property
    def finish_reason(self) -> str:
        """Why it ended, in OpenAI's words."""
        return "tool_calls" if self.calls and self.reason != "length" else FINISH.get(self.reason, "stop")


class Work:
    """The requests of an order, submitted to an engine; closing it ends what still runs."""

    def __init__(
        self, engine: Engine, order: Order, tokenizer: Tokenizer | None, deadline: float | None = None
    ) -> None:
        self.order = order
        self._tokenizer = tokenizer
        self._readers: dict[int, CallReader] = {}
        self._called: set[int] = set()
        self.num_new = 0  # tokens written so far
        self.num_thinking = 0  # of those, tokens of thoughts, as far as they have ended
        self._is_ended = False  # by the server
        self.started = time.monotonic()
        self.first_at: float | None = None
        self.requests: list[Request] = []
        settings = order.settings
        if order.call_format is not None:
            settings = {**settings, "skip_special_tokens": False}
        try:
            prompts: list[Any] = list(order.prompts) if order.pictured is None else [order.pictured]
            for prompt in prompts:
                self.requests.append(
                    engine.submit(
                        prompt, priority=order.priority, deadline=deadline, tenant=order.tenant, **dict(settings)
                    )
                )
        except BaseException as error:
            self.close()
            if isinstance(error, Exception) and not isinstance(error, SlowGrammarError):
                raise read_error(error, order.names) from error
            raise

    @property
    def num_cached(self) -> int:
        """Tokens of the prompts that were found in blocks that others have read."""
        return sum(request.stats.cached_tokens for request in self.requests)

    def end(self) -> None:
        """End what still runs, as the server does not wait for it; its answer is an error."""
        self._is_ended = True
        self.close()

    def check_ended(self) -> None:
        """Raise if the server has ended it before it was done."""
        if self._is_ended and any("cancelled" in request.answer.run.reasons for request in self.requests):
            raise RequestError(503, "the server was ended; send it again", code="ended", retry_after=5)

    def close(self) -> None:
        """End what still runs, within a step."""
        for request in self.requests:
            request.cancel()

    @property
    def is_done(self) -> bool:
        """Whether nothing runs any more."""
        return all(request.is_done for request in self.requests)

    def note_tokens(self, num_new: int) -> None:
        """Count tokens that a reader of its own has taken from a request."""
        self.num_new += num_new
        if num_new and self.first_at is None:
            self.first_at = time.monotonic()

    # --- whole answers -------------------------------------------------------------------------------------------
    def wait(self, timeout: float | None = None) -> list[Choice]:
        """The answers, for a thread that waits for them."""
        return self._list_choices([request.result(timeout) for request in self.requests])

    async def choices(self) -> list[Choice]:
        """The answers, when all are whole. The event loop is woken once for each request, not for each token."""
        loop = asyncio.get_running_loop()
        for request in self.requests:
            done = loop.create_future()

            def notify(_: Request, done: asyncio.Future[None] = done) -> None:
                with suppress(RuntimeError):  # the loop has ended
                    loop.call_soon_threadsafe(_resolve, done)

            request.when_done(notify)
            await done
        try:
            results = [request.result() for request in self.requests]
            self.check_ended()
            return self._list_choices(results)
        except Exception as error:
            raise read_error(error, self.order.names, is_submitted=True) from error

    def _list_choices(self, results: list[Generation]) -> list[Choice]:
        order = self.order
        made: list[Choice] = []
        for place, result in enumerate(results):
            rows = self._rank(result)
            self.num_new += self._count(sum(map(len, result.token_ids)))
            self.num_thinking += self._count(sum(result.num_thinking_tokens or ()))
            for copy, row in enumerate(rows):
                made.append(self._make_choice(place, place * order.num_choices + copy, row, result))
            first = self.requests[place].stats.first_token_seconds
            if self.first_at is None and result.token_ids[0]:
                self.first_at = self.started + first
        return made

    def _rank(self, result: Generation) -> list[int]:
        """The rows that are returned: the likeliest of those that were drawn."""
        order = self.order
        rows = list(range(len(result.texts)))
        if len(rows) == 1:
            return rows * order.num_choices
        if len(rows) > order.num_choices and result.logprobs is not None and order.settings.get("num_beams", 1) == 1:
            means = [_find_mean(logprobs) for logprobs in result.logprobs]
            rows.sort(key=lambda row: -means[row])
        return rows[: order.num_choices]

    def _count(self, num_tokens: int) -> int:
        """Tokens that an answer is said to have cost: one row that is returned several times counts as several."""
        order = self.order
        return 0 if order.writes_nothing else num_tokens * (order.num_choices if order.num_drawn == 1 else 1)

    def _make_choice(self, place: int, index: int, row: int, result: Generation) -> Choice:
        order = self.order
        text, calls, reason = result.texts[row], list[Call](), result.finish_reasons[row]
        if order.call_format is not None:
            reader = self._make_reader(index)
            said, _, calls = reader.put(text)
            rest, _, more = reader.end()
            text, calls = said + rest, calls + more
            if reader.is_full:  # what the model wrote behind the last call is left out
                reason = "stop_string"
        logprobs = None if result.logprobs is None or order.logprobs is None else result.logprobs[row]
        ids = list(result.token_ids[row])
        if order.writes_nothing:
            text, ids, reason, logprobs = "", [], "length", None if logprobs is None else []
        prompt_logprobs = None if result.prompt_logprobs is None else result.prompt_logprobs[0]
        stop = self._find_stop(reason, ids)
        thought = "" if result.thoughts is None or not order.shows_thoughts else result.thoughts[row]
        return Choice(index, text, ids, reason, logprobs, calls, stop, order.prompts[place], prompt_logprobs, thought)

    def _find_stop(self, reason: str | None, ids: Sequence[int]) -> str | None:
        """The stop string that a text ended with: the one that comes first in it."""
        stops = self.order.settings.get("stop_strings")
        if reason != "stop_string" or self._tokenizer is None or stops is None:
            return None
        text = self._tokenizer.decode(list(ids))
        found = {text.find(stop): stop for stop in ([stops] if isinstance(stops, str) else stops) if stop in text}
        return found[min(found)] if found else None

    def _make_reader(self, row: int) -> CallReader:
        order = self.order
        assert order.call_format is not None
        specials = [] if self._tokenizer is None else self._tokenizer.all_special_tokens
        return CallReader(order.call_format, specials, order.most_calls, f"{order.id}/{row}", order.call_schemas)

    # --- answers as they are written -----------------------------------------------------------------------------
    async def deltas(self) -> AsyncIterator[list[Delta]]:
        """What each step adds, until all have ended; raises what a request ended with."""
        source = self._read_one(0) if len(self.requests) == 1 else self._read_several()
        try:
            async for place, piece in source:
                if self._is_ended and piece.finish_reason == "cancelled":
                    continue
                if self.first_at is None:
                    self.first_at = time.monotonic()
                made = self._make_deltas(place, piece)
                if made:
                    yield made
            self.check_ended()
        except Exception as error:
            raise read_error(error, self.order.names, is_submitted=True) from error
        finally:
            await source.aclose()

    async def _read_one(self, place: int) -> Any:
        async for piece in self.requests[place]:
            yield place, piece

    async def _read_several(self) -> Any:
        """Pieces of all requests in the order in which they come."""
        queue: asyncio.Queue[tuple[int, Piece] | BaseException | None] = asyncio.Queue(maxsize=64)

        async def read(place: int) -> None:
            try:
                async for piece in self.requests[place]:
                    await queue.put((place, piece))
                await queue.put(None)
            except Exception as error:
                await queue.put(error)

        tasks = [asyncio.create_task(read(place)) for place in range(len(self.requests))]
        try:
            left = len(tasks)
            while left:
                one = await queue.get()
                if isinstance(one, BaseException):
                    raise one
                if one is None:
                    left -= 1
                else:
                    yield one
        finally:
            for task in tasks:
                task.cancel()

    def _make_deltas(self, place: int, piece: Piece) -> list[Delta]:
        order = self.order
        self.num_new += self._count(len(piece.token_ids))
        row = place * order.num_drawn + piece.row
        text, calls, reason = str(piece), list[Call](), piece.finish_reason
        thought, parts = "", list[CallPart]()
        if piece.kind == "thought":
            text, thought = "", text if order.shows_thoughts else ""
        if reason is not None:
            self.num_thinking += self._count(self.requests[place].answer.count_thinking(piece.row))
        if order.call_format is not None:
            reader = self._readers.setdefault(row, self._make_reader(row))
            if reader.is_full:
                text = ""
            else:
                text, parts, calls = reader.put(text)
            if reason is not None:
                rest, more_parts, more = reader.end()
                text, parts, calls = text + rest, parts + more_parts, calls + more
            if parts:
                self._called.add(row)
            told = (order.logprobs is not None and piece.logprobs) or (order.returns_ids and piece.token_ids)
            if not text and not thought and not parts and not told and reason is None:
                return []
            if reader.is_full and reason is not None:
                reason = "stop_string"
        stop = self._find_stop(reason, self.requests[place].answer.run.emitted[piece.row])
        copies = range(order.num_choices) if order.num_drawn == 1 else (piece.row,)
        return [
            Delta(
                place * order.num_choices + copy,
                text,
                thought,
                piece.token_ids,
                piece.logprobs,
                calls,
                parts,
                reason,
                row in self._called,
                stop,
            )
            for copy in copies
        ]


def _resolve(done: asyncio.Future[None]) -> None:
    if not done.done():
        done.set_result(None)


def _find_mean(logprobs: list[TokenLogprob]) -> float:
    return math.fsum(one.logprob for one in logprobs) / max(1, len(logprobs))

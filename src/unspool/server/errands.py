"""What a request needs done outside the event loop: at once if it is quick, else in its client's turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable
from contextlib import ExitStack
from functools import partial
from typing import Any, Self, TypeVar

from starlette.requests import Request

from unspool.grammar.haste import SlowGrammarError, in_haste
from unspool.server.bodies import find_claim, get_record, parse_object, read_body, until_gone
from unspool.server.state import ServerState
from unspool.server.turns import GRAMMAR_WEIGHT, LARGE

T = TypeVar("T")


class Errand:
    """The reading of one request; `with` gives its client's place back."""

    def __init__(self, state: ServerState, request: Request) -> None:
        self._state, self._request = state, request
        self._stack = ExitStack()
        self._is_costly = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the place back: nothing costly is left to do."""
        self._stack.close()

    @property
    def _client(self) -> Hashable:
        """Whose turn it is: a key's, or an address's where there are no keys."""
        record = get_record(self._request)
        return record.key or record.client

    async def read_json(self) -> dict[str, Any]:
        """The request's body, a JSON object."""
        limits, turns = self._state.options.limits, self._state.turns
        claimed = find_claim(self._request)
        if claimed is not None and LARGE < claimed <= limits.body_bytes:
            turns.check(self._client, claimed)  # before it is sent
        raw = await read_body(self._request, limits.body_bytes, limits.body_seconds)
        if len(raw) <= LARGE:
            return parse_object(raw)
        self.weigh(len(raw))
        return await self.run(partial(parse_object, raw))

    def weigh(self, weight: int) -> None:
        """Count what is to be done as costly if it weighs much; raises 429 where there is too much already."""
        if weight > LARGE:
            self._stack.close()  # what it weighed before
            weight = min(weight, self._state.options.limits.body_bytes)
            self._stack.enter_context(self._state.turns.enter(self._client, weight))
            self._is_costly = True

    async def run(self, work: Callable[[], T], discard: Callable[[T], None] | None = None) -> T:
        """The result of some work; `discard` gets it if the client has gone."""
        if not self._is_costly:
            try:
                return await asyncio.to_thread(_do_in_haste, work)
            except SlowGrammarError:
                self.weigh(GRAMMAR_WEIGHT)
        return await until_gone(self._request, self._state.turns.run(self._client, work, discard))


def _do_in_haste(work: Callable[[], T]) -> T:
    with in_haste():
        return work()

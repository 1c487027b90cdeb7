"""Threads in which nothing may take long: what a grammar would need time for is refused there, to be done elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Final

from unspool.errors import UnspoolError

_is_hasty: Final = ContextVar("unspool_is_hasty", default=False)


class SlowGrammarError(UnspoolError):
    """A grammar whose compilation may take long, where nothing may; the same call elsewhere compiles it."""


@contextmanager
def in_haste() -> Iterator[None]:
    """A block in which what may take long raises SlowGrammarError."""
    token = _is_hasty.set(True)
    try:
        yield
    finally:
        _is_hasty.reset(token)


def refuse_in_haste(what: str) -> None:
    """Raise if the caller is in haste."""
    if _is_hasty.get():
        raise SlowGrammarError(f"{what} may take long")

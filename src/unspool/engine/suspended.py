"""Code that asks for passes, in a greenlet which is suspended where it asks, until the engine has the answer.

Where it waits for a copy from a GPU (`kernels/sending.py`), it is suspended too: what others launch meanwhile is not
waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from unspool.decoding.forwards import join_chunks
from unspool.decoding.reader import answer_at_once
from unspool.errors import MissingExtraError
from unspool.kernels.sending import wait_by
from unspool.protocols import Ask, Forward

if TYPE_CHECKING:
    import torch

_MOST_THROWS: Final = 8


class Stopped(BaseException):
    """Raised inside what is to end now."""


def import_greenlet() -> Any:
    """The package that suspends code; raises an error that names the extra where it is missing."""
    try:
        import greenlet
    except ImportError as error:
        raise MissingExtraError("greenlet", "engine", "an engine's request that is not plain decoding") from error
    return greenlet


def ask_engine(ask: Ask) -> Forward:
    """Have the engine answer, if it drives who asks; what is asked from elsewhere is answered at once."""
    let = import_greenlet().getcurrent()
    if not getattr(let, "is_driven", False):
        return answer_at_once(ask)
    answer: Forward = let.parent.switch(ask)
    return answer


def _wait(copy: torch.cuda.Event) -> None:
    let = import_greenlet().getcurrent()
    if not getattr(let, "is_driven", False):
        copy.synchronize()
    elif not copy.query():
        let.parent.switch(copy)


class Suspended:
    """A function at work in a greenlet, and what it waits for."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._let: Any = import_greenlet().greenlet(_make_drive(function))
        self._let.is_driven = True
        self._ask: Ask | None = None
        self._copy: torch.cuda.Event | None = None  # what it waits for, if it is no ask
        self._num_read = 0  # columns of the ask that were read
        self._piece: Forward | None = None  # what they gave
        self.value: Any = None  # what the function has returned, once it is done

    def start(self) -> None:
        """Run until it first asks, waits, or ends."""
        self._enter(self._let.switch())

    def _enter(self, asked: Any) -> None:
        self._num_read, self._piece = 0, None
        self._ask = self._copy = None
        if self._let.dead:
            self.value = asked
        elif isinstance(asked, Ask):
            self._ask = asked
        else:
            self._copy = asked

    @property
    def waits(self) -> bool:
        """Whether it waits for a copy."""
        return self._copy is not None

    def go_on(self) -> None:
        """Go on once the copy is there, until it asks, waits again, or ends."""
        assert self._copy is not None
        self._copy.synchronize()
        self._enter(self._let.switch())

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self._ask is None and self._copy is None

    @property
    def ask(self) -> Ask:
        """What it asks."""
        assert self._ask is not None
        return self._ask

    @property
    def num_columns(self) -> int:
        """Columns that its ask has still to read."""
        return _count_columns(self.ask) - self._num_read

    @property
    def can_cut(self) -> bool:
        """Whether its ask can be read in pieces: nothing is wanted but what follows the last position."""
        want = self.ask.want
        keeps = want.hidden_states or want.attentions or want.last_states or want.logits == "all"
        return self.ask.tokens is not None and not keeps and self.ask.cache.longest_pass is None

    @property
    def num_rows(self) -> int:
        """Rows of its ask."""
        return find_given(self.ask).shape[0]

    def next_ask(self, columns: int) -> Ask:
        """The next columns of what it asks."""
        ask = self.ask
        if not self._num_read and columns >= self.num_columns:
            return ask
        assert ask.tokens is not None
        part = slice(self._num_read, self._num_read + columns)
        size = ask.tokens[:, part].shape[1]
        counts = None
        if ask.counts is not None:
            counts = [min(max(count - self._num_read, 0), size) for count in ask.counts]
            counts = None if min(counts) == size else counts
        return replace(ask, tokens=ask.tokens[:, part], counts=counts, want=replace(ask.want, epilogue=None))

    def take(self, forward: Forward, ask: Ask) -> None:
        """Take the answer to `ask`, which `next_ask` gave; with the last piece it goes on until it asks again."""
        columns = _count_columns(ask)
        if self._piece is not None:
            real = ask.counts if ask.counts is not None else [columns] * forward.logits.shape[0]
            forward = join_chunks(self._piece, forward, real)
        self._num_read += columns
        if self.num_columns > 0:
            self._piece = forward
            return
        self._enter(self._let.switch(forward))

    def throw(self, error: BaseException) -> None:
        """Raise an error where it waits; it may catch it and go on."""
        self._enter(self._let.throw(error))

    def stop(self) -> None:
        """End it where it waits."""
        for _ in range(_MOST_THROWS):
            if self._let.dead:
                break
            with suppress(BaseException):  # what it says when it is stopped concerns nobody
                self._let.throw(Stopped())  # it returns if another pass is asked for on its way out
        self._ask = self._copy = self._piece = None


def _make_drive(function: Callable[[], Any]) -> Callable[[], Any]:
    def drive() -> Any:
        wait_by(_wait)  # in this greenlet alone
        try:
            return function()
        except SystemExit as error:  # of a caller's own code, which would end the driving thread and all requests
            raise RuntimeError(f"code of this request asked to end the program: {error!r}") from error

    return drive


def count_wanted(ask: Ask, block_size: int, columns: int | None = None) -> int:
    """The most blocks that the answer to an ask takes from each table, or to its next columns."""
    given, cache = find_given(ask), ask.cache
    if cache.num_forks > 1 or cache.first_fork is not None:
        rows, num_new = given.shape[0] // cache.num_forks, (cache.first_fork or 0) + cache.num_forks
    else:
        rows, num_new = given.shape[0], given.shape[1] if columns is None else columns
    return rows * (2 + num_new // block_size)


def find_given(ask: Ask) -> torch.Tensor:
    """What an ask reads: tokens, or embeddings."""
    given = ask.tokens if ask.tokens is not None else ask.embeds
    assert given is not None
    return given


def _count_columns(ask: Ask) -> int:
    return find_given(ask).shape[1]

"""Requests that do more than choose one token per row: each runs in a greenlet, which is suspended where it asks.

`Run.answer` is replaced by a switch to the engine. So beams, contrastive search, DoLa, guidance, speculation and
whatever a plug-in adds run as they do alone, and their asks join the passes of everybody else. Where a run waits for a
copy from a GPU (`kernels/sending.py`), it switches too: what others launch meanwhile is not waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from unspool.cache import Cache, PagedCache
from unspool.cache.paged.joint import count_held, find_counted, let_go
from unspool.cache.paged.moving import MovedRows
from unspool.decoding.forwards import join_chunks
from unspool.decoding.loop import Emitted
from unspool.decoding.reader import answer_at_once
from unspool.decoding.run import Run
from unspool.engine.drafts import DraftPools
from unspool.errors import MissingExtraError
from unspool.kernels.sending import wait_by
from unspool.protocols import Ask, Forward, Model

if TYPE_CHECKING:
    import torch


_MOST_THROWS: Final = 8


class Stopped(BaseException):
    """Raised inside a run that is to end now."""


def import_greenlet() -> Any:
    """The package that suspends runs; raises an error that names the extra where it is missing."""
    try:
        import greenlet
    except ImportError as error:
        raise MissingExtraError("greenlet", "engine", "an engine's request that is not plain decoding") from error
    return greenlet


class SpecialRun:
    """A run in a greenlet, what it waits for, and the cache that it was given."""

    def __init__(
        self,
        run: Run,
        deliver: Callable[[Emitted], None],
        open_cache: Callable[[], Cache] | None,
        drafts: DraftPools,
        *,
        reads_whole: bool = False,
    ) -> None:
        self._run, self._deliver, self._open, self._reads_whole = run, deliver, open_cache, reads_whole
        self._drafts = drafts
        self._draft_caches: list[PagedCache] = []  # of models that draft for it
        self._let: Any = None
        self._moved: MovedRows | None = None  # what the cache holds, while others have its blocks
        self._cache: PagedCache | None = None
        self._ask: Ask | None = None
        self._copy: torch.cuda.Event | None = None  # what it waits for, if it is no ask
        self._num_read = 0  # columns of the ask that were read
        self._piece: Forward | None = None  # what they gave
        run.answer = self._answer
        run.open_draft_cache = self._open_draft_cache
        if open_cache is not None:
            run.open_cache = self._open_cache

    # --- in its greenlet ---------------------------------------------------------------------------------
    def _drive(self) -> None:
        wait_by(self._wait)  # in this greenlet alone
        try:
            for emitted in self._run:
                self._deliver(emitted)
        except SystemExit as error:  # of a caller's own code, which would end the driving thread and all requests
            raise RuntimeError(f"code of this request asked to end the program: {error!r}") from error

    def _answer(self, ask: Ask) -> Forward:
        if import_greenlet().getcurrent() is not self._let:  # asked after its end, by what it has returned
            return answer_at_once(ask)
        answer: Forward = self._let.parent.switch(ask)
        return answer

    def _wait(self, copy: torch.cuda.Event) -> None:
        if import_greenlet().getcurrent() is not self._let:
            copy.synchronize()
        elif not copy.query():
            self._let.parent.switch(copy)

    def _open_cache(self) -> Cache:
        assert self._open is not None
        cache = self._open()
        if isinstance(cache, PagedCache):
            self._cache = cache
        return cache

    def _open_draft_cache(self, model: Model) -> Cache | None:
        cache = self._drafts.open(model)
        if cache is not None:
            self._draft_caches.append(cache)
        return cache

    # --- in the engine's -----------------------------------------------------------------------------------
    def start(self) -> None:
        """Run until it first asks, waits, or ends."""
        self._let = import_greenlet().greenlet(self._drive)
        self._enter(self._let.switch())

    def _enter(self, asked: Ask | torch.cuda.Event | None) -> None:
        self._num_read, self._piece = 0, None
        self._ask = asked if isinstance(asked, Ask) else None
        self._copy = None if isinstance(asked, Ask) else asked

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
    def num_columns(self) -> int:
        """Columns that its ask has still to read."""
        assert self._ask is not None
        return _count_columns(self._ask) - self._num_read

    @property
    def can_cut(self) -> bool:
        """Whether its ask can be read in pieces: nothing is wanted but what follows the last position."""
        ask = self._ask
        assert ask is not None
        want = ask.want
        keeps = want.hidden_states or want.attentions or want.last_states or want.logits == "all"
        return ask.tokens is not None and not keeps and ask.cache.longest_pass is None and not self._reads_whole

    @property
    def num_rows(self) -> int:
        """Rows of its ask."""
        assert self._ask is not None
        return _find_given(self._ask).shape[0]

    def count_wanted(self, block_size: int) -> int:
        """The most blocks that what it waits for takes from each table."""
        assert self._ask is not None
        return 0 if self._cache is None else count_wanted(self._ask, block_size, self.num_columns)

    @property
    def cache(self) -> PagedCache | None:
        """The cache that it was given."""
        return self._cache

    def next_ask(self, columns: int) -> Ask:
        """The next columns of what it asks."""
        ask = self._ask
        assert ask is not None
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
        """Take the answer to `ask`, which `next_ask` gave; with the last piece the run goes on until it asks again."""
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
        """Raise an error where the run waits; it may catch it and go on."""
        self._enter(self._let.throw(error))

    def stop(self) -> None:
        """End the run where it waits, and give its blocks back."""
        for _ in range(_MOST_THROWS):
            if self._let is None or self._let.dead:
                break
            with suppress(BaseException):  # what a run says when it is stopped concerns nobody
                self._let.throw(Stopped())  # it returns if the run asks for another pass on its way out
        self._ask = self._copy = self._piece = None
        self.release()
        # What it has returned may ask more, and whoever holds that holds this too.
        self._open, self._deliver, self._let = None, _ignore, None
        self._run.open_cache = self._run.open_draft_cache = None
        self._run.release()

    def count_held(self) -> int:
        """Blocks that it holds."""
        return 0 if self._cache is None else count_held(self._cache)

    def move_out(self) -> int:
        """Let others have its blocks while it waits; how many it needs to come back."""
        cache = self._cache
        if cache is None:
            return 0
        self._moved = MovedRows(cache)
        return self._moved.count_blocks(find_counted(cache))

    def move_in(self) -> None:
        """Take its blocks again."""
        if self._moved is not None:
            self._moved.bring_back()
            self._moved = None

    def release(self) -> None:
        """Give back the blocks of the caches that it was given."""
        cache, self._cache = self._cache, None
        self._moved = None
        if cache is not None:
            let_go(cache)
        while self._draft_caches:
            drafted = self._draft_caches.pop()
            let_go(drafted)
            self._drafts.close(drafted)


def _ignore(_: Emitted) -> None:
    """Nobody listens to a run that has ended."""


def count_wanted(ask: Ask, block_size: int, columns: int | None = None) -> int:
    """The most blocks that the answer to an ask takes from each table, or to its next columns."""
    given, cache = _find_given(ask), ask.cache
    if cache.num_forks > 1 or cache.first_fork is not None:
        rows, num_new = given.shape[0] // cache.num_forks, (cache.first_fork or 0) + cache.num_forks
    else:
        rows, num_new = given.shape[0], given.shape[1] if columns is None else columns
    return rows * (2 + num_new // block_size)


def _find_given(ask: Ask) -> torch.Tensor:
    given = ask.tokens if ask.tokens is not None else ask.embeds
    assert given is not None
    return given


def _count_columns(ask: Ask) -> int:
    return _find_given(ask).shape[1]

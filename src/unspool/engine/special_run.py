"""Requests that do more than choose one token per row: each reads its prompts in a greenlet that is suspended where it
asks, and so do all steps of those that can't share theirs with others.

`Run.answer` is replaced by a switch to the engine. So whatever a plug-in or a caller adds runs as it does alone, and
its asks join the passes of everybody else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

from unspool.cache import Cache, PagedCache
from unspool.cache.paged.joint import count_held, find_counted, let_go
from unspool.cache.paged.moving import MovedRows
from unspool.decoding.joining import JoiningTurns
from unspool.decoding.loop import Emitted
from unspool.decoding.run import Run
from unspool.engine.drafts import DraftPools
from unspool.engine.suspended import Suspended, ask_engine, count_wanted
from unspool.protocols import Ask, Forward, Model


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
        joins: bool = False,
    ) -> None:
        """One that `joins` ends when its prompts are read: `turns` are then to be stepped with others'."""
        self._run, self._deliver, self._open, self._reads_whole = run, deliver, open_cache, reads_whole
        self._drafts = drafts
        self._draft_caches: list[PagedCache] = []  # of models that draft for it
        self._work = Suspended(self._begin if joins else self._drive)
        self.turns: JoiningTurns | None = None
        self._moved: MovedRows | None = None  # what the cache holds, while others have its blocks
        self._cache: PagedCache | None = None
        run.answer = ask_engine
        run.open_draft_cache = self._open_draft_cache
        if open_cache is not None:
            run.open_cache = self._open_cache

    # --- in its greenlet ---------------------------------------------------------------------------------
    def _drive(self) -> None:
        for emitted in self._run:
            self._deliver(emitted)

    def _begin(self) -> None:
        turns = cast(JoiningTurns, self._run.begin())  # as the kind of its steps says
        turns.share()
        self.turns = turns

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
        self._work.start()

    @property
    def waits(self) -> bool:
        """Whether it waits for a copy."""
        return self._work.waits

    def go_on(self) -> None:
        """Go on once the copy is there, until it asks, waits again, or ends."""
        self._work.go_on()

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self._work.is_done

    @property
    def num_columns(self) -> int:
        """Columns that its ask has still to read."""
        return self._work.num_columns

    @property
    def can_cut(self) -> bool:
        """Whether its ask can be read in pieces."""
        return self._work.can_cut and not self._reads_whole

    @property
    def num_rows(self) -> int:
        """Rows of its ask."""
        return self._work.num_rows

    def count_wanted(self, block_size: int) -> int:
        """The most blocks that what it waits for takes from each table."""
        return 0 if self._cache is None else count_wanted(self._work.ask, block_size, self.num_columns)

    @property
    def cache(self) -> PagedCache | None:
        """The cache that it was given."""
        return self._cache

    def next_ask(self, columns: int) -> Ask:
        """The next columns of what it asks."""
        return self._work.next_ask(columns)

    def take(self, forward: Forward, ask: Ask) -> None:
        """Take the answer to `ask`, which `next_ask` gave; with the last piece the run goes on until it asks again."""
        self._work.take(forward, ask)

    def throw(self, error: BaseException) -> None:
        """Raise an error where the run waits; it may catch it and go on."""
        self._work.throw(error)

    def hand_over(self) -> PagedCache:
        """Let a set of rows have its cache, whose prompts are read."""
        cache, self._cache = self._cache, None
        assert cache is not None
        self._run.hand_over()
        return cache

    def stop(self) -> None:
        """End the run where it waits, and give its blocks back."""
        self._work.stop()
        self.release()
        # What it has returned may ask more, and whoever holds that holds this too.
        self._open, self._deliver = None, _ignore
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

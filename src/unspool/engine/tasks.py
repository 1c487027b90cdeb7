"""Requests at work in the driving thread: what each has read, and what it waits for."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from unspool.cache import Cache, PagedCache
from unspool.cache.paged.joint import adopt_rows, count_held, find_counted, let_go, list_blocks
from unspool.cache.paged.moving import MovedRows
from unspool.decoding.among import Needs, make_finish, take_apart
from unspool.decoding.finish import Finish
from unspool.decoding.forwards import join_chunks
from unspool.decoding.joining import JoiningTurns
from unspool.decoding.loop import Emitted
from unspool.decoding.randomness import draw_uniform
from unspool.decoding.reader import answer_at_once
from unspool.decoding.record import list_reported
from unspool.decoding.run_parts import RunParts
from unspool.engine.flights import PlainRow
from unspool.engine.memory import EngineMemory
from unspool.engine.plain import Arrival
from unspool.engine.prefixes import BlockNames
from unspool.engine.request import Request, Token
from unspool.engine.scheduler import Entry, Status
from unspool.engine.special_run import SpecialRun
from unspool.errors import NoTokenLeftError
from unspool.logits.blame import explain_no_token
from unspool.outputs import TokenLogprob
from unspool.protocols import Ask, Forward


class Task:
    """One request at work: what plain and special ones have in common."""

    is_plain = False

    def __init__(self, request: Request, needs: Needs, entry: Entry, tenant: str) -> None:
        self.request, self.needs, self.entry, self.tenant = request, needs, entry, tenant
        self.run = request.answer.run
        self.submitted = time.perf_counter()
        self.first_at: float | None = None

    def deliver(self, emitted: Emitted | Token, now: float | None = None) -> None:
        """Hand over what a step added, and note when."""
        stats, now = self.run.stats, time.perf_counter() if now is None else now
        stats.total_seconds = now - self.submitted
        if self.first_at is None:
            self.first_at = now
            stats.first_token_seconds = stats.total_seconds
        self.request.deliver(emitted)

    def end_rows(self, reason: str) -> None:
        """Say why rows that have not ended by themselves are over."""
        left = [row for row, known in enumerate(self.run.reasons) if known is None]
        for row in left:
            self.run.reasons[row] = reason
        self.request.deliver(Emitted({row: [] for row in left}, dict.fromkeys(left, reason)))


class PlainTask(Task):
    """A request whose rows are stepped among those of others."""

    is_plain = True

    def __init__(
        self, request: Request, needs: Needs, entry: Entry, tenant: str, parts: RunParts | None = None
    ) -> None:
        """`parts` are those of a run that may yet be stepped so (`SpecialTask.stepped`)."""
        super().__init__(request, needs, entry, tenant)
        self.parts = take_apart(self.run.parts if parts is None else parts)
        self._names = [BlockNames(tenant) for _ in self.parts.token_ids]  # a text's each
        self._arrays = self.parts.texts
        self._finish: Finish | None = None  # made when it begins: some stops count from then
        self.quick_ends: dict[int, str] | None = None  # the tokens that end its row, if little else does
        self.known_ends: Mapping[int, bool] | None = None  # other tokens with which it may end, as far as it is known
        self._lone: PlainRow | None = None  # that row
        self._emitted: list[int] = []  # the run's: what was handed over
        self._last_width = 0  # columns at which a length ends it
        self.rows: list[PlainRow] = []  # those that have not ended
        self._width = 0  # columns that they would have alone, if it has not one quick row
        self.cache: Any = None  # while it reads
        self._texts: list[list[int]] = []
        self._index: list[int] = []
        self._forward: Forward | None = None
        self._moved: MovedRows | None = None  # what its cache holds, while others have its blocks

    def prepare(self, memory: EngineMemory) -> None:
        """Do in the caller's thread what the driving thread need not."""
        prefixes = memory.prefixes
        if prefixes is not None:
            texts = list(zip(self._arrays, self._names, strict=True))
            # A guess: it is known when it is opened, after its first turn was planned.
            self.entry.unread = max(len(text) - prefixes.name(text, names) for text, names in texts)

    def open(self, memory: EngineMemory) -> None:
        """Begin to read, for the first time or again, after what others have read already; or go on."""
        if self._moved is not None:
            self._moved.bring_back()
            self._moved, self.entry.moved = None, 0
            self.note_blocks()
            return
        if self._finish is None:
            parts, finish = self.parts, make_finish(self.run)
            self._finish = finish
            self.quick_ends = finish.quick_ends if len(parts.seeds) == 1 else None
            self.known_ends = finish.known_ends
            self._emitted = self.run.emitted[0]
            self._texts = parts.token_ids
            self._index = [row for row in range(len(parts.token_ids)) for _ in range(parts.copies)]
            self._width = parts.width
            left = finish.count_left(parts.width)
            self._last_width = parts.width + left if left is not None else 1 << 62
            self.rows = [
                PlainRow(
                    self,
                    number,
                    list(self._texts[prompt]),
                    seed,
                    left,
                    self._names[prompt] if parts.copies == 1 else self._names[prompt].copy(),
                    self._arrays[prompt],
                )
                for number, (prompt, seed) in enumerate(zip(self._index, parts.seeds, strict=True))
            ]
            self._lone = self.rows[0] if self.quick_ends is not None else None
        else:
            self._follow_rows()
        self._forward = None
        self._open_cache(memory)
        self.note_blocks()

    def _follow_rows(self) -> None:
        """Let what is to be read be all that the rows have."""
        assert self._finish is not None
        self._texts = [list(row.tokens) for row in self.rows]
        self._index = list(range(len(self.rows)))
        self._names = [row.names for row in self.rows]
        self._arrays = [np.array(text, dtype=np.int64) for text in self._texts]
        left = self._finish.count_left(self.width)
        for row, text in zip(self.rows, self._arrays, strict=True):
            row.num_left, row.has_left, row.text = left, False, text

    def _open_cache(self, memory: EngineMemory) -> None:
        pool = memory.pool
        assert pool is not None
        self.cache = memory.new_cache()
        if memory.prefixes is not None:
            known = zip(self._texts, self._names, strict=True)
            found = [memory.prefixes.find(text, names) for text, names in known]
            if not self._emitted:  # else it reads again what it had to give up
                self.run.stats.cached_tokens = sum(map(len, found)) * pool.block_size
            if any(found):
                adopt_rows(self.cache, found)

    def note_blocks(self) -> None:
        """Report to the scheduler what is being read, and what is held."""
        entry, held = self.entry, self._held()
        entry.num_prompts, entry.num_rows = len(self._texts), len(self.rows)
        entry.length = max(map(len, self._texts))
        entry.unread = max(len(text) - n for text, n in zip(self._texts, held, strict=True))
        entry.held = self.count_held()
        entry.is_spread = len(self._index) > len(self._texts)

    def _held(self) -> list[int]:
        held = self._read_lengths() if self.cache is not None else []
        return held or [0] * len(self._texts)

    @property
    def is_heard(self) -> bool:
        """Whether somebody waits for each of its tokens."""
        return self.request.is_heard

    @property
    def width(self) -> int:
        """Columns that its rows would have alone."""
        parts, lone = self.parts, self._lone
        return self._width if lone is None else parts.width + len(lone.tokens) - len(parts.token_ids[0])

    @property
    def is_greedy(self) -> bool:
        """Whether its one row takes the likeliest tokens as passes find them, and nobody looks at their scores."""
        parts = self.parts
        return len(parts.seeds) == 1 and not (parts.processors or parts.do_sample or parts.num_top is not None)

    def next_ask(self, columns: int) -> Ask:
        """The next columns of every text; the tokens are on the host."""
        held = self._held()
        counts = [min(columns, len(text) - n) for text, n in zip(self._texts, held, strict=True)]
        width = max(counts)
        tokens = torch.zeros((len(counts), width), dtype=torch.int64)
        filled = tokens.numpy()
        for row, (text, n, count) in enumerate(zip(self._arrays, held, counts, strict=True)):
            filled[row, :count] = text[n : n + count]
        assert self.cache is not None
        return Ask(self.run.parts.model, self.cache, tokens, None if min(counts) == width else counts)

    def count_read(self, ask: Ask) -> int:
        """Tokens of its own that an answer to `next_ask` has read."""
        assert ask.tokens is not None
        return sum(ask.counts) if ask.counts is not None else ask.tokens.numel()

    def take(self, forward: Forward, ask: Ask, memory: EngineMemory) -> Arrival | None:
        """Take the answer to `next_ask`; with the last piece its rows can be stepped."""
        assert ask.tokens is not None and self.cache is not None
        if self._forward is not None:
            real = ask.counts if ask.counts is not None else [ask.tokens.shape[1]] * ask.tokens.shape[0]
            forward = join_chunks(self._forward, forward, real)
        self.run.stats.forward_passes += 1
        self.run.stats.path, self.run.stats.path_reason = forward.path, forward.path_reason
        self._forward = forward
        if any(len(text) > n for text, n in zip(self._texts, self._read_lengths(), strict=True)):
            return None
        if memory.prefixes is not None:
            for row, (text, names) in enumerate(zip(self._texts, self._names, strict=True)):
                memory.prefixes.enter(text, list_blocks(self.cache, row), names)
        cache, self.cache, self._forward = self.cache, None, None
        return Arrival(self.parts, list(self.rows), self._index, self.width, forward, cache)

    def _read_lengths(self) -> list[int]:
        """Positions of each text that were read."""
        assert self.cache is not None
        return list(self.cache.lengths)

    def count_held(self) -> int:
        """Blocks that reading has taken."""
        return 0 if self.cache is None else count_held(self.cache)

    def reset(self) -> None:
        """Give up what was read: all of it will be read again."""
        self.close()
        self._texts = [list(row.tokens) for row in self.rows]
        self._index = list(range(len(self.rows)))
        self.note_blocks()

    def move_out(self, cache: PagedCache | None) -> None:
        """Let others have its blocks: those of the rows that were stepped, or, without, those that it has read into.

        Rows that were stepped have one token that was not read: with that they go on.
        """
        if cache is not None:
            self.cache, self._forward = cache, None
            self._follow_rows()
        if self.cache is None:
            self.reset()
            return
        self._moved = MovedRows(self.cache)
        self.note_blocks()
        self.entry.moved = self._moved.count_blocks(find_counted(self.cache))

    def close(self) -> None:
        """Give back what reading has taken."""
        cache, self.cache, self._forward, self._moved = self.cache, None, None, None
        if cache is not None:
            let_go(cache)

    # --- its rows' new tokens --------------------------------------------------------------------------------
    def note_quick(self, token: int, now: float) -> bool:
        """Look at the newest token of a lone row that ends with a token or a length; whether it has ended."""
        ends, row, stats = self.quick_ends, self._lone, self.run.stats
        assert ends is not None and row is not None and self._finish is not None
        width = self.width
        if width >= self._last_width:
            reason = self._finish.explain_texts([row.tokens], width)[0]
        else:
            reason = ends.get(token)
            if reason is None and self.known_ends is not None and self.known_ends.get(token, True):
                reason = self._finish.find_text(row.tokens)
        if self.first_at is None:
            self.first_at = now
            stats.first_token_seconds = now - self.submitted
        if reason is not None:
            self.run.reasons[0] = reason
            row.is_done = True
            self.rows = []
        if reason is not None or self.is_heard:
            self.hand_over(now, reason)
        return reason is not None

    def hand_over(self, now: float, reason: str | None = None) -> None:
        """Give the reader of a lone row the tokens that it has not been given, and why the last is the last."""
        row, stats = self._lone, self.run.stats
        if row is None:
            return
        first = len(self._emitted)
        new = row.tokens[len(self.parts.token_ids[0]) + first :]
        if not new:
            return
        self._emitted += new
        stats.new_tokens += len(new)
        stats.forward_passes += len(new)
        stats.total_seconds = now - self.submitted
        if self.parts.num_top is None:
            self.request.deliver(*((token, None) for token in new[:-1]), (new[-1], reason))
            return
        reported = row.reported[first : first + len(new)]
        self.run.reported += reported
        reasons = [None] * (len(new) - 1) + [reason]
        self.request.deliver(*zip(new, reasons, reported, strict=True))

    def end_rows(self, reason: str) -> None:
        self.hand_over(time.perf_counter())
        super().end_rows(reason)

    def note(self, rows: Sequence[PlainRow], tokens: Sequence[int]) -> Emitted:
        """Look at the newest tokens of rows, and see which are done with them."""
        finish, emitted = self._finish, Emitted({}, {})
        assert finish is not None
        self._width += 1
        if finish.calls_criteria:
            texts = [[0] * (self._width - len(row.tokens)) + row.tokens for row in rows]
            reasons = finish.explain(torch.tensor(texts), None)
        else:
            reasons = finish.explain_texts([row.tokens for row in rows], self._width)
        for row, token, reason in zip(rows, tokens, reasons, strict=True):
            emitted.tokens[row.number] = [token]
            if row.reported:
                emitted.logprobs[row.number] = list_reported([row.reported.pop()])
            if reason is not None:
                emitted.finished[row.number] = reason
                row.is_done = True
        if emitted.finished:
            self.rows = [row for row in self.rows if not row.is_done]
        stats = self.run.stats
        stats.new_tokens += len(rows)
        stats.forward_passes += 1
        self.run.gather(emitted)
        return emitted

    def explain_no_token(self, row: PlainRow) -> NoTokenLeftError:
        """Why a row has no token to choose from, found by reading its text again; what stands for it is taken off."""
        row.tokens.pop()
        model, tokens = self.run.parts.model, torch.tensor([row.tokens])
        cache = self.run.make_cache()
        cache.select_rows([row.number // self.parts.copies])
        logits = answer_at_once(Ask(model, cache, tokens.to(model.device))).logits.float().cpu()
        uniforms = draw_uniform(torch.tensor([row.seed]), torch.tensor([len(row.tokens)]), 1)
        processors = self.parts.processors.select_rows(torch.tensor([row.number]))
        extra = {"uniforms": uniforms} if processors.takes("uniforms") else {}
        where = f"row {row.number}, at position {len(row.tokens)}"
        return explain_no_token(processors, tokens, logits, extra, place=0, where=where)


class SpecialTask(Task):
    """A request that runs in a greenlet."""

    def __init__(self, request: Request, needs: Needs, entry: Entry, tenant: str) -> None:
        super().__init__(request, needs, entry, tenant)
        self.special: SpecialRun | None = None
        self.stepped: PlainTask | None = None  # the same request, stepped with others, without drafts
        # What those have in common with whose rows its own can be stepped; None: its steps are its own.
        self.kind: Hashable | None = None
        self._news = Emitted({}, {})  # what its rows wrote in a set, and was not handed over
        self._first_wanted = entry.wanted
        self._is_entered = False  # its prompts' blocks can be found by others
        self._names: list[BlockNames] = []  # of those blocks, if they were looked for

    def step_with_others(self) -> PlainTask | SpecialTask:
        """The task that takes its place before it begins, if there are others whose steps it can share."""
        if self.stepped is None:
            return self
        self.run.parts = self.run.parts.without_drafts()
        return self.stepped

    def open(self, memory: EngineMemory) -> None:
        """Begin, and run until it first asks; or go on."""
        shares = memory.pool is not None and not self.needs.own_cache
        if self.special is not None:  # it was stopped, and goes on
            self.special.move_in()
            self.entry.moved = 0
            return
        self.special = SpecialRun(
            self.run,
            self.deliver,
            (lambda: self._open_cache(memory)) if shares else None,
            memory.drafts,
            reads_whole=shares and memory.is_packed,
            joins=self.kind is not None,
        )
        self.special.start()

    # --- stepped with others ---------------------------------------------------------------------------------
    def join(self, memory: EngineMemory) -> tuple[JoiningTurns, PagedCache]:
        """Its turns and its cache for a set of rows, once its prompts are read."""
        special, entry, plan = self.special, self.entry, self.run.parts.plan
        assert special is not None and special.turns is not None
        turns, special.turns = special.turns, None
        cache = special.hand_over()
        most = max(plan.num_candidates, 0 if plan.drafting is None else plan.drafting.num_tokens)
        entry.held = count_held(cache)
        entry.wanted = memory.use.num_tables * self.needs.num_cache_rows * (2 + most // memory.block_size)
        entry.unread, entry.status = 0, Status.RUNNING
        return turns, cache

    def note_tokens(self, row: int, tokens: list[int], logprobs: list[TokenLogprob] | None, reason: str | None) -> None:
        """Take what a step of a set wrote to one of its rows."""
        news = self._news
        if row in news.tokens:
            news.tokens[row] += tokens
        else:
            news.tokens[row] = list(tokens)
        if logprobs is not None:
            news.logprobs.setdefault(row, []).extend(logprobs)
        if reason is not None:
            news.finished[row] = reason

    @property
    def has_news(self) -> bool:
        """Whether what it wrote is to be handed over now: it is the first or the last, or somebody waits for it."""
        news = self._news
        return bool(news.tokens) and (self.first_at is None or bool(news.finished) or self.request.is_heard)

    def hand_over(self, num_passes: int) -> bool:
        """Give its reader what it wrote; whether it has ended."""
        news, self._news, stats = self._news, Emitted({}, {}), self.run.stats
        stats.forward_passes = num_passes
        stats.new_tokens += sum(map(len, news.tokens.values()))
        self.run.skip_repeated(news)
        if news.tokens:
            self.run.gather(news)
            self.deliver(news)
        return all(self.run.reasons)

    def restart(self, *, joins: bool) -> None:
        """Begin again, with what was handed over known: to join others once more, or after an error of theirs alone."""
        if self.special is not None:
            self.special.stop()
        self.special, self._news, self._is_entered = None, Emitted({}, {}), False
        self.kind = self.kind if joins else None
        self.run.restart()
        entry, needs = self.entry, self.needs
        entry.unread, entry.num_prompts, entry.wanted = needs.longest_prompt, needs.num_prompts, self._first_wanted
        entry.held = entry.moved = 0
        if joins:  # it was sent back: now it is promised all that it may take, so that it begins no third time
            entry.can_move = False

    def move_out(self) -> None:
        """Let others have its blocks."""
        assert self.special is not None
        self.entry.moved, self.entry.held = self.special.move_out(), 0

    def _open_cache(self, memory: EngineMemory) -> Cache:
        pool = memory.pool
        assert pool is not None
        cache = memory.new_cache()
        if memory.prefixes is not None and not self.needs.reads_whole_prompts:
            texts = self.run.parts.prompts.list_tokens()
            self._names = [BlockNames(self.tenant) for _ in texts]
            found = [memory.prefixes.find(text, names) for text, names in zip(texts, self._names, strict=True)]
            self.run.stats.cached_tokens = sum(map(len, found)) * pool.block_size
            if any(found):
                adopt_rows(cache, found)
        return cache

    def enter_prompts(self, memory: EngineMemory) -> None:
        """Let others find what it has read of its prompts; called when its first ask was read, before it goes on."""
        cache = None if self.special is None else self.special.cache
        if self._is_entered or memory.prefixes is None or cache is None:
            return
        self._is_entered = True
        texts = self.run.parts.prompts.list_tokens()
        for row, text in enumerate(texts[: len(cache.lengths)]):
            read = min(len(text), cache.lengths[row])
            names = self._names[row] if self._names else BlockNames(self.tenant)
            memory.prefixes.enter(text[:read], list_blocks(cache, row), names)

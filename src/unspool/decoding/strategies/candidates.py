"""Candidates for every row's next token, read to see what each would lead to; one of them is kept."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch

from unspool.cache import FORK, ROLL_BACK, SELECT_ROWS, TRIAL, Cache
from unspool.decoding.forwards import select_rows
from unspool.decoding.observer import CandidatesCompared, Observer
from unspool.decoding.reader import Reader
from unspool.decoding.select import NO_TOKEN
from unspool.decoding.strategies.past_states import PastStates
from unspool.kernels.contests import Contest
from unspool.kernels.sending import send
from unspool.protocols import Forward

MOST_FORGOTTEN = 2  # steps with candidates that can be undone


class Candidates:
    """Reads candidates after every row with a reader, and goes on from the one that is best by its state.

    It keeps the directions of the states of every row's past: make it before the prompts are read.
    """

    def __init__(self, reader: Reader, *, one_by_one: bool, observer: Observer | None = None) -> None:
        self._reader, self._observer = reader, observer
        self._past = PastStates()
        self._taken: deque[tuple[Forward | None, int]] = deque(maxlen=MOST_FORGOTTEN)  # what `forget` goes back to
        self._tries = make_tries(
            self._read_token,
            reader.cache,
            can_fork="forks" in reader.model.info.can,
            one_by_one=one_by_one,
            likes_steps=reader.model.device.type == "cuda",
        )
        reader.watch = self._watch

    def _watch(self, forward: Forward, starts: Sequence[int], counts: Sequence[int]) -> None:
        assert forward.last_states is not None
        self._past.read(forward.last_states, starts, counts)

    def remember(self) -> None:
        """Keep what a step begins with, so that `forget` can go back to it."""
        self._taken.append((self._reader.ready, self._reader.num_passes))

    def take(self, tokens: torch.Tensor, weights: torch.Tensor, alpha: float) -> torch.Tensor:
        """Read candidates (rows, k) for every row's next token, and go on from the best: its token (rows, 1), NO_TOKEN
        where none may be taken.

        Likely ones (`weights`, rows and k: probabilities, -inf where one may not be taken) win, less `alpha` times how
        like the row's past they are. The best is read already, so the next logits take no pass.
        """
        reader, past = self._reader, self._past
        reader.starts, reader.counts = list(reader.cache.lengths), [1] * len(tokens)
        contest = Contest(alpha, weights, past.offer())
        # A contest that the pass decides does not say how like the past the candidates were.
        may_decide = reader.keeps_cache and self._observer is None
        tried = self._tries.read(tokens, contest if may_decide else None)
        if tried.epilogue is not None:
            past.take_over()
            reader.cache.advance(len(tokens))
            reader.ready = tried
            taken: torch.Tensor = tried.epilogue.taken
            return taken
        assert tried.last_states is not None
        likeness = past.find_likeness(tried.last_states.view(*tokens.shape, -1))
        chosen = contest.judge(likeness)
        if self._observer is not None:
            self._observer.see(CandidatesCompared(tokens, weights, likeness, alpha, chosen))
        first = torch.arange(len(chosen), device=chosen.device) * tokens.shape[1]
        kept = select_rows(tried, first + chosen)
        assert kept.last_states is not None
        past.append(kept.last_states[:, 0])
        self._tries.keep(chosen)
        reader.ready = kept if reader.keeps_cache else None
        return torch.where(weights[:, :1] > -torch.inf, tokens.gather(1, chosen[:, None]), NO_TOKEN)

    def _read_token(self, tokens: torch.Tensor, cache: Cache, contest: Contest | None = None) -> Forward:
        reader = self._reader
        want = reader.want if contest is None else replace(reader.want, epilogue=contest)
        return reader.ask(tokens, want=want, cache=cache)

    @property
    def can_forget(self) -> bool:
        """Whether `forget` can undo a step, and no step waits for the host."""
        reader = self._reader
        return ROLL_BACK in reader.cache.can and reader.keeps_cache and not self._tries.waits

    def forget(self, num_steps: int) -> None:
        """Undo the last steps, at most `MOST_FORGOTTEN`."""
        self._reader.forget(num_steps)
        self._past.drop(num_steps)
        for _ in range(num_steps):
            self._reader.ready, self._reader.num_passes = self._taken.pop()

    def admit(self, others: Sequence[Candidates]) -> None:
        """Take in the past of other rows, after these; the reader has them already. No step is undone after this that
        came before."""
        self._past.admit([one._past for one in others])
        self._taken.clear()

    def keep_rows(self, index: Sequence[int]) -> None:
        """Follow the rows that stay."""
        self._past.select_rows(index)
        chosen = send(index, self._reader.model.device)
        self._taken = deque(
            ((None if one is None else select_rows(one, chosen), count) for one, count in self._taken),
            maxlen=MOST_FORGOTTEN,
        )


class Read(Protocol):
    """One pass over (rows, 1) tokens after what a cache holds, and a contest of candidates that it may decide."""

    def __call__(self, tokens: torch.Tensor, cache: Cache, contest: Contest | None = None) -> Forward: ...


class Tries(Protocol):
    """Reads candidates after every row, and lets the cache follow one of them."""

    waits: bool  # the choice must be known on the host before the next pass

    def read(self, tokens: torch.Tensor, contest: Contest | None) -> Forward:
        """What a pass gives for each candidate of (rows, candidates): those of the first row, then of the second, …

        A pass that decides the contest (`Forward.epilogue`) gives that of the kept ones; nothing is left to keep.
        """
        ...

    def keep(self, chosen: torch.Tensor) -> None:
        """Leave the cache as if only candidate `chosen[row]` had been read."""
        ...


def make_tries(read: Read, cache: Cache, *, can_fork: bool, one_by_one: bool, likes_steps: bool = False) -> Tries:
    """The cheapest way that the cache offers, or the error that says what it can't do.

    A model that `likes_steps` reads one token per row much faster than a lone fork: a GPU's, whose steps are captured.
    """
    if can_fork and FORK in cache.can and not (one_by_one and likes_steps and ROLL_BACK in cache.can):
        return ForkedTries(read, cache, one_by_one=one_by_one)
    if one_by_one:
        if ROLL_BACK not in cache.can:
            cache.require(TRIAL)
        return RepeatedTries(read, cache)
    cache.require(SELECT_ROWS)
    return CopiedTries(read, cache)


class ForkedTries:
    """Candidates read over one copy of the row's keys, all at once or one after the other."""

    waits = False

    def __init__(self, read: Read, cache: Cache, *, one_by_one: bool) -> None:
        self._read, self._cache, self._one_by_one = read, cache, one_by_one

    def read(self, tokens: torch.Tensor, contest: Contest | None) -> Forward:
        num = tokens.shape[1]
        if not self._one_by_one:
            return self._read_forks(tokens, range(num), contest)
        return interleave([self._read_forks(tokens[:, j : j + 1], range(j, j + 1)) for j in range(num)])

    def _read_forks(self, tokens: torch.Tensor, forks: range, contest: Contest | None = None) -> Forward:
        view = self._cache.fork(forks)
        forward = self._read(tokens.reshape(-1, 1), view, contest)
        if forward.attentions is not None:
            forward.attentions = tuple(view.order_weights(weights) for weights in forward.attentions)
        return forward

    def keep(self, chosen: torch.Tensor) -> None:
        self._cache.keep_fork(chosen)


class CopiedTries:
    """Candidates read in copies of their row: for caches and models that can't share a row's keys."""

    waits = True

    def __init__(self, read: Read, cache: Cache) -> None:
        self._read, self._cache = read, cache
        self._num = 0

    def read(self, tokens: torch.Tensor, contest: Contest | None) -> Forward:  # noqa: ARG002 - copies are no forks
        rows, self._num = tokens.shape
        self._cache.select_rows([row for row in range(rows) for _ in range(self._num)])
        try:
            return self._read(tokens.reshape(-1, 1), self._cache)
        except BaseException:
            self._cache.select_rows(range(0, rows * self._num, self._num))  # as it was: it may be the caller's
            raise

    def keep(self, chosen: torch.Tensor) -> None:
        self._cache.select_rows([row * self._num + place for row, place in enumerate(chosen.tolist())])


class RepeatedTries:
    """Candidates read one after the other and taken back; the chosen one is read again. Needs no copy of a row."""

    waits = False

    def __init__(self, read: Read, cache: Cache) -> None:
        self._read, self._cache = read, cache
        self._tokens: torch.Tensor | None = None

    def read(self, tokens: torch.Tensor, contest: Contest | None) -> Forward:  # noqa: ARG002 - they are read one by one
        self._tokens, lengths, forwards = tokens, list(self._cache.lengths), []
        for place in range(tokens.shape[1]):
            self._cache.begin_trial()
            forwards.append(self._read(tokens[:, place : place + 1], self._cache))
            self._cache.truncate(lengths)
        return interleave(forwards)

    def keep(self, chosen: torch.Tensor) -> None:
        assert self._tokens is not None
        self._read(self._tokens.gather(1, chosen[:, None]), self._cache)


def interleave(forwards: Sequence[Forward]) -> Forward:
    """Passes over one candidate of each row as one: the first row's candidates, then the second's, …"""

    def join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack(list(tensors), dim=1).flatten(0, 1)

    def join_layers(layers: Sequence[tuple[torch.Tensor, ...] | None]) -> tuple[torch.Tensor, ...] | None:
        present = [each for each in layers if each is not None]  # all of them, or none
        return tuple(join(each) for each in zip(*present, strict=True)) if present else None

    last = [one.last_states for one in forwards if one.last_states is not None]
    return Forward(
        join([one.logits for one in forwards]),
        join_layers([one.hidden_states for one in forwards]),
        join_layers([one.attentions for one in forwards]),
        join_layers([one.cross_attentions for one in forwards]),
        last_states=join(last) if last else None,
    )

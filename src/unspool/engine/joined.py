"""Requests whose rows are stepped among those of others in a cache that takes rows in: those of encoder-decoders and of
models with states, whose memory is not in blocks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F

from unspool.decoding.prompts import EncoderInput
from unspool.decoding.reader import encode_at_once
from unspool.engine.memory import EngineMemory
from unspool.engine.passes import PassJob
from unspool.engine.plain import Arrival
from unspool.engine.tasks import PlainTask, Task
from unspool.protocols import Ask, Encoded, Forward, Model, SourceAsk

_AHEAD = 256  # new positions that a cache makes room for at once


class JoinedTask(PlainTask):
    """A plain request without blocks: it is promised all its memory when it is admitted, and is never sent back."""

    _first = 0  # its first row in what it reads together with others
    is_alone = False  # it reads by itself

    def _open_cache(self, memory: EngineMemory) -> None:
        """Made with the first read."""

    def next_ask(self, columns: int) -> Ask:
        if self.cache is None:
            self.cache, self._first = self.run.make_cache(), 0
        return super().next_ask(columns)

    def count_read(self, ask: Ask) -> int:
        assert ask.tokens is not None
        counts = ask.counts or [ask.tokens.shape[1]] * ask.tokens.shape[0]
        return sum(counts[self._first : self._first + len(self._texts)])

    def take(self, forward: Forward, ask: Ask, memory: EngineMemory) -> Arrival | None:
        arrival = super().take(forward, ask, memory)
        if arrival is not None:
            arrival.index = [self._first + row for row in arrival.index]
        return arrival

    def _read_lengths(self) -> list[int]:
        assert self.cache is not None
        return list(self.cache.lengths[self._first : self._first + len(self._texts)])

    def count_held(self) -> int:
        return 0

    def close(self) -> None:
        self.cache = self._forward = None

    # --- prompts of several as one pass ----------------------------------------------------------------------------
    @property
    def source(self) -> EncoderInput | None:
        """What its encoder reads."""
        return self.run.parts.prompts.source

    @property
    def longest(self) -> int:
        """Positions to make room for."""
        return max(map(len, self._texts)) + min(self.run.parts.plan.max_new_tokens, _AHEAD)

    @property
    def texts(self) -> list[list[int]]:
        """The prompts that it has to read."""
        return self._texts

    def join_read(self, cache: object, first: int) -> None:
        """Read in a cache of several requests, from its row `first` on."""
        self.cache, self._first = cache, first

    def read_alone(self) -> None:
        """Read by itself from now on: what it was to read with others could not be."""
        self.cache, self.is_alone = None, True


def join_reads(reads: Iterable[tuple[Task | None, int]]) -> list[tuple[int, PassJob]]:
    """Jobs that read the whole prompts of requests without blocks together, of tasks and how many columns each reads;
    none if there are too few of them, or they can't be read so."""
    tasks = [
        task
        for task, columns in reads
        if isinstance(task, JoinedTask) and task.cache is None and not task.is_alone and columns >= task.entry.unread
    ]
    if len(tasks) < 2:
        return []
    try:
        job = read_together(tasks)
    except Exception:
        job = None  # one of them is at fault, or there is no memory for all at once
    if job is None:
        for task in tasks:
            task.read_alone()
        return []
    return [(task.entry.number, job) for task in tasks]


def read_together(tasks: Sequence[JoinedTask]) -> PassJob | None:
    """One pass over the whole prompts of several requests, in one cache; None if they can't be read so."""
    run = tasks[0].run
    model, kind = run.parts.model, run.parts.plan.cache_kind
    if any(task.run.parts.plan.cache_kind != kind for task in tasks):
        return None
    texts = [text for task in tasks for text in task.texts]
    encoded = None
    if run.parts.prompts.source is not None:
        encoded = _encode(model, [task.source for task in tasks])
        if encoded is None:
            return None
    cache = model.new_cache(kind, len(texts), max(task.longest for task in tasks), encoded=encoded)
    counts = [len(text) for text in texts]
    tokens = torch.tensor([text + [0] * (max(counts) - len(text)) for text in texts])
    first = 0
    for task in tasks:
        task.join_read(cache, first)
        first += len(task.texts)
    return PassJob(Ask(model, cache, tokens, None if min(counts) == max(counts) else counts))


def _encode(model: Model, sources: Sequence[EncoderInput | None]) -> Encoded | None:
    """What an encoder gives for several requests' sources in one pass; None if they are not of one form."""
    found = [source for source in sources if source is not None and source.encoded is None]
    if len(found) < len(sources):
        return None
    lengths = [length for source in found for length in source.lengths]
    tokens = [source.tokens for source in found if source.tokens is not None]
    embeds = [source.embeds for source in found if source.embeds is not None]
    if len(tokens) == len(found) and not embeds:
        width = max(part.shape[1] for part in tokens)
        joined = torch.cat([F.pad(part, (0, width - part.shape[1])) for part in tokens])
        return encode_at_once(SourceAsk(model, joined, lengths))
    if len(embeds) == len(found) and not tokens and len({part.shape[1:] for part in embeds}) == 1:
        return encode_at_once(SourceAsk(model, None, lengths, embeds=torch.cat(embeds)))
    return None

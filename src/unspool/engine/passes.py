"""What is to be read, in as few passes as can be: asks of many requests whose keys lie in one pool become one pass."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from unspool.cache import ROLL_BACK, PagedCache
from unspool.cache.paged.joint import JointRows, shares_pool
from unspool.decoding.reader import answer_at_once
from unspool.engine.drafts import DraftPool
from unspool.engine.memory import EngineMemory
from unspool.protocols import Ask, Forward
from unspool.shortage import is_out_of_memory


@dataclass(slots=True, eq=False)
class PassJob:
    """One ask, and what came of it: an answer or an error."""

    ask: Ask
    # Its logits are read before the next turn, without changing them: beside a step of which that is true too they may
    # be made where the last ones were.
    is_brief: bool = False
    forward: Forward | None = None
    error: Exception | None = None

    @property
    def is_short(self) -> bool:
        """Whether there was no memory for it: it may be asked again, in smaller parts."""
        return self.error is not None and is_out_of_memory(self.error)

    @property
    def num_rows(self) -> int:
        """Rows that it reads."""
        given = self.ask.tokens if self.ask.tokens is not None else self.ask.embeds
        assert given is not None
        return given.shape[0]

    @property
    def num_tokens(self) -> int:
        """Tokens that it reads."""
        assert self.ask.tokens is not None
        return sum(self.ask.counts) if self.ask.counts is not None else self.ask.tokens.numel()


class Passes:
    """Runs jobs; those over the pool that want the same join one pass."""

    def __init__(self, memory: EngineMemory, *, mixes: bool) -> None:
        self._memory, self._pool = memory, memory.pool
        # Whether prompts and steps are read in one pass. Not on a GPU: there a step of one token is a captured graph.
        # And not if keys are packed: then how a pass reads depends on what all its rows hold.
        self._mixes = mixes and not memory.is_packed
        self._joint: dict[Hashable, JointRows] = {}
        self.num_passes = 0

    def run(self, jobs: Sequence[PassJob], on_answered: Callable[[PassJob], None] = lambda _: None) -> None:
        """Answer every job, or give it the error that its own pass raises; `on_answered` is called with each before
        the next pass is run."""
        if len(jobs) == 1:
            self._run_alone(jobs[0])
            on_answered(jobs[0])
            return
        groups: dict[Hashable, list[PassJob]] = {}
        for place, job in enumerate(jobs):
            key = self._find_key(job.ask)
            groups.setdefault(place if key is None else key, []).append(job)
        for key, members in groups.items():
            if len(members) == 1:
                self._run_alone(members[0])
            else:
                try:
                    self._run_joint(self._find_joint(key, members[0].ask), members)
                except Exception:
                    for job in members:  # one of them is at fault, or there is no memory for all at once
                        self._run_alone(job)
            for job in members:
                on_answered(job)

    def close(self) -> None:
        """Let go of the rows that are kept from pass to pass."""
        self._joint.clear()

    def _run_alone(self, job: PassJob) -> None:
        self.num_passes += 1
        lengths = list(job.ask.cache.lengths)
        try:
            ask, device = job.ask, job.ask.model.device
            if ask.tokens is not None and ask.tokens.device.type != device.type:
                ask = replace(ask, tokens=_send([ask.tokens], device))
            job.forward = answer_at_once(ask)
        except Exception as error:
            job.error = error
            if is_out_of_memory(error):
                _undo(job.ask.cache, lengths)

    def _find_key(self, ask: Ask) -> Hashable | None:
        """What asks of one pass have in common; None for one that is read alone."""
        want, drafting = ask.want, self._find_drafting(ask)
        if ask.tokens is None or want.hidden_states or want.attentions:
            return None
        if (drafting is None and not self._is_own(ask)) or ask.cache.is_trying:
            return None  # what is tried keeps what it may have to go back to
        is_step = ask.tokens.shape[1] == 1
        if drafting is None and self._memory.is_packed and not is_step:
            return None
        kind = (want.logits, want.last_states, want.early, want.exit_layer)
        return (id(ask.model), drafting is None, kind, self._mixes or is_step)

    def _is_own(self, ask: Ask) -> bool:
        return self._pool is not None and shares_pool(ask.cache, self._pool)

    def _find_drafting(self, ask: Ask) -> DraftPool | None:
        """The draft model in whose blocks the rows of an ask lie; None if they lie elsewhere."""
        found = self._memory.drafts.find(ask.model)
        return found if found is not None and shares_pool(ask.cache, found.pool) else None

    def _find_joint(self, key: Hashable, ask: Ask) -> JointRows:
        """What holds the rows of all asks with this key, of which one is given; kept from pass to pass."""
        drafting = self._find_drafting(ask)
        held = self._joint if drafting is None else drafting.joint
        if key not in held:
            held[key] = JointRows(self._memory.new_cache() if drafting is None else PagedCache(drafting.pool))
        return held[key]

    def _run_joint(self, joint: JointRows, jobs: Sequence[PassJob]) -> None:
        first = jobs[0].ask
        caches = [job.ask.cache for job in jobs if isinstance(job.ask.cache, PagedCache)]  # all are: see _find_key
        cache = joint.begin(caches, [job.num_rows for job in jobs])
        tokens = [job.ask.tokens for job in jobs if job.ask.tokens is not None]
        width = max(part.shape[1] for part in tokens)
        counts: list[int] = []
        for job, part in zip(jobs, tokens, strict=True):
            counts += job.ask.counts if job.ask.counts is not None else [part.shape[1]] * part.shape[0]
        filled = [part if part.shape[1] == width else F.pad(part, (0, width - part.shape[1])) for part in tokens]
        is_brief = self._mixes and first.want.is_brief and all(job.is_brief for job in jobs[1:])
        # An epilogue is of one request's rows, and others may read logits and the likeliest tokens.
        want = replace(first.want, epilogue=None, is_brief=is_brief, likeliest_only=False, finds_likeliest=True)
        try:
            self.num_passes += 1
            whole = None if min(counts) == width else counts
            forward = answer_at_once(Ask(first.model, cache, _send(filled, first.model.device), whole, want))
        except BaseException:
            joint.forget()
            raise
        joint.end()
        answers = _divide(forward, [tuple(part.shape) for part in tokens])
        for job, answer in zip(jobs, answers, strict=True):
            job.forward = answer


def _undo(cache: Any, lengths: list[int]) -> None:
    """Let a cache be what it was before a pass that there was no memory for, if the pass has moved it on."""
    if lengths and list(cache.lengths) != lengths and len(cache.lengths) == len(lengths) and ROLL_BACK in cache.can:
        cache.truncate(lengths)
    elif not lengths and any(cache.lengths) and isinstance(cache, PagedCache):
        cache.select_rows([])


def _send(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Tokens of several requests, one after the other, on a device; what lies on the host is sent in one piece."""
    if device.type != "cuda":
        return torch.cat([part.to(device) for part in parts])
    if all(part.device.type == "cpu" for part in parts):
        return torch.cat(list(parts)).pin_memory().to(device, non_blocking=True)
    return torch.cat([part if part.is_cuda else part.pin_memory().to(device, non_blocking=True) for part in parts])


def _divide(forward: Forward, shapes: Sequence[tuple[int, ...]]) -> list[Forward]:
    """What a pass returned for each of several requests, which have so many rows and read so many tokens a row."""
    counts = [rows for rows, _ in shapes]
    width = max(num_new for _, num_new in shapes)

    def split(values: torch.Tensor | None, *, by_token: bool) -> list[Any]:
        if values is None:
            return [None] * len(shapes)
        parts = list(torch.split(values, counts))
        if by_token and any(num_new < width for _, num_new in shapes):
            return [part[:, :num_new] for part, (_, num_new) in zip(parts, shapes, strict=True)]
        return parts

    is_all = forward.logits.dim() == 3
    early = forward.early_logits
    layers = [split(one, by_token=False) for one in early] if early is not None else None
    each = zip(
        split(forward.logits, by_token=is_all),
        split(forward.last_states, by_token=True),
        zip(*layers, strict=True) if layers else [early] * len(shapes),
        split(forward.likeliest, by_token=is_all),
        strict=True,
    )
    return [
        Forward(
            logits,
            last_states=states,
            early_logits=early_logits,
            likeliest=likeliest,
            path=forward.path,
            path_reason=forward.path_reason,
        )
        for logits, states, early_logits, likeliest in each
    ]


def mark_stream() -> Any:
    """An event that comes when a GPU has done what was launched so far."""
    event = torch.cuda.Event()
    event.record()
    return event

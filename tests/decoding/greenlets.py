"""A batch engine of the smallest kind: runs in greenlets, whose asks are answered together, round by round.

It is what the next engine stands on, and shows that no strategy has to know of it: a run's reader asks, its greenlet
is suspended there, and goes on once the round's passes are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import greenlet
import torch

from unspool.cache import Cache, DynamicCache
from unspool.decoding.reader import answer_at_once
from unspool.decoding.run import Run
from unspool.protocols import Ask, Encoded, Forward, SourceAsk


@dataclass
class Engine:
    """Runs, and how many asks and passes they took."""

    num_asks: int = 0
    num_passes: int = 0
    rounds: list[int] = field(default_factory=list)  # asks answered in each

    def answer(self, ask: Ask) -> Forward:
        """Suspend the run that asks until the round has answered."""
        hub = greenlet.getcurrent().parent
        assert hub is not None
        answer: Forward = hub.switch(ask)
        return answer

    def answer_source(self, ask: SourceAsk) -> Encoded:
        """The same for what is asked of an encoder."""
        hub = greenlet.getcurrent().parent
        assert hub is not None
        answer: Encoded = hub.switch(ask)
        return answer

    def drive(self, runs: Sequence[Run]) -> None:
        """Take all runs to their ends: in every round each that waits is answered."""
        lets = [greenlet.greenlet(lambda run=run: list(run) and None) for run in runs]
        waiting = {let: ask for let in lets if (ask := let.switch()) is not None}
        while waiting:
            answers = self._answer_all(list(waiting.values()))
            self.rounds.append(len(waiting))
            asked = {let: let.switch(answer) for let, answer in zip(list(waiting), answers, strict=True)}
            waiting = {let: ask for let, ask in asked.items() if ask is not None}

    def _answer_all(self, asks: list[Ask | SourceAsk]) -> list[Forward | Encoded]:
        """Answer plain steps of one model with one pass, sources of tokens too, and other asks one by one."""
        answers: dict[int, Forward | Encoded] = {}
        sources = [place for place, ask in enumerate(asks) if isinstance(ask, SourceAsk)]
        if sources:
            answers |= dict(zip(sources, _encode_joined([asks[place] for place in sources]), strict=True))
        self.num_asks += len(asks) - len(sources)
        groups: dict[int, list[int]] = {}
        for place, ask in enumerate(asks):
            if place not in answers and _can_join(ask):
                groups.setdefault(id(ask.model), []).append(place)
        for places in groups.values():
            answers |= dict(zip(places, self._answer_joined([asks[place] for place in places]), strict=True))
        for place, ask in enumerate(asks):
            if place not in answers:
                self.num_passes += 1
                answers[place] = answer_at_once(ask)
        return [answers[place] for place in range(len(asks))]

    def _answer_joined(self, asks: list[Ask]) -> list[Forward]:
        """One pass over the rows of all asks, whose keys stand in one cache while it lasts."""
        self.num_passes += 1
        joined = join_caches([ask.cache for ask in asks])
        tokens = torch.cat([ask.tokens for ask in asks if ask.tokens is not None])
        forward = answer_at_once(Ask(asks[0].model, joined, tokens))
        answers, first = [], 0
        for ask in asks:
            stop = first + len(ask.cache.lengths)
            _hand_back(joined, ask.cache, first)
            answers.append(Forward(forward.logits[first:stop]))
            first = stop
        return answers


def _encode_joined(asks: list[SourceAsk]) -> list[Encoded]:
    """One encoder pass over the sources of all asks."""
    counts = [count for ask in asks for count in ask.counts]
    tokens = [torch.nn.functional.pad(ask.tokens, (0, max(counts) - ask.tokens.shape[1])) for ask in asks]
    made, encoded, first = asks[0].model.encode(torch.cat(tokens), counts), [], 0
    for ask in asks:
        own, width = slice(first, first + len(ask.counts)), max(ask.counts)
        encoded.append(Encoded(made.states[own, :width], made.lengths[own]))
        first = own.stop
    return encoded


def _can_join(ask: Ask) -> bool:
    is_step = ask.tokens is not None and ask.tokens.shape[1] == 1 and ask.counts is None
    wants_logits = ask.want.epilogue is None and not (ask.want.early or ask.want.last_states or ask.want.exit_layer)
    return is_step and wants_logits and type(ask.cache) is DynamicCache and bool(ask.cache.lengths)


def join_caches(caches: Sequence[Cache]) -> DynamicCache:
    """A cache with the rows of several, layer by layer; caches that join without copies are another matter."""
    longest = max(max(cache.lengths) for cache in caches)
    joined = DynamicCache(capacity=longest + 1)
    for layer in range(len(caches[0])):
        filled = [
            [torch.nn.functional.pad(part, (0, 0, 0, longest - part.shape[2])) for part in cache[layer]]
            for cache in caches
        ]
        joined.update(*(torch.cat(parts) for parts in zip(*filled, strict=True)), layer)
    joined.truncate([length for cache in caches for length in cache.lengths])
    return joined


def _hand_back(joined: DynamicCache, cache: Cache, first: int) -> None:
    """Write the position that a joint pass has read into a run's own cache."""
    rows, lengths = len(cache.lengths), list(cache.lengths)
    cache.begin(rows, 1)
    for layer in range(len(joined)):
        new = [
            torch.stack([part[first + row, :, length] for row, length in enumerate(lengths)]) for part in joined[layer]
        ]
        cache.write(layer, torch.stack(new, dim=1)[:, None])  # (rows, 1, 2, heads, width)
    cache.end()

"""Processors and the choice for rows of many requests: those whose chains are alike are called once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from unspool.decoding.arguments import find_arguments, list_asked
from unspool.decoding.rows import Rows
from unspool.decoding.tails import JoinedTails, choose_token
from unspool.kernels.sending import send
from unspool.logits import LogitsProcessorList
from unspool.logits.base import RowGroups
from unspool.logits.fused import FusedTail, split_tail


@dataclass(slots=True)
class Step:
    """What a step's rows are chosen from."""

    rows: Rows
    parts: Sequence[torch.Tensor]  # what passes returned for one part of the rows after the other: (some, vocab or 0)
    likeliest: torch.Tensor | None  # (rows,), where the passes found it for all rows
    _logits: torch.Tensor | None = None
    _uniforms: dict[int, torch.Tensor] = field(default_factory=dict)
    _history: torch.Tensor | None = None
    _host_history: torch.Tensor | None = None

    @property
    def logits(self) -> torch.Tensor:
        """What is chosen from (rows, vocab), as float32; made if somebody asks, since greedy rows do not."""
        if self._logits is None:
            parts, width = self.parts, max(part.shape[1] for part in self.parts)
            # Rows without logits are greedy ones, whose likeliest tokens are known.
            parts = [part if part.shape[1] == width else part.new_zeros(len(part), width) for part in parts]
            self._logits = (parts[0] if len(parts) == 1 else torch.cat(parts)).float()
        return self._logits

    @property
    def device(self) -> torch.device:
        """Where it takes place."""
        return self.parts[0].device

    def history(self) -> torch.Tensor:
        """The rows' tokens, looked up once for all chains."""
        if self._history is None:
            self._history = self.rows.history()
        return self._history

    def host_history(self) -> torch.Tensor:
        """The same on the host."""
        if self._host_history is None:
            self._host_history = self.rows.read_history()
        return self._host_history

    def uniforms(self, stream: int) -> torch.Tensor:
        """A number for every row, worked out once for all chains."""
        if stream not in self._uniforms:
            self._uniforms[stream] = self.rows.uniforms(stream)
        return self._uniforms[stream]


class Chain:
    """Rows of a batch whose tokens are chosen in the same way, with settings of their own."""

    def __init__(self, processors: LogitsProcessorList, do_sample: bool, places: Sequence[int], shift: int) -> None:
        self.do_sample = do_sample
        self.places = list(places)  # rows of the batch
        self.shift = shift  # columns before those that all its rows would have alone
        self._index: torch.Tensor | None = None
        self.span: slice | None = None  # its places, if they stand side by side
        self._pads: tuple[torch.Tensor, torch.Tensor] | None = (
            None  # all rows' padding, and what its own rows see of it
        )
        self._follow_places()
        self._follow(processors)

    def _follow_places(self) -> None:
        places, self._index, self._pads = self.places, None, None
        first, count = (places[0], len(places)) if places else (0, 0)
        self.span = slice(first, first + count) if places == list(range(first, first + count)) else None

    def _follow(self, processors: LogitsProcessorList) -> None:
        self.processors = processors
        self._head, self._tail = split_tail(processors) if self.do_sample else (processors, None)
        self._takes = list_asked(processors)

    def admit(self, other: Chain) -> bool:
        """Take in the rows of another chain, if the two are alike in all but values per row."""
        if self.do_sample != other.do_sample or len(self.processors) != len(other.processors):
            return False
        if not self.processors:  # nobody looks at columns
            self.places += other.places
            self._follow_places()
            return True
        counts = (len(self.places), len(other.places))
        shifts = (0, 0) if other.shift == self.shift else (self.shift, other.shift)
        joined = self.processors.join_rows(other.processors, counts, shifts)
        if any(isinstance(processor, RowGroups) for processor in joined):
            return False
        if any(shifts):
            self.shift = 0  # the processors know where each row starts
        self.places += other.places
        self._follow_places()
        self._follow(joined)
        return True

    def keep(self, moved: dict[int, int]) -> bool:
        """Follow rows that stay, by the place each moves to; whether any is left. Its rows are put in the order of
        their places: then those of a chain that has all rows are what a pass returns, and nothing is picked."""
        staying = [at for at, place in enumerate(self.places) if place in moved]
        staying.sort(key=lambda at: moved[self.places[at]])
        if self.processors and staying != list(range(len(self.places))):
            self._follow(self.processors.select_rows(torch.tensor(staying, dtype=torch.int64)))
        self.places = [moved[self.places[at]] for at in staying]
        self._follow_places()
        return bool(self.places)

    @property
    def is_greedy(self) -> bool:
        """Whether it takes the likeliest tokens as the pass found them."""
        return not self.processors and not self.do_sample

    def is_whole(self, num_rows: int) -> bool:
        """Whether its rows are all of so many, in order."""
        return self.span == slice(0, num_rows)

    def choose(self, step: Step) -> torch.Tensor:
        """The tokens (rows of the chain,)."""
        if self.is_greedy:
            likeliest = step.likeliest
            return choose_token(self.pick(step.logits), None) if likeliest is None else self.pick(likeliest)
        return choose_token(self.score(step), self.pick(step.uniforms(0)) if self.do_sample else None, self._tail)

    def score(self, step: Step) -> torch.Tensor:
        """The scores (rows of the chain, vocab) before the tail, or what is chosen from if there is none."""
        scores = self.pick(step.logits)
        if not self._head:
            return scores
        history = self.pick(step.history())[:, self.shift :]
        return self._head(history, scores, **find_arguments(self._takes, _ChainRows(self, step)))

    @property
    def tail(self) -> FusedTail | None:
        """The end of its processors that is done with the draw."""
        return self._tail

    @property
    def has_head(self) -> bool:
        """Whether processors change the scores before the tail."""
        return bool(self._head)

    def pick(self, values: torch.Tensor) -> torch.Tensor:
        """Its own of all rows' values: those very values, or a part of them, if its rows stand side by side."""
        if self.span is None:
            return values.index_select(0, self.find_index(values.device))
        return values if self.is_whole(len(values)) else values[self.span]

    def find_index(self, device: torch.device) -> torch.Tensor:
        """Its places on a device."""
        if self._index is None or self._index.device.type != device.type:
            self._index = send(self.places, device)
        return self._index

    def find_pads(self, pads: torch.Tensor | None) -> torch.Tensor | None:
        """What its rows see of all rows' padding, which is the same in every step until rows come or go."""
        if pads is None:
            return None
        if self._pads is None or self._pads[0] is not pads:
            own = self.pick(pads)
            self._pads = pads, (own - self.shift).clamp(min=0) if self.shift else own
        return self._pads[1]

    @property
    def reads_host(self) -> bool:
        """Whether a processor reads the history on the host."""
        return "host_ids" in self._takes


@dataclass(slots=True)
class _ChainRows:
    """The rows of a chain in a step, as its processors see them."""

    chain: Chain
    step: Step
    padded: Sequence[int] = ()  # rows that have ended leave

    def uniforms(self, stream: int = 0) -> torch.Tensor:
        return self.chain.pick(self.step.uniforms(stream))

    def padding(self, width: int | None = None) -> torch.Tensor | None:  # noqa: ARG002 - a step's rows end together
        return self.chain.find_pads(self.step.rows.padding())

    def read_history(self, width: int | None = None) -> torch.Tensor:  # noqa: ARG002
        chain, history = self.chain, self.step.host_history()
        return (history[chain.places] if chain.span is None else history[chain.span])[:, chain.shift :]


class JoinedDraw:
    """Chains whose tokens are drawn in one call: kernels take longer to launch than to run."""

    def __init__(self, chains: Sequence[Chain]) -> None:
        self.chains = list(chains)
        self.places = [place for chain in chains for place in chain.places]
        self._index: torch.Tensor | None = None
        self._tails = JoinedTails([(chain.tail, len(chain.places)) for chain in chains if chain.tail is not None])

    @classmethod
    def find(cls, chains: Sequence[Chain], device: torch.device) -> JoinedDraw | None:
        """Those of the chains that can be drawn together; None if there are no two."""
        fitting = [chain for chain in chains if chain.do_sample and JoinedTails.fits(chain.tail, device)]
        return cls(fitting) if len(fitting) > 1 else None

    def choose(self, step: Step) -> torch.Tensor:
        """The tokens of the rows at its `places`."""
        if self._index is None:
            self._index = send(self.places, step.device)
        scores = step.logits.index_select(0, self._index)
        first = 0
        for chain in self.chains:
            stop = first + len(chain.places)
            if chain.has_head:
                scores[first:stop] = chain.score(step)
            first = stop
        return self._tails.draw(scores, step.uniforms(0).index_select(0, self._index))

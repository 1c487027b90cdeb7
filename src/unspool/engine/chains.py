"""Processors and the choice for rows of many requests: those whose chains are alike are called once for all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from unspool.decoding.rows import Rows
from unspool.decoding.select import draw, take_likeliest
from unspool.decoding.tails import draw_from_tail
from unspool.kernels.sending import send
from unspool.logits import LogitsProcessorList
from unspool.logits.base import RowGroups
from unspool.logits.fused import split_tail


@dataclass(slots=True)
class Step:
    """What a step's rows are chosen from."""

    rows: Rows
    logits: torch.Tensor  # (rows, vocab), float32
    likeliest: torch.Tensor | None  # (rows,), where the pass found it for all rows
    _uniforms: dict[int, torch.Tensor] = field(default_factory=dict)

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
        self._num_in_order: int | None = None  # how many places there are, if they are the first ones in order
        self._follow(processors)

    def _follow(self, processors: LogitsProcessorList) -> None:
        self.processors = processors
        self._head, self._tail = split_tail(processors) if self.do_sample else (processors, None)
        self._takes = frozenset(name for name in ("uniforms", "pads") if processors.takes(name))

    def admit(self, other: Chain) -> bool:
        """Take in the rows of another chain, if the two are alike in all but values per row."""
        if self.do_sample != other.do_sample or len(self.processors) != len(other.processors):
            return False
        if not self.processors:  # nobody looks at columns
            self.places += other.places
            self._index = self._num_in_order = None
            return True
        counts = (len(self.places), len(other.places))
        shifts = (0, 0) if other.shift == self.shift else (self.shift, other.shift)
        joined = self.processors.join_rows(other.processors, counts, shifts)
        if any(isinstance(processor, RowGroups) for processor in joined):
            return False
        if any(shifts):
            self.shift = 0  # the processors know where each row starts
        self.places += other.places
        self._index = self._num_in_order = None
        self._follow(joined)
        return True

    def keep(self, moved: dict[int, int]) -> bool:
        """Follow rows that stay, by the place each moves to; whether any is left."""
        staying = [at for at, place in enumerate(self.places) if place in moved]
        if len(staying) < len(self.places):
            self._follow(self.processors.select_rows(torch.tensor(staying, dtype=torch.int64)))
        self.places = [moved[self.places[at]] for at in staying]
        self._index = self._num_in_order = None
        return bool(self.places)

    @property
    def is_greedy(self) -> bool:
        """Whether it takes the likeliest tokens as the pass found them."""
        return not self.processors and not self.do_sample

    def is_whole(self, num_rows: int) -> bool:
        """Whether its rows are all of so many, in order."""
        if self._num_in_order is None:
            self._num_in_order = len(self.places) if self.places == list(range(len(self.places))) else -1
        return self._num_in_order == num_rows

    def choose(self, step: Step) -> torch.Tensor:
        """The tokens (rows of the chain,)."""
        rows, num_rows = step.rows, step.logits.shape[0]
        index = None if self.is_whole(num_rows) else self.find_index(step.logits.device)
        logits = step.logits if index is None else step.logits.index_select(0, index)
        if self.is_greedy:
            if step.likeliest is None:
                return take_likeliest(logits)
            return step.likeliest if index is None else step.likeliest.index_select(0, index)
        scores = logits
        if self._head:
            history = rows.history()
            history = (history if index is None else history.index_select(0, index))[:, self.shift :]
            scores = self._head(history, logits, **self._find_extra(step, index))
        if not self.do_sample:
            return take_likeliest(scores)
        uniforms = _pick(step.uniforms(0), index)
        return draw(scores, uniforms) if self._tail is None else draw_from_tail(self._tail, scores, uniforms)

    def find_index(self, device: torch.device) -> torch.Tensor:
        """Its places on a device."""
        if self._index is None or self._index.device.type != device.type:
            self._index = send(self.places, device)
        return self._index

    def _find_extra(self, step: Step, index: torch.Tensor | None) -> dict[str, torch.Tensor]:
        extra: dict[str, torch.Tensor] = {}
        if "uniforms" in self._takes:
            extra["uniforms"] = _pick(step.uniforms(1), index)
        if "pads" in self._takes and (pads := step.rows.padding()) is not None:
            pads = _pick(pads, index)
            extra["pads"] = (pads - self.shift).clamp(min=0) if self.shift else pads
        return extra


def _pick(values: torch.Tensor, index: torch.Tensor | None) -> torch.Tensor:
    return values if index is None else values.index_select(0, index)

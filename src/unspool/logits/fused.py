"""The usual end of a sampling chain in one step: temperature, top-k, top-p, min-p and cuts after these, on the
candidates alone.

The plain chain of processors is the reference; this gives the tokens it leaves and their scores, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from unspool.kernels.cpu.library import Draws
from unspool.kernels.draws import new_draws
from unspool.logits.base import LogitsProcessor, LogitsProcessorList
from unspool.logits.highest import take_highest
from unspool.logits.temperature import TemperatureLogitsWarper
from unspool.logits.truncation import MinPLogitsWarper, TopALogitsWarper, TopKLogitsWarper, TopPLogitsWarper
from unspool.logits.typicality import EpsilonLogitsWarper, EtaLogitsWarper, TypicalLogitsWarper

INF = float("inf")
NO_IDS = torch.zeros(0, 0, dtype=torch.int64)
MOST_CANDIDATES = 1_024
MOST_DRAWN = (1 << 31) - 1
ROOM_FOR_TIES = 32  # top-k keeps what ties with the k-th score, too


@dataclass(frozen=True)
class FusedTail:
    """A recognised end of a chain: one of these processors at least."""

    top_k: TopKLogitsWarper | None = None
    temperature: TemperatureLogitsWarper | None = None
    top_p: TopPLogitsWarper | None = None
    min_p: MinPLogitsWarper | None = None
    top_a: TopALogitsWarper | None = None
    typical: TypicalLogitsWarper | None = None
    epsilon: EpsilonLogitsWarper | None = None
    eta: EtaLogitsWarper | None = None
    _draws: dict[int, Draws] = field(default_factory=dict, compare=False, repr=False)  # by the number of rows

    @property
    def after(self) -> tuple[LogitsProcessor, ...]:
        """What cuts after min-p."""
        return tuple(part for part in (self.top_a, self.typical, self.epsilon, self.eta) if part is not None)

    @property
    def can_be_ranked(self) -> bool:
        """Whether it leaves every row few candidates."""
        top_k = self.top_k
        return top_k is not None and not top_k.leaves_rows_whole and top_k.largest <= MOST_CANDIDATES

    def list_parts(self) -> dict[str, Any]:
        """Its processors by their names here, in the order of a chain."""
        parts = {name: getattr(self, name) for name in _KINDS.values()}
        return {name: part for name, part in parts.items() if part is not None}

    def list_draws(self, num_rows: int) -> Draws:
        """The same for the CPU library, if nothing cuts after min-p; valid until the next call for so many rows."""
        known = self._draws.get(num_rows)
        if known is not None:
            return known
        draws = self._draws[num_rows] = new_draws(num_rows)
        rows = torch.empty(num_rows, 1)
        if self.temperature is not None:
            draws["temperature"] = self.temperature.column(rows)[:, 0].numpy()
        if self.top_k is not None:
            draws["top_k"] = self.top_k.column(rows)[:, 0].clamp(max=MOST_DRAWN).numpy()
        if self.top_p is not None:
            draws["top_p"] = self.top_p.column(rows)[:, 0].numpy()
            draws["fewest"] = min(self.top_p.min_tokens_to_keep, MOST_DRAWN)
        if self.min_p is not None:
            draws["below"] = self.min_p.column(rows)[:, 0].numpy()
        return draws

    def find_candidates(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The tokens that may be drawn, rising, and their scores: (rows, candidates) each.

        None if it can't be ranked, or if more scores tie with the k-th than there is room for: the plain chain must
        decide. That look at the numbers is free on a CPU; on other devices, where it would make the host wait, the
        surplus is left out.
        """
        if not self.can_be_ranked:
            return None
        assert self.top_k is not None
        values, tokens = take_highest(scores, min(self.top_k.largest + ROOM_FOR_TIES, scores.shape[-1]))
        if self.temperature is not None:
            values = self.temperature(NO_IDS, values)
        threshold = self.top_k.find_threshold(values, values)  # (rows, 1)
        if values.device.type == "cpu" and values.shape[-1] < scores.shape[-1]:
            is_full = (values[:, -1:] >= threshold) & (threshold > -INF)
            if bool(is_full.any()):
                return None
        tokens, order = tokens.sort(dim=-1)
        values = values.gather(-1, order)
        values = torch.where(values < threshold, -INF, values)  # what is no number stays, as in the plain chain
        if self.top_p is not None:
            ordered, places = values.sort(dim=-1, descending=True, stable=True)
            is_kept = self.top_p.find_kept(ordered.softmax(dim=-1))
            values = torch.where(is_kept.scatter(-1, places, is_kept), values, -INF)
        if self.min_p is not None:
            values = torch.where(values >= self.min_p.find_threshold(values), values, -INF)
        for part in self.after:
            values = part(NO_IDS, values)
        return tokens, values

    def run_plainly(self, scores: torch.Tensor) -> torch.Tensor:
        """The scores (rows, vocab) after the plain processors, one by one."""
        for part in self.list_parts().values():
            scores = part(NO_IDS, scores)  # none of them looks at the history
        return scores

    def select_rows(self, index: torch.Tensor) -> FusedTail:
        """The tail for the rows at `index`."""
        return FusedTail(**{name: part.select_rows(index) for name, part in self.list_parts().items()})


_KINDS: dict[type[LogitsProcessor], str] = {  # in the order of a chain
    TemperatureLogitsWarper: "temperature",
    TopKLogitsWarper: "top_k",
    TopPLogitsWarper: "top_p",
    MinPLogitsWarper: "min_p",
    TopALogitsWarper: "top_a",
    TypicalLogitsWarper: "typical",
    EpsilonLogitsWarper: "epsilon",
    EtaLogitsWarper: "eta",
}
_KEEP_ONE = ("min_p", "typical", "epsilon", "eta")  # only if one token is enough for them


def split_tail(processors: LogitsProcessorList) -> tuple[LogitsProcessorList, FusedTail | None]:
    """The processors before a tail that can be fused, and the tail; all of them and None if there is none."""
    found: dict[str, Any] = {}
    num_before = len(processors)
    for kind, name in reversed(_KINDS.items()):
        if num_before and type(processors[num_before - 1]) is kind:
            num_before -= 1
            found[name] = processors[num_before]
    if not found:
        return processors, None
    if any(found[name].min_tokens_to_keep > 1 for name in _KEEP_ONE if name in found):
        return processors, None
    if any(getattr(part, "filter_value", -INF) != -INF for part in found.values()):
        return processors, None
    return LogitsProcessorList(processors[:num_before], starts=processors.starts), FusedTail(**found)

"""DoLa: the last layer's prediction contrasted with an earlier layer's (Chuang et al. 2023, arXiv 2309.03883)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from unspool.decoding.observer import LayersContrasted
from unspool.decoding.readouts.base import Readout, Scores
from unspool.decoding.rows import Rows
from unspool.kernels.readings import Contrast, ReadLogits
from unspool.protocols import Forward, Want

_Choice = tuple[int, list[int], torch.Tensor]
"""The number of a call's row 0 in a step, the numbers of the step's rows, and their places in `layers`."""


class Dola(Readout):
    """Gives the processors how much likelier each token became since the layer that differs most.

    One layer is chosen for the whole batch, as the reference does, or for each row by itself.
    """

    is_plain = False
    cuts = True

    def __init__(self, layers: Sequence[int], *, chooses_by_row: bool) -> None:
        self._layers = tuple(layers)
        self._contrast = Contrast(by_row=chooses_by_row)
        # Without a row's own choice, those that are done have a say in the others'.
        self.needs_every_row = len(self._layers) > 1 and not chooses_by_row
        self._chosen: list[_Choice] = []  # one per step
        self._kept = [(0, self._chosen)]  # whose rows they are, by the number of row 0: a step is entered for each
        self._known: list[int] = []  # the rows' numbers when that was looked at

    def widen(self, want: Want) -> Want:
        """The logits of the candidate layers too, or what becomes of them."""
        # An observer is shown the layers' logits, which a pass that contrasts them itself does not return.
        return replace(want, early=self._layers, epilogue=self._contrast if self.observer is None else None)

    def read(self, forward: Forward, rows: Rows, *, normalise: bool) -> Scores:  # no beams, so no `normalise`
        """The contrast of the last layer with the chosen one; the model's own logits stay the last layer's."""
        logits = forward.logits.float()
        read: ReadLogits | None = forward.epilogue
        if read is not None and read.chosen is not None:
            self._keep(rows, read.chosen)
            return Scores(logits, read.scores, forward.likeliest)
        assert forward.early_logits is not None
        early = torch.stack(forward.early_logits).float()  # (layers, rows, vocab)
        contrast, chosen = self._contrast.read(logits, early)
        if self.observer is not None:
            divergences = self._contrast.measure(torch.log_softmax(logits, dim=-1), torch.log_softmax(early, dim=-1))
            self.observer.see(LayersContrasted(self._layers, early, divergences, chosen))
        self._keep(rows, chosen)
        return Scores(logits, contrast)

    def _keep(self, rows: Rows, chosen: torch.Tensor) -> None:
        numbers = rows.numbers
        if len(self._kept) > 1 and numbers != self._known:  # of those whose rows have all left nothing is kept
            stops = [first for first, _ in self._kept[1:]] + [max(numbers) + 1]
            pairs = zip(self._kept, stops, strict=True)
            self._kept = [one for one, stop in pairs if any(one[0] <= number < stop for number in numbers)]
            self._known = numbers
        for first, kept in self._kept:
            kept.append((first, numbers, chosen))

    def forget(self, num_steps: int) -> None:
        """Keep nothing of the last steps."""
        for _, kept in self._kept:
            del kept[len(kept) - num_steps :]

    def admit(self, others: Sequence[Dola], firsts: Sequence[int]) -> None:
        """Take in rows that are contrasted with the same layers; what is chosen for them is kept where it was."""
        for other, first in zip(others, firsts, strict=True):
            if (other._layers, other._contrast) != (self._layers, self._contrast) or self.needs_every_row:
                raise ValueError("rows that are contrasted in different ways can't be read by one readout")
            self._kept += [(number + first, kept) for number, kept in other._kept]

    def result(self, emitted: Sequence[Sequence[int]]) -> dict[str, Any]:
        """The layer that each emitted token was contrasted with, one list per row of the call."""
        layers: list[list[int]] = [[] for _ in emitted]
        for first, numbers, chosen in self._chosen:
            for number, place in zip(numbers, chosen.tolist(), strict=True):
                own = number - first
                if 0 <= own < len(layers) and len(layers[own]) < len(emitted[own]):  # rows that are done may stay
                    layers[own].append(self._layers[place])
        return {"dola_layers": layers}

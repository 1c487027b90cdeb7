"""DoLa: the last layer's prediction contrasted with an earlier layer's (Chuang et al. 2023, arXiv 2309.03883)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from unspool.decoding.readout import Reading, Readout
from unspool.decoding.rows import Rows
from unspool.protocols import Forward, Want

RELATIVE_TOP = 0.1  # tokens less likely than this share of the likeliest are left out


class Dola(Readout):
    """Gives the processors how much likelier each token became since the layer that differs most.

    One layer is chosen for the whole batch, as the reference does, or for each row by itself.
    """

    def __init__(self, layers: Sequence[int], *, chooses_by_row: bool) -> None:
        self._layers = tuple(layers)
        self._chooses_by_row = chooses_by_row
        self._chosen: list[tuple[list[int], torch.Tensor]] = []  # a step each: the rows, and places in `layers`

    @property
    def needs_every_row(self) -> bool:
        """Whether rows that are done must stay, because they have a say in the choice."""
        return len(self._layers) > 1 and not self._chooses_by_row

    def widen(self, want: Want) -> Want:
        """The logits of the candidate layers too."""
        return replace(want, early=self._layers)

    def read(self, forward: Forward, rows: Rows, *, normalise: bool) -> Reading:  # noqa: ARG002 - beams are refused
        """The contrast of the last layer with the chosen one; the model's own logits stay the last layer's."""
        assert forward.early_logits is not None
        logits = forward.logits.float()
        early = torch.stack(forward.early_logits).float()  # (layers, rows, vocab)
        contrast, chosen = contrast_layers(logits, early, by_row=self._chooses_by_row)
        self._chosen.append((list(rows.numbers), chosen))
        return Reading(logits, contrast)

    def tell_layers(self, emitted: Sequence[Sequence[int]]) -> list[list[int]]:
        """The layer that each emitted token was contrasted with, a row of the call each."""
        told: list[list[int]] = [[] for _ in emitted]
        for numbers, chosen in self._chosen:
            for number, place in zip(numbers, chosen.tolist(), strict=True):
                if len(told[number]) < len(emitted[number]):  # rows that are done may stay in the batch
                    told[number].append(self._layers[place])
        return told


def contrast_layers(final: torch.Tensor, early: torch.Tensor, *, by_row: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """DoLa's scores (rows, vocab) of logits (rows, vocab) and early logits (layers, rows, vocab).

    Also the place of the layer chosen, a row each: the one whose distribution is farthest from the last layer's by
    Jensen-Shannon divergence. Nothing synchronises with the device.
    """
    mature = torch.log_softmax(final, dim=-1)
    premature = torch.log_softmax(early, dim=-1)
    chosen = _find_farthest(mature, premature, by_row)  # (rows,)
    base = premature.gather(0, chosen[None, :, None].expand(1, *final.shape)).squeeze(0)
    least = mature.amax(dim=-1, keepdim=True) + math.log(RELATIVE_TOP)
    return (mature - base).masked_fill(mature < least, -torch.inf), chosen


def _find_farthest(mature: torch.Tensor, premature: torch.Tensor, by_row: bool) -> torch.Tensor:
    num_layers, num_rows, _ = premature.shape
    if num_layers == 1:
        return torch.zeros(num_rows, dtype=torch.int64, device=premature.device)
    middle = (mature.exp() + premature.exp()) / 2
    # Divergences of the middle from both, averaged over the vocabulary: the reference's order of arguments.
    divergence = (torch.xlogy(middle, middle) - middle * (mature + premature) / 2).mean(dim=-1)  # (layers, rows)
    if by_row:
        return divergence.argmax(dim=0)
    return divergence.mean(dim=1).argmax().expand(num_rows)

"""Guidance and DoLa on a pass's logits, in torch; `gpu/sampling/readings.py` does it at the end of a captured pass."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

# Log-probabilities below it are taken for it: numbers too small for float32's full precision take a CPU a hundred times
# as long, and no sum over a vocabulary shows them.
_LEAST = -80.0
RELATIVE_TOP = 0.1  # tokens less likely than this fraction of the most likely one are left out


@dataclass(slots=True)
class ReadLogits:
    """The scores that a captured pass computed from its logits."""

    scores: torch.Tensor  # (rows, vocab): the input of the processors
    chosen: torch.Tensor | None = None  # (rows,): the index of the early layer contrasted with


@dataclass(frozen=True, slots=True)
class Guide:
    """Classifier-free guidance (Sanchez et al. 2023, arXiv 2306.17806): the first half of the rows has the prompts, the
    second the negative prompts."""

    scale: float

    @property
    def key(self) -> Guide:
        """The key of the captured pass: one serves every scale, which is an input."""
        return Guide(1.0)

    def fits(self, num_new: int, num_forks: int) -> bool:
        """Logits are read of one token a row."""
        return num_new == num_forks == 1

    def read(self, logits: torch.Tensor) -> torch.Tensor:
        """Guided log-probabilities (rows, vocab) of logits (2 * rows, vocab), not normalised again."""
        own, other = torch.log_softmax(logits, dim=-1).chunk(2)
        return torch.lerp(other, own, self.scale)


@dataclass(frozen=True, slots=True)
class Contrast:
    """The last layer's prediction contrasted with an earlier layer's (Chuang et al. 2023, arXiv 2309.03883).

    One layer is chosen for the whole batch, as the reference does, or for each row separately.
    """

    by_row: bool
    relative_top: float = RELATIVE_TOP

    @property
    def key(self) -> Contrast:
        """The key of the captured pass."""
        return self

    def fits(self, num_new: int, num_forks: int) -> bool:
        """Logits are read of one token a row."""
        return num_new == num_forks == 1

    def read(self, logits: torch.Tensor, early: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """DoLa's scores (rows, vocab) of logits (rows, vocab) and early logits (layers, rows, vocab).

        Also the index of the chosen layer, one per row: the one whose distribution is farthest from the last layer's
        by Jensen-Shannon divergence. Nothing synchronises with the device.
        """
        mature = torch.log_softmax(logits, dim=-1)
        premature = torch.log_softmax(early, dim=-1)
        chosen = self._find_farthest(mature, premature)  # (rows,)
        base = premature.gather(0, chosen[None, :, None].expand(1, *logits.shape)).squeeze(0)
        least = mature.amax(dim=-1, keepdim=True) + math.log(self.relative_top)
        return (mature - base).masked_fill(mature < least, -torch.inf), chosen

    def measure(self, mature: torch.Tensor, premature: torch.Tensor) -> torch.Tensor:
        """Divergences (layers, rows) of log-probabilities (rows, vocab) and (layers, rows, vocab).

        They are those of the middle from both, averaged over the vocabulary: the reference's order of arguments.
        """
        middle = (mature.clamp(min=_LEAST).exp() + premature.clamp(min=_LEAST).exp()) / 2
        return (middle * middle.log() - middle * (mature + premature) / 2).mean(dim=-1)

    def _find_farthest(self, mature: torch.Tensor, premature: torch.Tensor) -> torch.Tensor:
        num_layers, num_rows, _ = premature.shape
        if num_layers == 1:
            return torch.zeros(num_rows, dtype=torch.int64, device=premature.device)
        divergence = self.measure(mature, premature)
        if self.by_row:
            return divergence.argmax(dim=0)
        return divergence.mean(dim=1).argmax().expand(num_rows)

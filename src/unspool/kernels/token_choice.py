"""The choice of a step's tokens, made inside the pass whose logits it is made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True)
class ChoiceSizes:
    """What a captured pass that chooses tokens is made for."""

    parts: tuple[str, ...] | None = None  # what changes scores before a draw, in its order; None: no draw
    most_ranked: int = 0  # candidates that a top-k leaves, if they are ranked; 0: whole rows are cut
    fewest: int = 1  # tokens that top-p keeps
    is_masked: bool = False  # some tokens are forbidden


@dataclass(frozen=True, slots=True, eq=False)
class TokenChoice:
    """The choice after a pass over one token of every row: the likeliest one, or one that is drawn.

    A row draws by its seed and the position of its next token, as `decoding.randomness` does: steps that follow each
    other need no numbers from the host.
    """

    sizes: ChoiceSizes
    seeds: torch.Tensor | None = None  # (rows,) int64
    settings: Mapping[str, torch.Tensor] = field(default_factory=dict)  # of the parts: (rows or 1, 1) each
    mask: torch.Tensor | None = None  # (vocab,) float32: what is added to all rows' scores, 0 or -inf

    @property
    def key(self) -> ChoiceSizes:
        """The key of the captured pass: all the rest is an input."""
        return self.sizes

    def fits(self, num_new: int, num_forks: int) -> bool:
        """Whether the pass reads one token of every row."""
        return num_new == num_forks == 1

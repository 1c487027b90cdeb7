"""Where an embedded prompt's tokens stand: what they are rotated by, and which of them see each other.

Both travel with the embeddings, as their last numbers, so that whatever slices, fills or moves rows of embeddings takes
them along.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch

NUM_AXES: Final = 3  # positions of a token of a picture: its time, its line and its column
_SIZE: Final = NUM_AXES + 1
ALONE: Final = -1  # a token of no group


@dataclass(frozen=True, slots=True)
class Seats:
    """The places of a prompt's tokens."""

    turns: torch.Tensor  # (rows, new, 3): the positions that their queries and keys are rotated by
    groups: torch.Tensor  # (rows, new): tokens of one group see each other, later ones too; `ALONE` of none

    def join(self, vectors: torch.Tensor) -> torch.Tensor:
        """Embeddings (rows, new, hidden) with their places behind them: (rows, new, hidden + 4), in float32."""
        places = torch.cat((self.turns, self.groups[..., None]), dim=-1)
        return torch.cat((vectors.float(), places.to(vectors.device, torch.float32)), dim=-1)


def split_seats(embeds: torch.Tensor, width: int) -> tuple[torch.Tensor, Seats | None]:
    """Embeddings (rows, new, width), and their places if they have any."""
    if embeds.shape[-1] == width:
        return embeds, None
    assert embeds.shape[-1] == width + _SIZE
    places = embeds[..., width:]
    return embeds[..., :width], Seats(places[..., :NUM_AXES], places[..., NUM_AXES].long())

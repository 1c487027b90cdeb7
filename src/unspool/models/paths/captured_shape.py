"""What a captured pass reads and gives: passes of one shape are one graph."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from unspool.kernels.key_layout import PLAIN, KeyLayout
from unspool.kernels.packing import Scheme


@dataclass(frozen=True, slots=True)
class PassShape:
    """What a captured pass reads and gives."""

    rows: int
    layout: KeyLayout = PLAIN  # how keys are found
    num_new: int = 1  # tokens a row
    is_forked: bool = False  # they are candidates for one position
    num_layers: int | None = None  # the pass ends after so many
    early: tuple[int, ...] = ()  # layers whose states the head reads too
    wants_states: bool = False  # the states that the head reads are wanted
    packing: tuple[Scheme, Scheme] | None = None  # how the cache's first keys and values are packed
    away: tuple[int, ...] = ()  # layers whose keys are brought to the device while those before them compute
    epilogue: Hashable | None = None  # what follows the pass: an epilogue's `key`

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return self.rows * self.num_new

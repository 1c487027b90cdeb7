"""The shape of a captured pass: passes of one shape share a graph."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from unspool.kernels.key_layout import PLAIN, KeyLayout
from unspool.kernels.packing import Scheme


@dataclass(frozen=True, slots=True)
class PassShape:
    """The inputs and outputs of a captured pass."""

    rows: int
    layout: KeyLayout = PLAIN  # how keys are found
    num_new: int = 1  # tokens per row
    is_forked: bool = False  # they are candidates for one position
    num_layers: int | None = None  # the pass ends after this many; None: all
    early: tuple[int, ...] = ()  # layers whose states the head reads too
    wants_states: bool = False  # the states that the head reads are wanted
    packing: tuple[Scheme, Scheme] | None = None  # how the cache's first keys and values are packed
    away: tuple[
        int, ...
    ] = ()  # offloaded layers, whose keys are copied to the device while the layers before them compute
    most_keys: int = 0  # of a row, those of the new tokens included; 0: any number
    rows_each: int = 0  # rows that read one source of an encoder; 0 without an encoder
    epilogue: Hashable | None = None  # what follows the pass: an epilogue's `key`
    is_sketched: bool = False  # nobody reads the logits: the likeliest tokens are found by a sketch of the head

    @property
    def is_plain_step(self) -> bool:
        """Whether one token of every row is read, for the logits after it alone."""
        return self.num_new == 1 and not self.early and not self.wants_states

    @property
    def num_tokens(self) -> int:
        """Tokens of all rows."""
        return self.rows * self.num_new

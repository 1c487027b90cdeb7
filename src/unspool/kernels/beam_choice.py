"""Beam search's choice, made inside the pass whose logits it is made from: its input and its result."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch


class Running(Protocol):
    """Beams that a pass goes on from."""

    @property
    def running(self) -> torch.Tensor:
        """(rows,) float32: their log-probabilities."""
        ...


@dataclass(frozen=True, slots=True)
class BeamSizes:
    """What a captured pass that chooses beams is made for."""

    num_beams: int  # of a prompt
    num_candidates: int  # of a prompt
    num_ends: int
    never: float  # what a sequence that ends is lowered by


@dataclass(slots=True, eq=False)
class BeamChoice:
    """The choice after a pass over one token of every beam."""

    sizes: BeamSizes
    ends: torch.Tensor  # (ends,) int64: tokens that end a sequence
    mask: torch.Tensor | None = None  # (vocab,) float32: what is added to log-probabilities, 0 or -inf
    # The beams; if a pass chose them (`ChosenBeams`), the next one reads the tokens that it chose.
    before: Running | None = None

    @property
    def key(self) -> BeamSizes:
        """The key of the captured pass: all the rest is an input."""
        return self.sizes

    def fits(self, num_new: int, num_forks: int) -> bool:
        """Whether the pass reads one token of every beam."""
        return num_new == num_forks == 1


class BeamMemory:
    """How a choice lies in one piece of memory, which is copied at once: lines of one number a row, then candidates."""

    def __init__(self, rows: int, sizes: BeamSizes) -> None:
        self._sizes = sizes
        self._line = rows + rows % 2  # an address that is a multiple of 16 has kernels of its own
        num_packed = rows // sizes.num_beams * 3 * sizes.num_candidates
        self.num_numbers = 3 * self._line + (num_packed + 1) // 2

    def find_parents(self, held: torch.Tensor, rows: int) -> torch.Tensor:
        """(rows,) int64: the row that each row goes on from."""
        return held.narrow(0, 0, rows)

    def find_tokens(self, held: torch.Tensor, rows: int) -> torch.Tensor:
        """(rows, 1) int64: its next token."""
        return held.as_strided((rows, 1), (1, 1), self._line)

    def find_running(self, held: torch.Tensor, rows: int) -> torch.Tensor:
        """(rows,) float32: its log-probability."""
        return held.narrow(0, 2 * self._line, self._line).view(torch.float32).narrow(0, 0, rows)

    def find_packed(self, held: torch.Tensor, rows: int) -> torch.Tensor:
        """(prompts, 3, candidates) int32: tokens, beams that they continue, bits of their log-probabilities."""
        shape = (rows // self._sizes.num_beams, 3, self._sizes.num_candidates)
        packed = held.narrow(0, 3 * self._line, held.numel() - 3 * self._line).view(torch.int32)
        return packed.narrow(0, 0, math.prod(shape)).view(shape)

    def read_packed(self, held: torch.Tensor, rows: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The same of a copy on the host: numpy takes a tenth of torch's time to find a part."""
        shape = (rows // self._sizes.num_beams, 3, self._sizes.num_candidates)
        return held.numpy()[3 * self._line :].view(np.int32)[: math.prod(shape)].reshape(shape)


class ChosenBeams:
    """What a pass chose of its candidates."""

    __slots__ = ("__weakref__", "_memory", "_rows", "column", "held", "parents")

    def __init__(self, memory: BeamMemory, held: torch.Tensor, rows: int) -> None:
        self._memory, self._rows = memory, rows
        self.held = held  # int64: all of it
        self.parents = memory.find_parents(held, rows)
        self.column = memory.find_tokens(held, rows)  # (rows, 1)

    @property
    def running(self) -> torch.Tensor:
        """(rows,) float32: the log-probabilities of the rows that go on."""
        return self._memory.find_running(self.held, self._rows)

    def read_packed(self, copied: torch.Tensor) -> np.ndarray[Any, np.dtype[np.int32]]:
        """The candidates (prompts, 3, candidates) in a copy of all that is held, on the host."""
        return self._memory.read_packed(copied, self._rows)

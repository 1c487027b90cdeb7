"""Beam search's choice, made inside the pass whose logits it is made from: its input and its result."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from unspool.kernels.sending import fetch_once, send


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


class BeamParts(NamedTuple):
    """What a choice is made of, where it lies."""

    packed: torch.Tensor  # (prompts, 3, candidates) int32: tokens, beams they continue, bits of their log-probabilities
    parents: torch.Tensor  # (rows,) int64: the row that each row goes on from
    column: torch.Tensor  # (rows, 1) int64: its next token
    running: torch.Tensor  # (rows,) float32: its log-probability


class BeamMemory:
    """One piece of memory for a choice, which is copied at once: lines of one number a row, then the candidates."""

    def __init__(self, rows: int, sizes: BeamSizes, device: torch.device) -> None:
        self._sizes, self.num_runs = sizes, 0  # how often it was written
        self._line = rows + rows % 2  # an address that is a multiple of 16 has kernels of its own
        num_packed = rows // sizes.num_beams * 3 * sizes.num_candidates
        self.held = torch.zeros(3 * self._line + (num_packed + 1) // 2, dtype=torch.int64, device=device)
        self._known: tuple[int, BeamParts] | None = None  # of how many rows: their parts

    def find_parts(self, rows: int) -> BeamParts:
        """The parts of the first `rows` rows; kept, as to make them takes as long as a launch."""
        if self._known is None or self._known[0] != rows:
            self._known = (rows, self._find_parts(rows))
        return self._known[1]

    def _find_parts(self, rows: int) -> BeamParts:
        held, line, shape = self.held, self._line, self._shape_packed(rows)
        packed = held[3 * line :].view(torch.int32)[: math.prod(shape)].view(shape)
        running = held[2 * line : 3 * line].view(torch.float32)[:rows]
        return BeamParts(packed, held[:rows], held[line : line + rows, None], running)

    def read_parts(self, copied: np.ndarray[Any, np.dtype[np.int64]], rows: int) -> HostParts:
        """The same of a copy on the host."""
        line, shape = self._line, self._shape_packed(rows)
        packed = copied[3 * line :].view(np.int32)[: math.prod(shape)].reshape(shape)
        running = copied[2 * line : 3 * line].view(np.float32)[:rows]
        return HostParts(packed, copied[:rows], copied[line : line + rows], running)

    def _shape_packed(self, rows: int) -> tuple[int, int, int]:
        return rows // self._sizes.num_beams, 3, self._sizes.num_candidates


class HostParts(NamedTuple):
    """`BeamParts` on the host."""

    packed: np.ndarray[Any, np.dtype[np.int32]]
    parents: np.ndarray[Any, np.dtype[np.int64]]
    tokens: np.ndarray[Any, np.dtype[np.int64]]
    running: np.ndarray[Any, np.dtype[np.float32]]


class ChosenBeams:
    """What a pass chose of its candidates: in its memory until that is written again, and on its way to the host."""

    __slots__ = ("__weakref__", "_fetched", "_memory", "_number", "_on_host", "_rows")

    def __init__(self, memory: BeamMemory, rows: int) -> None:
        memory.num_runs += 1
        self._memory, self._rows, self._number = memory, rows, memory.num_runs
        self._fetched = fetch_once(memory.held)
        self._on_host: HostParts | None = None

    @property
    def is_held(self) -> bool:
        """Whether the memory has not been written since."""
        return self._memory.num_runs == self._number

    @property
    def parents(self) -> torch.Tensor:
        """(rows,) int64: the row that each row goes on from."""
        if self.is_held:
            return self._memory.find_parts(self._rows).parents
        return send(self.read().parents.tolist(), self._memory.held.device)

    @property
    def column(self) -> torch.Tensor:
        """(rows, 1) int64: its next token."""
        if self.is_held:
            return self._memory.find_parts(self._rows).column
        return send(self.read().tokens.tolist(), self._memory.held.device)[:, None]

    @property
    def running(self) -> torch.Tensor:
        """(rows,) float32: its log-probability."""
        if self.is_held:
            return self._memory.find_parts(self._rows).running
        return send(self.read().running.tolist(), self._memory.held.device, torch.float32)

    @property
    def on_host(self) -> HostParts | None:
        """What was read."""
        return self._on_host

    def read(self) -> HostParts:
        """All of it on the host, once it is there."""
        if self._on_host is None:
            self._on_host = self._memory.read_parts(self._fetched.read(_copy), self._rows)
        return self._on_host


def _copy(copied: torch.Tensor) -> np.ndarray[Any, np.dtype[np.int64]]:
    return copied.numpy().copy()

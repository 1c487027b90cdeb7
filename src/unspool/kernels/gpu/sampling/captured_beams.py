"""Beam search's choice at the end of a captured pass; `decoding.beams.selection` does the same in torch."""

from __future__ import annotations

import weakref

import torch

from unspool.kernels.beam_choice import BeamChoice, BeamMemory, BeamSizes, ChosenBeams
from unspool.kernels.gpu.sampling.beams import Chosen, choose_beams
from unspool.kernels.gpu.sampling.ends import PassEnd
from unspool.kernels.gpu.sampling.held_input import HeldInput


class CapturedBeams:
    """Chooses the beams of a captured pass, for a fixed number of rows: the tokens are those that the next pass reads.

    What is chosen stays here: one who comes with it again, before anyone else has come, brings nothing new.
    """

    def __init__(self, sizes: BeamSizes, rows: int, vocab: int, device: torch.device) -> None:
        self._sizes, self._memory = sizes, BeamMemory(rows, sizes, device)
        packed, parents, column, running = self._memory.find_parts(rows)
        self._chosen = Chosen(packed, parents, column[:, 0], running)
        self._ends = HeldInput(torch.zeros(sizes.num_ends, dtype=torch.int64, device=device))
        self._mask = HeldInput(torch.zeros(vocab, dtype=torch.float32, device=device))
        self._made: weakref.ref[ChosenBeams] | None = None  # what the last pass chose
        self._logits: torch.Tensor | None = None
        self._shown: tuple[int, torch.Tensor] | None = None  # of how many rows: their part of the logits

    def holds(self, choice: BeamChoice) -> bool:
        """Whether the next pass goes on from what the last one chose: its tokens are in place too."""
        is_last = self._made is not None and self._made() is choice.before
        return is_last and self._ends.is_given(choice.ends) and self._mask.is_given(choice.mask)

    def set_inputs(self, choice: BeamChoice) -> None:
        """Set the inputs of the next pass."""
        assert choice.before is not None and choice.mask is not None
        running = choice.before.running
        self._memory.num_runs += 1  # what is held is overwritten
        self._made = None
        self._chosen.running[: len(running)].copy_(running)
        self._ends.give(choice.ends)
        self._mask.give(choice.mask)

    def finish(self, end: PassEnd) -> None:
        """Launch the choice after a pass over one token of every beam."""
        self._logits, self._shown = end.logits, None
        choose_beams(
            end.logits,
            self._chosen.running,
            self._ends.values,
            num_beams=self._sizes.num_beams,
            num_candidates=self._sizes.num_candidates,
            never=self._sizes.never,
            is_normalised=False,
            mask=self._mask.values,
            chosen=self._chosen,
            next_pass=(end.tokens, end.lengths),
        )

    def take(self, rows: int) -> tuple[torch.Tensor, ChosenBeams]:
        """The logits (rows, vocab) until the next pass, and what was chosen."""
        if self._shown is None or self._shown[0] != rows:
            assert self._logits is not None
            self._shown = (rows, self._logits[:rows])
        made = ChosenBeams(self._memory, rows)
        self._made = weakref.ref(made)
        return self._shown[1], made

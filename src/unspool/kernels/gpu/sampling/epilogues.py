"""What follows a captured pass in its graph: the strategy's own computation, on the device."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from unspool.kernels.beam_choice import BeamSizes
from unspool.kernels.gpu.sampling.captured_beams import CapturedBeams
from unspool.kernels.gpu.sampling.captured_choice import CapturedChoice
from unspool.kernels.gpu.sampling.contests import CapturedContest
from unspool.kernels.gpu.sampling.ends import PassEnd
from unspool.kernels.gpu.sampling.readings import CapturedReading
from unspool.kernels.readings import Contrast, Guide
from unspool.kernels.token_choice import ChoiceSizes


@dataclass(frozen=True, slots=True)
class EpilogueSizes:
    """The sizes that determine an epilogue's memory."""

    rows: int
    num_new: int  # tokens, or candidates, per row
    num_early: int  # early layers whose logits are computed too
    hidden: int
    vocab: int
    position: int  # numbers per position of one layer's keys and values


class CapturedEpilogue(Protocol):
    """The end of a captured pass: `set_inputs` sets its inputs, `finish` launches it, `take` returns its result."""

    def holds(self, epilogue: Any) -> bool:
        """Whether all inputs of the next pass are there, the tokens that it reads among them: the last one left them.
        If not, `set_inputs` sets them, and the tokens are copied."""
        ...

    def set_inputs(self, epilogue: Any) -> None:
        """Set the inputs of the next pass, from an epilogue with the same key."""
        ...

    def finish(self, end: PassEnd) -> None:
        """Launch it after a pass. It increments the lengths (rows,) of rows that are present."""
        ...

    def take(self, rows: int) -> tuple[torch.Tensor | None, Any]:
        """Logits (rows, vocab) that replace those of the pass, or None; and the value of `Forward.epilogue`."""
        ...


def make_epilogue(key: Hashable, sizes: EpilogueSizes, device: torch.device) -> CapturedEpilogue:
    """The kernels for epilogues with this key."""
    if isinstance(key, Guide | Contrast):
        return CapturedReading(key, sizes.rows, sizes.num_early, sizes.vocab, device)
    if isinstance(key, BeamSizes):
        return CapturedBeams(key, sizes.rows, sizes.vocab, device)
    if isinstance(key, ChoiceSizes):
        return CapturedChoice(key, sizes.rows, sizes.vocab, device)
    if key == "contest":
        return CapturedContest(sizes.rows, sizes.num_new, sizes.hidden, sizes.vocab, sizes.position, device)
    raise NotImplementedError(f"there are no kernels for {key!r:.200}")

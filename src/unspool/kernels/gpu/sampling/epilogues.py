"""What follows a captured pass in its graph: the strategy's own work, on the device."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from unspool.kernels.gpu.sampling.contests import CapturedContest
from unspool.kernels.gpu.sampling.ends import PassEnd
from unspool.kernels.gpu.sampling.readings import CapturedReading
from unspool.kernels.readings import Contrast, Guide


@dataclass(frozen=True, slots=True)
class EpilogueSizes:
    """What memory an epilogue needs."""

    rows: int
    num_new: int  # tokens, or candidates, a row
    num_early: int  # layers whose logits are there too
    hidden: int
    vocab: int
    position: int  # numbers of a position's keys and values in one layer


class CapturedEpilogue(Protocol):
    """The end of a captured pass: its inputs are set by `tell`, launched by `finish` and read by `take`."""

    def tell(self, epilogue: Any) -> None:
        """Take what the next pass needs: an epilogue with the same key."""
        ...

    def finish(self, end: PassEnd) -> None:
        """Launch it after a pass. Lengths (rows,) are one more afterwards, where a row is there."""
        ...

    def take(self, rows: int) -> tuple[torch.Tensor | None, Any]:
        """Logits (rows, vocab) that replace those of the pass, or None; and what `Forward.epilogue` is."""
        ...


def make_epilogue(key: Hashable, sizes: EpilogueSizes, device: torch.device) -> CapturedEpilogue:
    """The kernels for epilogues with this key."""
    if isinstance(key, Guide | Contrast):
        return CapturedReading(key, sizes.rows, sizes.num_early, sizes.vocab, device)
    if key == "contest":
        return CapturedContest(sizes.rows, sizes.num_new, sizes.hidden, sizes.vocab, sizes.position, device)
    raise NotImplementedError(f"there are no kernels for {key!r:.200}")

"""What processors may ask for beside the history and the scores: found in one place for all that call them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from unspool.logits import LogitsProcessorList

_NAMES = ("uniforms", "pads", "logits", "host_ids", "ended")
_PROCESSORS_STREAM = 1  # of the rows' random numbers; the draw has the other


class ShownRows(Protocol):
    """Rows as processors see them."""

    @property
    def padded(self) -> Sequence[int]:
        """The places of rows that have ended and stay."""
        ...

    def uniforms(self, stream: int = 0) -> torch.Tensor:
        """A number in [0, 1) for each row's next token: (rows,)."""
        ...

    def padding(self, width: int | None = None) -> torch.Tensor | None:
        """Columns of padding before each row: (rows,); None if there are none."""
        ...

    def read_history(self, width: int | None = None) -> torch.Tensor:
        """The rows' tokens (rows, width) on the host."""
        ...


def list_asked(processors: LogitsProcessorList) -> frozenset[str]:
    """The names of what the processors ask for."""
    return frozenset(name for name in _NAMES if processors.takes(name))


def find_arguments(asked: frozenset[str], rows: ShownRows, width: int | None = None) -> dict[str, Any]:
    """What is asked for of rows, whose history is shown `width` columns wide; a readout's `logits` are the caller's."""
    found: dict[str, Any] = {}
    if "uniforms" in asked:
        found["uniforms"] = rows.uniforms(_PROCESSORS_STREAM)
    if "pads" in asked and (pads := rows.padding(width)) is not None:
        found["pads"] = pads
    if "host_ids" in asked:
        found["host_ids"] = rows.read_history(width)
    if "ended" in asked and rows.padded:
        found["ended"] = frozenset(rows.padded)
    return found


def pick_arguments(found: Mapping[str, Any], index: torch.Tensor, places: Sequence[int]) -> dict[str, Any]:
    """What belongs to the rows at `places`, which `index` has on the device; `host_ids` are on the host."""
    picked = {
        name: values[list(places) if name == "host_ids" else index] for name, values in found.items() if name != "ended"
    }
    if "ended" in found:
        picked["ended"] = frozenset(at for at, place in enumerate(places) if place in found["ended"])
    return picked

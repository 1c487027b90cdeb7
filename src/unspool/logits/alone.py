"""A caller's processor among rows of different prompts: it is shown every prompt's rows by themselves, unpadded."""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from unspool.kernels.sending import send
from unspool.logits.base import LogitsProcessor, LogitsProcessorList
from unspool.registry import is_from

_OF_WHOLE_BATCHES: Final = ("ClassifierFreeGuidanceLogitsProcessor", "UnbatchedClassifierFreeGuidanceLogitsProcessor")


@dataclass(frozen=True, slots=True)
class Apart:
    """How the rows of a call stand apart: which belong together, and the columns of padding before each."""

    offsets: tuple[int, ...]  # one per row of the call
    size: int = 1  # rows that belong together: the beams of a prompt

    @property
    def is_one(self) -> bool:
        """Whether nothing stands beside the rows of the one prompt, or before them."""
        return len(self.offsets) == self.size and not any(self.offsets)

    def list_sets(self) -> range:
        """The numbers of the sets of rows that belong together."""
        return range(len(self.offsets) // self.size)


def share_out(part: Any, num_sets: int) -> list[Any]:
    """A caller's object for each of so many sets of rows: itself, and copies that keep what they remember apart.

    A copy has its own numbers, tensors that it makes and dictionaries; lists, in which callers collect what they see,
    are those of the original.
    """
    return [part, *(_copy(part) for _ in range(num_sets - 1))]


def _copy(part: Any) -> Any:
    try:
        made = copy.copy(part)
    except Exception:  # a caller's object may refuse in any way; then one serves all rows
        return part
    if made is not part:
        for name, value in list(getattr(made, "__dict__", {}).items()):
            if isinstance(value, dict):
                made.__dict__[name] = copy.copy(value)
    return made


class AloneProcessor(LogitsProcessor):
    """Runs a caller's processor on the rows of each prompt as if there were no others."""

    def __init__(self, processor: Any, apart: Apart) -> None:
        self.given = processor
        self.__name__ = getattr(processor, "__name__", type(processor).__name__)
        self.remembers_steps = getattr(processor, "remembers_steps", False)  # type: ignore[misc]
        self._apart = apart
        self._numbers = list(range(len(apart.offsets)))  # of the rows in the call
        self._made = share_out(processor, len(apart.list_sets()))
        if hasattr(processor, "select_rows"):
            own = torch.arange(len(apart.offsets)).split(apart.size)
            self._made = [one.select_rows(rows) for one, rows in zip(self._made, own, strict=True)]

    def __call__(
        self,
        input_ids: torch.Tensor,
        scores: torch.Tensor,
        uniforms: torch.Tensor | None = None,
        logits: torch.Tensor | None = None,
        current_tokens: torch.Tensor | None = None,
        beam_group_idx: int | None = None,
        host_ids: torch.Tensor | None = None,
        ended: Collection[int] | None = None,
    ) -> torch.Tensor:
        """The scores of every prompt's rows after its own processor; rows that have `ended` keep theirs."""
        result = scores.clone()
        size = self._apart.size
        sets: dict[int, list[int]] = {}
        for place, number in enumerate(self._numbers):
            if not ended or place not in ended:
                sets.setdefault(number // size, []).append(place)
        for number, places in sets.items():
            index = send(places, scores.device)
            extra: dict[str, Any] = {"uniforms": uniforms, "logits": logits}
            extra = {name: value[index] for name, value in extra.items() if value is not None}
            if current_tokens is not None:
                extra["current_tokens"] = current_tokens[number * size : (number + 1) * size]
            if beam_group_idx is not None:
                extra["beam_group_idx"] = beam_group_idx
            if host_ids is not None:
                extra["host_ids"] = host_ids[places][:, self._apart.offsets[number * size] :]
            shown = input_ids[index][:, self._apart.offsets[number * size] :]
            processor = self._made[number]
            if len(places) < size and hasattr(processor, "select_rows"):  # a group of a prompt's beams
                own = [self._numbers[place] % size for place in places]
                processor = processor.select_rows(torch.tensor(own))
            result[index] = LogitsProcessorList([processor])(shown, scores[index], **extra).to(result.dtype)
        return result

    def select_rows(self, index: torch.Tensor) -> LogitsProcessor:
        """The processor for the rows at `index`, which keep their numbers and what was remembered of them."""
        chosen = copy.copy(self)
        chosen._numbers = [self._numbers[row] for row in index.tolist()]
        return chosen


def show_alone(processors: Sequence[Any], callers: Collection[Any], apart: Apart) -> list[Any]:
    """The processors, with those of the `callers` shown the rows of each prompt alone."""
    known = {id(one) for one in callers}
    return [AloneProcessor(one, apart) if id(one) in known and _needs(one, apart) else one for one in processors]


def unwrap(processor: Any) -> Any:
    """The caller's processor, if that is what runs."""
    return processor.given if isinstance(processor, AloneProcessor) else processor


def _needs(processor: Any, apart: Apart) -> bool:
    """Whether a processor would be shown more, or more columns, than the rows of one prompt."""
    if apart.is_one or type(processor).__name__ in _OF_WHOLE_BATCHES:
        return False
    if not is_from(type(processor), "unspool"):
        return True
    return any(apart.offsets) and getattr(processor, "counts_columns", True)

"""What the sampling chain knows of watermarks: a processor that comes after it, and one for rows with several marks."""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Hashable, Sequence
from typing import Any, Self

import torch

from unspool.kernels.cpu.mark_calls import MarkCall
from unspool.kernels.sending import send
from unspool.logits.base import LogitsProcessor
from unspool.logits.building import Build
from unspool.logits.rows import RowValues


class WatermarkProcessor(LogitsProcessor):
    """A processor that marks text: a function of the key and the visible history."""

    joined_as = "watermark"
    follows_moves = True

    @staticmethod
    def make(build: Build) -> WatermarkProcessor:
        """The processor that `watermarking_config` asks for: one for all rows, or one for each."""
        config, width = build.get("watermarking_config"), build.context.prompt_width
        made: dict[int, WatermarkProcessor] = {}
        for one in config if isinstance(config, list) else [config]:
            if one is not None and id(one) not in made:
                made[id(one)] = one.construct_processor(build.context.vocab_size, None).after_prompt(width)
        if isinstance(config, list):
            return RowWatermarks.of([made.get(id(one)) for one in config])
        return made[id(config)]

    @abstractmethod
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, pads: torch.Tensor | None = None) -> torch.Tensor:
        """Scores (rows, vocab) with the mark; `pads` are the columns of padding before each row."""

    def after_prompt(self, prompt_width: int) -> WatermarkProcessor:
        """The processor for text that begins after so many columns."""
        return self

    def prepare_steps(self, ids: torch.Tensor, vocab: int, pads: torch.Tensor | None) -> MarkCall | None:
        """The same mark on a CPU, for steps that follow each other: their text (rows, columns) grows where it lies.
        None if there is no such way."""
        return None

    # --- rows come together ----------------------------------------------------------------------------
    @property
    @abstractmethod
    def mark(self) -> Hashable:
        """The key and the settings: processors of the same mark differ in what they know of their rows alone."""

    def move(self, shift: int) -> Self:
        """The processor for rows whose columns have moved to the right."""
        return self

    def join_alike(self, other: Self, counts: tuple[int, int]) -> Self:
        """The processor for so many rows of this one and, after them, of another of the same mark."""
        return self

    def list_groups(self, count: int) -> list[MarkedRows]:
        """The marks of so many rows, each with the places of its own."""
        return [(self, list(range(count)))]

    def join(self, other: Any, counts: tuple[int, int], shifts: tuple[int, int]) -> WatermarkProcessor:
        """The processor for the rows of both: each mark is made once for all rows that have it."""
        joined: dict[Hashable, MarkedRows] = {}
        first = 0
        for one, count, shift in zip((self, other), counts, shifts, strict=True):
            for processor, places in one.list_groups(count):
                moved, new = processor.move(shift), [first + place for place in places]
                held = joined.get(moved.mark)
                if held is None:
                    joined[moved.mark] = (moved, new)
                else:
                    both = held[0].join_alike(moved, (len(held[1]), len(new)))
                    joined[moved.mark] = (both, held[1] + new)
            first += count
        groups = list(joined.values())
        return groups[0][0] if len(groups) == 1 and len(groups[0][1]) == first else RowWatermarks(groups, first)


MarkedRows = tuple[WatermarkProcessor, list[int]]
"""A mark, and the places of the rows that have it, in the order in which it knows them."""


class PromptedWatermark(WatermarkProcessor):
    """A mark that tells a text from the prompt before it, whose columns may be each row's own."""

    _prompt_widths: RowValues

    def _begin_after(self, prompt_width: int) -> None:
        self._prompt_widths = RowValues.of_columns("prompt_width", prompt_width, at_least=0)

    @property
    def prompt_width(self) -> int:
        """The columns of all rows' prompts; of the longest one, where they differ."""
        return int(self._prompt_widths.values.max())

    @property
    def has_prompts(self) -> bool:
        """Whether rows' prompts have columns of their own."""
        return self._prompt_widths.is_per_row

    def list_prompt_widths(self, scores: torch.Tensor) -> torch.Tensor:
        """Each row's own columns (rows,) int64, where the scores are."""
        return self._prompt_widths.column(scores, torch.int64)[:, 0]

    def after_prompt(self, prompt_width: int) -> Self:
        """The processor for text that begins after so many columns."""
        chosen = copy.copy(self)
        chosen._begin_after(prompt_width)
        return chosen

    def move(self, shift: int) -> Self:
        """The processor for rows whose columns have moved to the right."""
        if not shift:
            return self
        moved = copy.copy(self)
        moved._prompt_widths = self._prompt_widths.map(lambda widths: widths + shift)
        return moved

    def join_alike(self, other: Self, counts: tuple[int, int]) -> Self:
        """The processor for both, each row with its own prompt."""
        joined = copy.copy(self)
        joined._prompt_widths = self._prompt_widths.join(other._prompt_widths, counts)
        return joined


class RowWatermarks(WatermarkProcessor):
    """Rows with several marks, or without one."""

    def __init__(self, groups: Sequence[MarkedRows], num_rows: int) -> None:
        self._groups = list(groups)
        self._num_rows = num_rows
        self._index: list[torch.Tensor] = []  # each group's rows, on the last device

    @classmethod
    def of(cls, marks: Sequence[WatermarkProcessor | None]) -> RowWatermarks:
        """The processor for rows with these marks."""
        places: dict[WatermarkProcessor, list[int]] = {}
        for place, one in enumerate(marks):
            if one is not None:
                places.setdefault(one, []).append(place)
        return cls(list(places.items()), len(marks))

    @property
    def mark(self) -> Hashable:
        """All of them."""
        return tuple((processor.mark, tuple(places)) for processor, places in self._groups)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, pads: torch.Tensor | None = None) -> torch.Tensor:
        """The scores, each row with its own mark."""
        result = scores.clone()
        # Sent once: a copy to a GPU in every step would make the host wait.
        if self._groups and (not self._index or self._index[0].device != scores.device):
            self._index = [send(places, scores.device) for _, places in self._groups]
        for (processor, _), index in zip(self._groups, self._index, strict=True):
            result[index] = processor(input_ids[index], scores[index], None if pads is None else pads[index])
        return result

    def list_groups(self, count: int) -> list[MarkedRows]:
        """The marks with the places of their rows."""
        assert count == self._num_rows
        return self._groups

    def select_rows(self, index: torch.Tensor) -> RowWatermarks:
        """The marks of the rows at `index`."""
        wanted, groups = index.tolist(), []
        for processor, places in self._groups:
            at = {place: number for number, place in enumerate(places)}
            found = [(new, at[place]) for new, place in enumerate(wanted) if place in at]
            if found:
                chosen = processor.select_rows(torch.tensor([old for _, old in found]))
                assert isinstance(chosen, WatermarkProcessor)
                groups.append((chosen, [new for new, _ in found]))
        return RowWatermarks(groups, len(wanted))

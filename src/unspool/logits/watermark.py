"""What the sampling chain knows of watermarks: a processor that comes after it, and one for each row's own mark."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from unspool.kernels.cpu.mark_calls import MarkCall
from unspool.kernels.sending import send
from unspool.logits.base import LogitsProcessor
from unspool.logits.building import Build


class WatermarkProcessor(LogitsProcessor):
    """A processor that marks text: a function of the key and the visible history."""

    @staticmethod
    def make(build: Build) -> WatermarkProcessor:
        """The processor that `watermarking_config` asks for: one for all rows, or one for each."""
        config, width = build.get("watermarking_config"), build.context.prompt_width
        made: dict[int, WatermarkProcessor] = {}
        for one in config if isinstance(config, list) else [config]:
            if one is not None and id(one) not in made:
                made[id(one)] = one.construct_processor(build.context.vocab_size, None).after_prompt(width)
        if isinstance(config, list):
            return RowWatermarks([made.get(id(one)) for one in config])
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


class RowWatermarks(WatermarkProcessor):
    """A watermark of its own, or none, for each row."""

    def __init__(self, marks: Sequence[WatermarkProcessor | None]) -> None:
        self.marks = list(marks)
        self._index: list[tuple[WatermarkProcessor, torch.Tensor]] = []  # each mark's rows, on the last device

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, pads: torch.Tensor | None = None) -> torch.Tensor:
        """The scores, each row with its own mark."""
        result = scores.clone()
        for mark, index in self._list_rows(scores.device):
            result[index] = mark(input_ids[index], scores[index], None if pads is None else pads[index])
        return result

    def _list_rows(self, device: torch.device) -> list[tuple[WatermarkProcessor, torch.Tensor]]:
        """The marks with their rows; sent once, for a copy to a GPU in every step would make the host wait."""
        if not self._index or self._index[0][1].device != device:
            places: dict[int, list[int]] = {}
            for place, mark in enumerate(self.marks):
                if mark is not None:
                    places.setdefault(id(mark), []).append(place)
            found = [(self.marks[rows[0]], send(rows, device)) for rows in places.values()]
            self._index = [(mark, index) for mark, index in found if mark is not None]
        return self._index

    def select_rows(self, index: torch.Tensor) -> RowWatermarks:
        """The marks of the rows at `index`."""
        return RowWatermarks([self.marks[place] for place in index.tolist()])

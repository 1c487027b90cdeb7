"""A sketch of a decoder's head on a GPU: by it captured steps find the likeliest tokens without all logits."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import torch

from unspool.models.paths.sketching import SketchedHead, can_sketch, find_margin, find_powers, find_rounding
from unspool.models.weights import AnyLinear, Linear

if TYPE_CHECKING:
    from unspool.kernels.gpu.sampling.sketch import Sketch, SketchedChoice

MOST_SKETCHED: Final = 64  # rows
LEAST_NUMBERS: Final = 1 << 24  # of a head that gains
COLUMNS: Final = 64  # a head's columns are a multiple of this
_OF_FREE_MEMORY: Final = 1 / 16  # that a sketch may take
_AT_ONCE: Final = 1 << 26  # numbers that are rounded at a time
_FIRST_LOOK, _LAST_LOOK = 64, 4096  # rows after which the tokens that were left are counted: it waits for the device
_LEAST_SCALE: Final = 1e-30
_SECONDS_UNSEEN: Final = 1.0


class CapturedSketch(SketchedHead):
    """A head's sketch, and how many tokens captured steps had to multiply by the head itself."""

    def __init__(self, head: Linear, sketch: Sketch) -> None:
        super().__init__(head)
        self._sketch = sketch
        self._count = torch.zeros(1, dtype=torch.int64, device=head.weight.device)
        self._num_rows, self._num_found, self._look = 0, 0, _FIRST_LOOK
        self._sample, self._compared_at = self._take_sample().clone(), time.monotonic()

    def is_same(self, *, begins: bool) -> bool:
        """Whether the head has not moved or changed. What is written through `.data` has no version, so one number of
        every row is compared too where a text begins, or else each second: this waits for the device."""
        if not self.is_current():
            return False
        now = time.monotonic()
        if not begins and now - self._compared_at < _SECONDS_UNSEEN:
            return True
        self._compared_at = now
        return torch.equal(self._sample, self._take_sample())

    def _take_sample(self) -> torch.Tensor:
        weight = self._head.weight.detach()
        return weight.view(-1)[:: weight.shape[1] + 1]

    def make_choice(self, rows: int) -> SketchedChoice:
        """The kernels of a captured step of so many rows."""
        from unspool.kernels.gpu.sampling.sketch import SketchedChoice

        return SketchedChoice(self._sketch, rows, self._count)

    def note_rows(self, num_rows: int) -> bool:
        """Note that so many more rows are to be chosen; whether few enough tokens were left until now."""
        is_worth = True
        if self._num_rows >= self._look:
            found = int(self._count)
            is_worth = self.note_close(found - self._num_found, self._num_rows)
            self._num_rows, self._num_found, self._look = 0, found, min(2 * self._look, _LAST_LOOK)
        self._num_rows += num_rows
        return is_worth


def can_sketch_captured(head: AnyLinear) -> bool:
    """Whether a sketch of a head would be read faster than the head."""
    if not can_sketch(head, (torch.bfloat16, torch.float16, torch.float32)):
        return False
    assert isinstance(head, Linear)
    return head.weight.numel() >= LEAST_NUMBERS and head.weight.shape[1] % COLUMNS == 0


def make_sketch(head: AnyLinear) -> CapturedSketch | None:
    """The sketch of a head; None if it has numbers without a limit, or there is too little memory."""
    from unspool.kernels.gpu.sampling.sketch import Sketch

    assert isinstance(head, Linear)
    weight, bias = head.weight.detach(), None if head.bias is None else head.bias.detach()
    (rows, columns), device = weight.shape, weight.device
    if device.type == "cuda" and weight.numel() > _OF_FREE_MEMORY * torch.cuda.mem_get_info(device)[0]:
        return None
    with torch.inference_mode():
        numbers = torch.empty(rows, columns, dtype=torch.int8, device=device)
        scales = torch.empty(rows, dtype=torch.float32, device=device)
        reaches = torch.empty(2, rows, dtype=torch.float32, device=device)
        powers = find_powers(weight)
        margin = 0.0
        if device.type != "meta":  # there only kernels are compiled
            width = max(1, _AT_ONCE // columns)
            for first in range(0, rows, width):
                part = slice(first, first + width)
                _sketch_rows(weight[part].float() / powers, numbers[part], scales[part], reaches[:, part])
            margin = find_margin(bias)
            if not (margin < torch.inf and bool(reaches.isfinite().all())):
                return None
    return CapturedSketch(head, Sketch(numbers, scales, reaches, powers, margin, weight, bias))


def _sketch_rows(rows: torch.Tensor, numbers: torch.Tensor, scales: torch.Tensor, reaches: torch.Tensor) -> None:
    """Write the sketch of some rows, float32, whose columns are divided already."""
    scales.copy_(rows.abs().amax(1).clamp(min=_LEAST_SCALE) / 127)
    rounded = (rows / scales[:, None]).round().clamp(-127, 127)
    numbers.copy_(rounded)
    sketched = rounded.mul_(scales[:, None])
    own, sketch = torch.linalg.vector_norm(rows, dim=1), torch.linalg.vector_norm(sketched, dim=1)
    missing = torch.linalg.vector_norm(rows - sketched, dim=1)
    reaches[0].copy_(1.0001 * (missing + find_rounding(rows.shape[1]) * own))
    reaches[1].copy_(1.0001 * sketch)

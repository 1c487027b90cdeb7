"""Temperature."""

from __future__ import annotations

import copy

import torch

from unspool.errors import SettingError
from unspool.logits.base import LogitsProcessor
from unspool.logits.rows import Numbers, RowValues, as_finite_float


class TemperatureLogitsWarper(LogitsProcessor):
    """Divides the scores by a temperature: above 1 flattens the distribution, below 1 sharpens it."""

    def __init__(self, temperature: Numbers) -> None:
        self.temperature = temperature
        self._values = RowValues.read("temperature", temperature, _check)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """The scores divided by each row's temperature."""
        # A tensor, also for one number: CUDA multiplies by a plain number's reciprocal instead, and the same
        # request must give the same scores alone and among rows with other temperatures.
        exact = torch.float64 if scores.dtype == torch.float64 else torch.float32
        return (scores / self._values.column(scores, exact)).to(scores.dtype)

    def select_rows(self, index: torch.Tensor) -> LogitsProcessor:
        """The processor for the rows at `index`."""
        if not self._values.is_per_row:
            return self
        chosen = copy.copy(self)
        chosen._values = self._values.select(index)
        chosen.temperature = chosen._values.values
        return chosen


def _check(value: float) -> float:
    hint = " For greedy decoding set `do_sample=False`." if value == 0 else ""
    if isinstance(value, (int, float)) and value <= 0:
        raise SettingError(
            f"`temperature` (={value}) has to be a strictly positive float, otherwise the next token's "
            f"scores are invalid.{hint}"
        )
    return as_finite_float("temperature", value)

"""Temperature, fixed or following the entropy."""

from __future__ import annotations

from typing import Any

import torch

from unspool.errors import SettingError
from unspool.kernels.presence import takes_kernels
from unspool.logits.base import LogitsProcessor
from unspool.logits.rows import Numbers, RowValues, as_finite_float, as_positive_float, in_range
from unspool.wording import word


class TemperatureLogitsWarper(LogitsProcessor):
    """Divides the scores by a temperature: above 1 flattens the distribution, below 1 sharpens it."""

    counts_columns = False

    def __init__(self, temperature: Numbers) -> None:
        self._values = RowValues.read("temperature", temperature, _check)

    @property
    def temperature(self) -> Any:
        """The temperature, or a tensor with one per row."""
        return self._values.given

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores divided by each row's temperature."""
        # A tensor, also for one number: CUDA multiplies by a plain number's reciprocal instead, and the same
        # request must give the same scores alone and among rows with other temperatures.
        return (scores / self.column(scores)).to(scores.dtype)

    def column(self, scores: torch.Tensor) -> torch.Tensor:
        """What the scores are divided by: (rows, 1), or (1, 1) for all rows."""
        return self._values.column(scores, exact_dtype(scores))


class DynamicTemperatureLogitsWarper(LogitsProcessor):
    """A temperature that grows with the entropy, from `temperature - spread` to `temperature + spread` (kalomaze).

    Origin: llama.cpp's and koboldcpp's "dynatemp". The entropy is taken relative to the largest possible one
    over the tokens that are still possible, to the power of `exponent`.
    """

    counts_columns = False

    def __init__(self, temperature: Numbers, spread: Numbers, exponent: Numbers = 1.0) -> None:
        self._middle = RowValues.read("temperature", temperature, _check)
        self._spread = RowValues.read("dynatemp_range", spread, in_range("dynatemp_range", 0))
        self._exponent = RowValues.read("dynatemp_exponent", exponent, as_positive_float("dynatemp_exponent"))
        middle, spread_values = self._middle.values, self._spread.values
        sizes = {len(middle), len(spread_values)} - {1}
        if len(sizes) < 2 and bool((spread_values >= middle).any()):
            raise SettingError(
                word(
                    "{dynatemp_range} ({spread}) has to be smaller than {temperature} ({middle}): the lowest "
                    "temperature, their difference, must stay above 0.",
                    spread=spread,
                    middle=temperature,
                )
            )

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores divided by a temperature that each row's own entropy decides."""
        exact = exact_dtype(scores)
        if takes_kernels(scores):
            from unspool.kernels.gpu.sampling.cuts import temper  # Triton is imported where a GPU is used

            return temper(scores, *(one.column(scores) for one in (self._middle, self._spread, self._exponent)))
        logprobs = torch.log_softmax(scores, dim=-1, dtype=exact)  # (rows, vocab)
        entropy = -(logprobs.exp() * logprobs).nan_to_num(nan=0.0).sum(dim=-1, keepdim=True)  # (rows, 1)
        num_possible = (scores > float("-inf")).sum(dim=-1, keepdim=True)
        largest = num_possible.to(exact).log()
        share = torch.where(num_possible > 1, entropy / largest.clamp(min=1e-9), 0.0).clamp(0.0, 1.0)
        low = self._middle.column(scores, exact) - self._spread.column(scores, exact)
        temperature = low + 2 * self._spread.column(scores, exact) * share ** self._exponent.column(scores, exact)
        return (scores / temperature).to(scores.dtype)


def exact_dtype(scores: torch.Tensor) -> torch.dtype:
    """What to compute in: the scores' own precision where it is enough, float32 for half precision."""
    return torch.float64 if scores.dtype == torch.float64 else torch.float32


def _check(value: Any) -> float:
    hint = " For greedy decoding set {do_sample:=False}." if value == 0 else ""
    if isinstance(value, (int, float)) and value <= 0:
        raise SettingError(
            word(
                "{temperature} (={value}) has to be a strictly positive float, otherwise the next token's "
                f"scores are invalid.{hint}",
                value=value,
            )
        )
    return as_finite_float("temperature", value)

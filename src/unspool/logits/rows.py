"""A processor's number: one for all rows, or one a row."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from typing import Any

import torch

from unspool.errors import InputError, SettingError

MOST_ROWS = 65_536
Numbers = float | Sequence[float] | torch.Tensor


class RowValues:
    """Numbers ready to meet scores: a column of one value, or of one value a row."""

    def __init__(self, name: str, values: torch.Tensor, is_per_row: bool) -> None:
        self.name = name
        self.is_per_row = is_per_row
        self.values = values  # (rows,) or (1,), float64 or int64
        self._column: torch.Tensor | None = None  # the last column made, on its device

    @classmethod
    def read(cls, name: str, value: Numbers, check: Callable[[float], float]) -> RowValues:
        """Check what a user gave, a number or one a row, with `check` for each number."""
        is_per_row = holds_rows(value)
        given: Any = value.tolist() if isinstance(value, torch.Tensor) else value
        numbers: list[Any] = list(given) if is_per_row else [given]
        if not 0 < len(numbers) <= MOST_ROWS:
            raise SettingError(f"`{name}` has {len(numbers)} values; give one, or one for each of the rows.")
        checked = [check(number) for number in numbers]
        dtype = torch.int64 if isinstance(checked[0], int) else torch.float64
        return cls(name, torch.tensor(checked, dtype=dtype), is_per_row)

    def column(self, scores: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The values as (rows, 1) or (1, 1), where the scores are."""
        rows = scores.shape[0]
        if self.is_per_row and self.values.shape[0] != rows:
            raise InputError(
                f"`{self.name}` holds a value for each of {self.values.shape[0]} rows, but there are {rows}. "
                "Use select_rows() when rows leave or repeat."
            )
        column = self._column
        if column is None or column.device != scores.device or column.dtype != dtype:
            # Kept: a copy to the device at every step would make the host wait.
            column = self._column = self.values.to(dtype=dtype).to(device=scores.device).unsqueeze(-1)
        return column

    def select(self, index: torch.Tensor) -> RowValues:
        """The values of the rows at `index`; one value for all stays as it is."""
        if not self.is_per_row:
            return self
        chosen = RowValues(self.name, self.values[index.to(self.values.device)], is_per_row=True)
        column = self._column
        if column is not None:
            chosen._column = column[index.to(column.device)]
        return chosen


def holds_rows(value: Numbers) -> bool:
    """Whether a user gave one value a row rather than one for all."""
    return value.dim() > 0 if isinstance(value, torch.Tensor) else isinstance(value, (list, tuple))


def as_finite_float(name: str, value: Any) -> float:
    """One number as a float; a bool, text, NaN or infinity is refused."""
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise SettingError(f"`{name}` has to be a finite number, or one for each row, but is {value!r}.")
    return float(value)


def as_positive_integer(name: str, value: Any, at_least: int = 1) -> int:
    """One whole number from `at_least` on."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not at_least <= int(value) < 2**31:
        wanted = "a strictly positive integer" if at_least == 1 else f"an integer of at least {at_least}"
        raise SettingError(f"`{name}` has to be {wanted}, but is {value!r}.")
    return int(value)

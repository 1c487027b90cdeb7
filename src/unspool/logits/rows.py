"""What a processor holds for its rows: a number, one number per row, a table with a line per row, token ids."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any

import torch
import torch.nn.functional as F

from unspool.errors import InputError, SettingError
from unspool.numeric import is_number
from unspool.wording import about

MOST_ROWS = 65_536
MOST_IDS = 1_048_576
Numbers = float | Sequence[float] | torch.Tensor
"""One number for all rows, or one per row."""


class RowValues:
    """Numbers ready to meet scores: a column of one value, or of one value per row."""

    def __init__(self, name: str, values: torch.Tensor, is_per_row: bool) -> None:
        self.name = name
        self.is_per_row = is_per_row
        self.values = values  # (rows,) or (1,), float64 or int64
        self._column: torch.Tensor | None = None  # the last column made, on its device

    @classmethod
    def read(cls, name: str, value: Numbers, check: Callable[[float], float]) -> RowValues:
        """Check what a user gave, a number or one per row, with `check` for each number."""
        is_per_row = holds_rows(value)
        given: Any = value.tolist() if isinstance(value, torch.Tensor) else value
        numbers: list[Any] = list(given) if is_per_row else [given]
        if not 0 < len(numbers) <= MOST_ROWS:
            raise SettingError(about(name, f"has {len(numbers)} values; give one, or one for each of the rows."))
        checked = [check(number) for number in numbers]
        dtype = torch.int64 if isinstance(checked[0], int) else torch.float64
        return cls(name, torch.tensor(checked, dtype=dtype), is_per_row)

    @classmethod
    def of_columns(cls, name: str, number: Any, *, at_least: int = 1) -> RowValues:
        """A number of columns, the same for all rows until rows of another number come in."""
        return cls(name, torch.tensor([as_positive_integer(name, number, at_least=at_least)]), is_per_row=False)

    @property
    def given(self) -> Any:
        """The one number, or a tensor with one per row."""
        return self.values if self.is_per_row else self.values[0].item()

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> RowValues:
        """The numbers, changed."""
        return RowValues(self.name, change(self.values), self.is_per_row)

    def column(self, scores: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The values as (rows, 1) or (1, 1), where the scores are; in the scores' own dtype if none is named."""
        rows = scores.shape[0]
        if self.is_per_row and self.values.shape[0] != rows:
            raise InputError(
                f"`{self.name}` holds a value for each of {self.values.shape[0]} rows, but there are {rows}. "
                "Use select_rows() when rows leave or repeat."
            )
        dtype = dtype or scores.dtype
        column = self._column
        if column is None or column.device != scores.device or column.dtype != dtype:
            # Kept: a copy to the device at every step would make the host wait.
            values = self.values.to(dtype=dtype)
            if scores.device.type == "cuda":
                values = values.pin_memory()
            column = self._column = values.to(device=scores.device, non_blocking=True).unsqueeze(-1)
        return column

    def join(self, other: RowValues, counts: tuple[int, int]) -> RowValues:
        """The values of so many rows, and after them those of the other's."""
        if not (self.is_per_row or other.is_per_row) and torch.equal(self.values, other.values):
            return self
        parts = [one.values.expand(count) for one, count in zip((self, other), counts, strict=True)]
        return RowValues(self.name, torch.cat(parts), is_per_row=True)

    def select(self, index: torch.Tensor) -> RowValues:
        """The values of the rows at `index`; one value for all stays as it is."""
        if not self.is_per_row:
            return self
        chosen = RowValues(self.name, self.values[index.to(self.values.device)], is_per_row=True)
        column = self._column
        if column is not None and column.device == index.device:  # sent anew elsewhere, which makes nobody wait
            chosen._column = column[index]
        return chosen


class RowTable:
    """A tensor with a line for each row, or for each group of rows that stand side by side (beams)."""

    is_per_row = True

    def __init__(self, name: str, lines: torch.Tensor) -> None:
        self.name = name
        self.lines = lines  # (rows, …)

    def match(self, scores: torch.Tensor) -> torch.Tensor:
        """The lines where the scores are, each repeated if there are several rows for it."""
        rows, num_lines = scores.shape[0], self.lines.shape[0]
        if self.lines.device != scores.device:
            self.lines = self.lines.to(scores.device)
        if rows == num_lines:
            return self.lines
        if rows % num_lines:
            raise InputError(
                f"`{self.name}` has {num_lines} rows, and the scores {rows}, which is no multiple of it. "
                "Use select_rows() when rows leave or repeat."
            )
        return self.lines.repeat_interleave(rows // num_lines, dim=0)

    def join(self, other: RowTable, counts: tuple[int, int]) -> RowTable | None:
        """The lines of so many rows and, after them, of the other's, filled to one width; None if beams share lines."""
        if (len(self.lines), len(other.lines)) != counts or self.lines.dim() != 2:
            return None
        width = max(self.lines.shape[1], other.lines.shape[1])
        parts = [F.pad(one.lines.cpu(), (0, width - one.lines.shape[1]), value=-1) for one in (self, other)]
        return RowTable(self.name, torch.cat(parts))

    def select(self, index: torch.Tensor) -> RowTable:
        """The lines of the rows at `index`."""
        return RowTable(self.name, self.lines[index.to(self.lines.device)])


class TokenIds:
    """Token ids to index scores with: kept on the device, those outside the vocabulary left out."""

    def __init__(self, name: str, ids: Any, *, may_be_negative: bool = False) -> None:
        self.name = name
        self.ids = read_token_ids(name, ids, may_be_negative=may_be_negative)
        self._index: torch.Tensor | None = None
        self._vocab = -1

    def index(self, scores: torch.Tensor) -> torch.Tensor:
        """The ids as an index (n,) into the scores' last dimension."""
        vocab = scores.shape[-1]
        if self._index is None or self._vocab != vocab or self._index.device != scores.device:
            inside = [token for token in self.ids if 0 <= token < vocab]
            self._index = torch.tensor(inside, dtype=torch.int64, device=scores.device)
            self._vocab = vocab
        return self._index


def read_token_ids(name: str, ids: Any, *, may_be_negative: bool = False) -> list[int]:
    """One id, a list or a tensor of them, as a checked list."""
    if isinstance(ids, torch.Tensor):
        if ids.is_floating_point() or ids.dtype == torch.bool:
            raise SettingError(about(name, f"has to be made of token ids, but is a tensor of {ids.dtype}."))
        ids = ids.tolist()
    given = [ids] if isinstance(ids, Integral) else ids
    if not isinstance(given, Iterable) or isinstance(given, (str, bytes)):
        raise SettingError(about(name, f"has to be a token id or a list of positive integers, but is {ids!r}."))
    listed = list(given)
    if len(listed) > MOST_IDS:
        raise SettingError(about(name, f"has {len(listed)} token ids; at most {MOST_IDS} are taken."))
    for token in listed:
        if isinstance(token, bool) or not isinstance(token, Integral) or (int(token) < 0 and not may_be_negative):
            raise SettingError(about(name, f"has to be a list of positive integers, but holds {token!r}."))
    return [int(token) for token in listed]


def holds_rows(value: Any) -> bool:
    """Whether a user gave one value per row rather than one for all."""
    return value.dim() > 0 if isinstance(value, torch.Tensor) else isinstance(value, (list, tuple))


def as_finite_float(name: str, value: Any) -> float:
    """One number as a float; a bool, text, NaN or infinity is refused."""
    if not is_number(value):
        raise SettingError(about(name, f"has to be a finite number, or one for each row, but is {value!r}."))
    return float(value)


def as_positive_integer(name: str, value: Any, at_least: int = 1) -> int:
    """One whole number from `at_least` on."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not at_least <= int(value) < 2**31:
        wanted = "a strictly positive integer" if at_least == 1 else f"an integer of at least {at_least}"
        raise SettingError(about(name, f"has to be {wanted}, but is {value!r}."))
    return int(value)


def in_range(
    name: str,
    low: float,
    high: float = math.inf,
    *,
    with_low: bool = True,
    with_high: bool = True,
    neutral: float | None = None,
) -> Callable[[Any], float]:
    """A check for RowValues.read: a finite number between two bounds, or the one that switches a row off."""

    def check(value: Any) -> float:
        number = as_finite_float(name, value)
        is_inside = (low <= number if with_low else low < number) and (number <= high if with_high else number < high)
        if not is_inside and number != neutral:
            left, right = "[" if with_low else "(", "]" if with_high and high < math.inf else ")"
            raise SettingError(
                about(
                    name,
                    f"has to be a number in {left}{low:g}, {high:g}{right}, or one for each row, but is {value!r}.",
                )
            )
        return number

    return check


def as_positive_float(name: str) -> Callable[[Any], float]:
    """A check for RowValues.read: a finite number above zero."""

    def check(value: Any) -> float:
        if as_finite_float(name, value) <= 0:
            raise SettingError(about(name, f"has to be a strictly positive float, but is {value!r}."))
        return float(value)

    return check

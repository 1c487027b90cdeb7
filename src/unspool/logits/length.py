"""Processors about how long the text gets."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from unspool.errors import SettingError
from unspool.logits.base import Joining, LogitsProcessor
from unspool.logits.rows import Numbers, RowValues, TokenIds, as_finite_float, as_positive_integer
from unspool.wording import about

INF = float("inf")


class MinNewTokensLengthLogitsProcessor(LogitsProcessor):
    """Forbids the end tokens until so many new tokens stand after the prompt."""

    joined_by: ClassVar[Joining] = MappingProxyType({"_largest": max})
    _setting = "min_new_tokens"

    def __init__(
        self, prompt_length_to_skip: int, min_new_tokens: Numbers, eos_token_id: Any, device: Any = "cpu"
    ) -> None:
        self._skipped = RowValues.of_columns("prompt_length_to_skip", prompt_length_to_skip, at_least=0)
        self._values = RowValues.read(self._setting, min_new_tokens, self._check)
        self._largest = int(self._values.values.max())
        self._ends = TokenIds("eos_token_id", eos_token_id, may_be_negative=True)
        self.eos_token_id = torch.tensor(self._ends.ids, device=device)

    def _check(self, value: Any) -> int:
        return as_positive_integer(self._setting, value, at_least=0)

    @property
    def prompt_length_to_skip(self) -> Any:
        """The columns of the prompt, or a tensor with one number per row."""
        return self._skipped.given

    @property
    def min_new_tokens(self) -> Any:
        """The fewest new tokens, or a tensor with one number per row."""
        return self._values.given

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, starts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The scores with the end tokens at -inf while a row is too short."""
        if starts is not None:
            written = input_ids.shape[-1] - starts[:, None] - self._skipped.column(scores, torch.int64)
            is_short = written < self._values.column(scores, torch.int64)
            return torch.where(is_short, scores.index_fill(-1, self._ends.index(scores), -INF), scores)
        num_new = input_ids.shape[-1] - self.prompt_length_to_skip
        if num_new >= self._largest:
            return scores
        forbidden = scores.index_fill(-1, self._ends.index(scores), -INF)
        if not self._values.is_per_row:
            return forbidden
        return torch.where(self._values.column(scores, torch.int64) > num_new, forbidden, scores)

    def find_forbidden(self, width: int) -> Sequence[int] | None:
        """The end tokens while rows are too short, if all are at once."""
        if self._skipped.is_per_row or self._values.is_per_row:
            return None
        return () if width - self.prompt_length_to_skip >= self._largest else self._ends.ids


class MinLengthLogitsProcessor(MinNewTokensLengthLogitsProcessor):
    """Forbids the end tokens until the text, prompt included, has a length."""

    counts_columns = False  # padding is known
    _setting = "min_length"

    def __init__(self, min_length: Numbers, eos_token_id: Any, device: Any = "cpu") -> None:
        super().__init__(0, min_length, eos_token_id, device)

    @property
    def min_length(self) -> Any:
        """The shortest length, or a tensor with one number per row."""
        return self._values.given

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, pads: torch.Tensor | None = None) -> torch.Tensor:
        """The scores with the end tokens at -inf while a row, without its padding, is too short."""
        if pads is None:
            return super().__call__(input_ids, scores)
        lengths = (input_ids.shape[-1] - pads)[:, None]
        shortest = self._values.column(scores, torch.int64) if self._values.is_per_row else self._largest
        return torch.where(lengths < shortest, scores.index_fill(-1, self._ends.index(scores), -INF), scores)

    def find_forbidden(self, width: int) -> Sequence[int] | None:
        """The same as its parent, for there is no padding."""
        return super().find_forbidden(width)


class ExponentialDecayLengthPenalty(LogitsProcessor):
    """Makes the end tokens likelier by a factor that grows with every token past a start."""

    def __init__(
        self,
        exponential_decay_length_penalty: tuple[int, float],
        eos_token_id: Any,
        input_ids_seq_length: int,
    ) -> None:
        name = "exponential_decay_length_penalty"
        given = exponential_decay_length_penalty
        if not isinstance(given, (list, tuple)) or len(given) != 2:
            raise SettingError(about(name, f"has to be a pair (start, factor), but is {given!r}."))
        start = as_positive_integer(f"{name}[0]", given[0], at_least=0)
        width = as_positive_integer("input_ids_seq_length", input_ids_seq_length, at_least=0)
        self._start = RowValues.of_columns("regulation_start", start + width, at_least=0)
        self.regulation_factor = as_finite_float(f"{name}[1]", given[1])
        if self.regulation_factor <= 0:
            raise SettingError(about(name, f"has to have a factor above 0, but it is {given[1]!r}."))
        self._ends = TokenIds("eos_token_id", eos_token_id)
        self.eos_token_id = torch.tensor(self._ends.ids)

    @property
    def regulation_start(self) -> Any:
        """The column after which scores grow, or a tensor with one per row."""
        return self._start.given

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, starts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The scores with those of the end tokens raised once the start is passed."""
        largest = torch.finfo(scores.dtype).max
        growth: float | torch.Tensor
        if starts is not None:
            over = input_ids.shape[-1] - starts[:, None] - self._start.column(scores, torch.int64)  # (rows, 1)
            growth = (self.regulation_factor ** over.clamp(min=0).double() - 1).clamp(max=largest).to(scores.dtype)
        else:
            num_over = input_ids.shape[-1] - self.regulation_start
            if num_over <= 0:
                return scores
            try:
                growth = min(self.regulation_factor**num_over - 1, largest)
            except OverflowError:
                growth = largest
        ends = self._ends.index(scores)
        held = scores[:, ends]  # (rows, ends)
        # The lowest number is what `remove_invalid_values` makes of a token that is forbidden, and stays so.
        is_out = ~held.isfinite() | (held <= torch.finfo(scores.dtype).min)
        added = (held.abs() * growth).masked_fill(is_out, 0.0)
        return scores.index_copy(-1, ends, (held + added).clamp(max=largest))

"""Penalties on tokens that have been written, or that stand in the encoder's input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from unspool.errors import SettingError
from unspool.kernels.presence import takes_kernels
from unspool.logits.base import LogitsProcessor
from unspool.logits.rows import Numbers, RowTable, RowValues, as_positive_float, in_range
from unspool.logits.temperature import exact_dtype
from unspool.wording import about

LARGEST_PENALTY = 1e4


class SeenTokensProcessor(LogitsProcessor):
    """A processor of the tokens seen so far, without `prompt_ignore_length` columns at the start."""

    def __init__(self, prompt_ignore_length: int | None) -> None:
        self._ignored: RowValues | None = None
        if prompt_ignore_length is not None:
            self._ignored = RowValues.of_columns("prompt_ignore_length", prompt_ignore_length, at_least=0)

    @property
    def prompt_ignore_length(self) -> Any:
        """The columns that are not looked at, a tensor with one number per row, or None."""
        return None if self._ignored is None else self._ignored.given

    def _change_seen(
        self,
        input_ids: torch.Tensor,
        scores: torch.Tensor,
        pads: torch.Tensor | None,
        starts: torch.Tensor | None,
        change: Callable[[torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """The scores that `change` makes of the tokens that are looked at (rows, columns), in rows that have any.

        Columns that a row does not look at repeat its last token, which is looked at in every row that has any.
        """
        seen, is_seen = self._find_seen(input_ids, pads, starts)
        if seen.shape[-1] == 0:
            return scores
        if is_seen is None:
            return change(seen)
        made = change(torch.where(is_seen, seen, input_ids[:, -1:]))
        return made if starts is None else torch.where(is_seen[:, -1:], made, scores)

    def _penalise_by_kernel(
        self,
        input_ids: torch.Tensor,
        scores: torch.Tensor,
        pads: torch.Tensor | None,
        starts: torch.Tensor | None,
        penalty: torch.Tensor,
        kind: str,
    ) -> torch.Tensor:
        """The scores with those of tokens that are looked at made smaller: see `kernels.gpu.sampling.seen`."""
        from unspool.kernels.gpu.sampling.seen import penalise  # Triton is imported where a GPU is used

        ignored = None if self._ignored is None else self._ignored.column(scores, torch.int64)
        masks = {"pads": pads, "starts": starts, "ignored": ignored}
        return penalise(scores, input_ids, penalty, **masks, kind=kind)

    def _find_seen(
        self, input_ids: torch.Tensor, pads: torch.Tensor | None, starts: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The columns that some row looks at, and which of them each row does (rows, columns); None: all of them."""
        if starts is None:
            first = self.prompt_ignore_length or 0
            seen = input_ids[:, first:]
            return seen, None if pads is None else is_real(seen, first, pads)
        begin = starts[:, None]
        if self._ignored is not None:
            begin = begin + self._ignored.column(input_ids, torch.int64)
        if pads is not None:
            begin = torch.maximum(begin, pads[:, None])
        return input_ids, torch.arange(input_ids.shape[-1], device=input_ids.device) >= begin


class RepetitionPenaltyLogitsProcessor(SeenTokensProcessor):
    """Divides positive scores of tokens seen so far by a penalty, multiplies negative ones (CTRL, arXiv 1909.05858).

    `prompt_ignore_length` columns at the start are not looked at.
    """

    def __init__(self, penalty: Numbers, prompt_ignore_length: int | None = None) -> None:
        self._values = RowValues.read("penalty", penalty, as_positive_float("penalty"))
        super().__init__(prompt_ignore_length)

    @property
    def penalty(self) -> Any:
        """The penalty, or a tensor with one per row."""
        return self._values.given

    def __call__(
        self,
        input_ids: torch.Tensor,
        scores: torch.Tensor,
        pads: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The scores with those of every token seen so far made smaller."""
        penalty = self._values.column(scores, exact_dtype(scores))
        if takes_kernels(scores):
            return self._penalise_by_kernel(input_ids, scores, pads, starts, penalty, "repetition")
        return self._change_seen(input_ids, scores, pads, starts, lambda seen: _penalise(seen, scores, penalty))


class EncoderRepetitionPenaltyLogitsProcessor(LogitsProcessor):
    """Makes tokens of the encoder's input likelier, by the inverse of a repetition penalty; ids below 0 are none."""

    counts_columns = False

    def __init__(self, penalty: Numbers, encoder_input_ids: torch.Tensor) -> None:
        given = RowValues.read("penalty", penalty, as_positive_float("penalty"))
        self._values = given.map(lambda values: 1 / values)
        self._ids = RowTable("encoder_input_ids", read_encoder_ids(encoder_input_ids))

    @property
    def penalty(self) -> Any:
        """The inverse of the penalty given, or a tensor with one per row."""
        return self._values.given

    @property
    def encoder_input_ids(self) -> torch.Tensor:
        """The encoder's input as it was given, (rows, length)."""
        return self._ids.lines

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores with those of the encoder's tokens made larger."""
        ids = self._ids.match(scores)
        # A place without a token stands for one that the row has anyway.
        ids = torch.where(ids < 0, ids.amax(dim=-1, keepdim=True), ids)
        return _penalise(ids, scores, self._values.column(scores, exact_dtype(scores)))


class PresencePenaltyLogitsProcessor(SeenTokensProcessor):
    """Takes a number from the score of every token that has been written (OpenAI's presence_penalty)."""

    def __init__(self, penalty: Numbers, prompt_ignore_length: int | None = None) -> None:
        self._values = _read_additive("presence_penalty", penalty)
        super().__init__(prompt_ignore_length)

    def __call__(
        self,
        input_ids: torch.Tensor,
        scores: torch.Tensor,
        pads: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The scores with those of every token seen so far lowered once."""
        penalty = self._values.column(scores)
        if takes_kernels(scores):
            return self._penalise_by_kernel(input_ids, scores, pads, starts, penalty, "presence")

        def lower(seen: torch.Tensor) -> torch.Tensor:
            return scores.scatter(-1, seen, scores.gather(-1, seen) - penalty)

        return self._change_seen(input_ids, scores, pads, starts, lower)


class FrequencyPenaltyLogitsProcessor(SeenTokensProcessor):
    """Takes a number from a token's score for each time it has been written (OpenAI's frequency_penalty)."""

    def __init__(self, penalty: Numbers, prompt_ignore_length: int | None = None) -> None:
        self._values = _read_additive("frequency_penalty", penalty)
        super().__init__(prompt_ignore_length)

    def __call__(
        self,
        input_ids: torch.Tensor,
        scores: torch.Tensor,
        pads: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The scores with those of every token lowered by how often it was seen."""
        if takes_kernels(scores):
            return self._penalise_by_kernel(input_ids, scores, pads, starts, self._values.column(scores), "frequency")
        seen, is_seen = self._find_seen(input_ids, pads, starts)
        if seen.shape[-1] == 0:
            return scores
        once = torch.ones((), dtype=scores.dtype, device=scores.device).expand(seen.shape)
        if is_seen is not None:
            once = once * is_seen
        counts = torch.zeros_like(scores).scatter_add_(-1, seen, once)  # (rows, vocab)
        return scores - counts * self._values.column(scores)


def is_real(seen: torch.Tensor, first: int, pads: torch.Tensor) -> torch.Tensor:
    """Which columns, the first of them being column `first`, hold tokens and no padding: (rows, columns)."""
    return torch.arange(first, first + seen.shape[-1], device=seen.device) >= pads[:, None]


def read_encoder_ids(ids: Any) -> torch.Tensor:
    """An encoder's input as (rows, length)."""
    if not isinstance(ids, torch.Tensor) or ids.dim() not in (1, 2) or ids.is_floating_point() or ids.numel() == 0:
        raise SettingError(about("encoder_input_ids", "has to be a tensor of token ids of the shape (rows, length)."))
    return ids[None] if ids.dim() == 1 else ids


def _penalise(seen: torch.Tensor, scores: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    # By gather and scatter, so that only what was seen is computed; a token seen twice is written the same twice.
    values = scores.gather(-1, seen)  # (rows, seen)
    return scores.scatter(-1, seen, torch.where(values < 0, values * penalty, values / penalty).to(scores.dtype))


def _read_additive(name: str, penalty: Numbers) -> RowValues:
    return RowValues.read(name, penalty, in_range(name, -LARGEST_PENALTY, LARGEST_PENALTY))

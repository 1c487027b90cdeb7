"""Penalties on tokens that have been written, or that stand in the encoder's input."""

from __future__ import annotations

from typing import Any

import torch

from unspool.errors import SettingError
from unspool.logits.base import LogitsProcessor
from unspool.logits.rows import Numbers, RowTable, RowValues, as_positive_float, as_positive_integer, in_range
from unspool.logits.temperature import exact_dtype

LARGEST_PENALTY = 1e4


class RepetitionPenaltyLogitsProcessor(LogitsProcessor):
    """Divides positive scores of tokens seen so far by a penalty, multiplies negative ones (CTRL, arXiv 1909.05858).

    `prompt_ignore_length` columns at the start are not looked at.
    """

    def __init__(self, penalty: Numbers, prompt_ignore_length: int | None = None) -> None:
        self._values = RowValues.read("penalty", penalty, as_positive_float("penalty"))
        self.prompt_ignore_length = _read_ignored(prompt_ignore_length)
        self.counts_columns = bool(self.prompt_ignore_length)

    @property
    def penalty(self) -> Any:
        """The penalty, or a tensor with one a row."""
        return self._values.given

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, pads: torch.Tensor | None = None) -> torch.Tensor:
        """The scores with those of every token seen so far made smaller."""
        seen = see_tokens(input_ids, self.prompt_ignore_length, pads)
        return (
            scores if seen.shape[-1] == 0 else _penalise(seen, scores, self._values.column(scores, exact_dtype(scores)))
        )


class EncoderRepetitionPenaltyLogitsProcessor(LogitsProcessor):
    """Makes tokens of the encoder's input likelier, by the inverse of a repetition penalty; ids below 0 are none."""

    def __init__(self, penalty: Numbers, encoder_input_ids: torch.Tensor) -> None:
        given = RowValues.read("penalty", penalty, as_positive_float("penalty"))
        self._values = given.map(lambda values: 1 / values)
        ids = read_encoder_ids(encoder_input_ids)
        self._given_ids = RowTable("encoder_input_ids", ids)
        # A place without a token stands for one that the row has anyway.
        self._ids = RowTable("encoder_input_ids", torch.where(ids < 0, ids.amax(dim=-1, keepdim=True), ids))

    @property
    def penalty(self) -> Any:
        """The inverse of the penalty given, or a tensor with one a row."""
        return self._values.given

    @property
    def encoder_input_ids(self) -> torch.Tensor:
        """The encoder's input as it was given, (rows, length)."""
        return self._given_ids.lines

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores with those of the encoder's tokens made larger."""
        return _penalise(self._ids.match(scores), scores, self._values.column(scores, exact_dtype(scores)))


class PresencePenaltyLogitsProcessor(LogitsProcessor):
    """Takes a number from the score of every token that has been written (OpenAI's presence_penalty)."""

    def __init__(self, penalty: Numbers, prompt_ignore_length: int | None = None) -> None:
        self._values = _read_additive("presence_penalty", penalty)
        self.prompt_ignore_length = _read_ignored(prompt_ignore_length)
        self.counts_columns = bool(self.prompt_ignore_length)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, pads: torch.Tensor | None = None) -> torch.Tensor:
        """The scores with those of every token seen so far lowered once."""
        seen = see_tokens(input_ids, self.prompt_ignore_length, pads)
        if seen.shape[-1] == 0:
            return scores
        return scores.scatter(-1, seen, scores.gather(-1, seen) - self._values.column(scores))


class FrequencyPenaltyLogitsProcessor(LogitsProcessor):
    """Takes a number from a token's score for each time it has been written (OpenAI's frequency_penalty)."""

    def __init__(self, penalty: Numbers, prompt_ignore_length: int | None = None) -> None:
        self._values = _read_additive("frequency_penalty", penalty)
        self.prompt_ignore_length = _read_ignored(prompt_ignore_length)
        self.counts_columns = bool(self.prompt_ignore_length)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, pads: torch.Tensor | None = None) -> torch.Tensor:
        """The scores with those of every token lowered by how often it was seen."""
        seen = input_ids[:, self.prompt_ignore_length or 0 :]
        if seen.shape[-1] == 0:
            return scores
        once = torch.ones((), dtype=scores.dtype, device=scores.device).expand(seen.shape)
        if pads is not None:
            once = once * is_real(seen, self.prompt_ignore_length, pads)
        counts = torch.zeros_like(scores).scatter_add_(-1, seen, once)  # (rows, vocab)
        return scores - counts * self._values.column(scores)


def see_tokens(input_ids: torch.Tensor, first: int | None, pads: torch.Tensor | None) -> torch.Tensor:
    """The tokens after the first few columns; padding stands for the row's last token, which is seen anyway."""
    seen = input_ids[:, first or 0 :]
    if pads is None or seen.shape[-1] == 0:
        return seen
    return torch.where(is_real(seen, first, pads), seen, input_ids[:, -1:])


def is_real(seen: torch.Tensor, first: int | None, pads: torch.Tensor) -> torch.Tensor:
    """Which columns, the first of them being column `first`, hold tokens and no padding: (rows, columns)."""
    return torch.arange(first or 0, (first or 0) + seen.shape[-1], device=seen.device) >= pads[:, None]


def read_encoder_ids(ids: Any) -> torch.Tensor:
    """An encoder's input as (rows, length)."""
    if not isinstance(ids, torch.Tensor) or ids.dim() not in (1, 2) or ids.is_floating_point() or ids.numel() == 0:
        raise SettingError("`encoder_input_ids` has to be a tensor of token ids of the shape (rows, length).")
    return ids[None] if ids.dim() == 1 else ids


def _penalise(seen: torch.Tensor, scores: torch.Tensor, penalty: torch.Tensor) -> torch.Tensor:
    # By gather and scatter, so that only what was seen is computed; a token seen twice is written the same twice.
    values = scores.gather(-1, seen)  # (rows, seen)
    return scores.scatter(-1, seen, torch.where(values < 0, values * penalty, values / penalty).to(scores.dtype))


def _read_additive(name: str, penalty: Numbers) -> RowValues:
    return RowValues.read(name, penalty, in_range(name, -LARGEST_PENALTY, LARGEST_PENALTY))


def _read_ignored(length: int | None) -> int | None:
    return None if length is None else as_positive_integer("prompt_ignore_length", length, at_least=0)

"""Processors that compare the end of the text with what came before."""

from __future__ import annotations

from operator import add
from types import MappingProxyType
from typing import Any, ClassVar

import torch

from unspool.kernels.presence import takes_kernels
from unspool.logits.base import Joining, LogitsProcessor
from unspool.logits.penalties import is_real, read_encoder_ids
from unspool.logits.rows import Numbers, RowTable, RowValues, TokenIds, as_positive_integer, in_range
from unspool.logits.temperature import exact_dtype

INF = float("inf")
SMALL = 8  # n-grams up to this size are compared column by column, which takes less memory
LONGEST_MATCH = 50  # tokens compared by DRY; its penalty is beyond any score long before
LARGEST_DRY_PENALTY = 1e30


class NoRepeatNGramLogitsProcessor(LogitsProcessor):
    """Forbids every token that would end an n-gram the text already has (Paulus et al. 2017, arXiv 1705.04304)."""

    counts_columns = False  # padding is known

    def __init__(self, ngram_size: int) -> None:
        self.ngram_size = as_positive_integer("ngram_size", ngram_size)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, pads: torch.Tensor | None = None) -> torch.Tensor:
        """The scores with the repeating tokens at -inf."""
        if input_ids.shape[-1] < self.ngram_size:
            return scores
        if takes_kernels(scores):
            from unspool.kernels.gpu.sampling.seen import ban_repeated  # Triton is imported where a GPU is used

            return ban_repeated(scores, input_ids, self.ngram_size, pads)
        is_match = _find_end(input_ids, input_ids, self.ngram_size)
        if pads is not None:
            is_match = is_match & is_real(is_match, 0, pads)
        return _forbid(scores, input_ids[:, self.ngram_size - 1 :], is_match)


class EncoderNoRepeatNGramLogitsProcessor(LogitsProcessor):
    """Forbids every token that would end an n-gram of the encoder's input; ids below 0 are none."""

    joined_by: ClassVar[Joining] = MappingProxyType({"batch_size": add})

    def __init__(self, encoder_ngram_size: int, encoder_input_ids: torch.Tensor) -> None:
        self.ngram_size = as_positive_integer("encoder_ngram_size", encoder_ngram_size)
        ids = read_encoder_ids(encoder_input_ids)
        self.batch_size = ids.shape[0]
        self._ids = RowTable("encoder_input_ids", ids)

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, starts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The scores with the repeating tokens at -inf."""
        ids = self._ids.match(scores)
        if ids.shape[-1] < self.ngram_size or input_ids.shape[-1] < self.ngram_size - 1:
            return scores
        following = ids[:, self.ngram_size - 1 :]  # (rows, places)
        is_match = _find_end(input_ids, ids, self.ngram_size) & (following >= 0)
        if starts is not None:
            is_match &= (input_ids.shape[-1] - starts >= self.ngram_size - 1)[:, None]
        return _forbid(scores, following.clamp(min=0), is_match)


class DRYLogitsProcessor(LogitsProcessor):
    """DRY: a penalty that grows with the length of the sequence a token would repeat.

    Origin: p-e-w, text-generation-webui pull request 5677 (2024). A token that would extend a repetition of
    `length >= allowed_length` tokens loses `multiplier * base ** (length - allowed_length)`; `sequence_breakers` are
    token ids that no match reaches across.
    """

    counts_columns = False  # padding is known

    def __init__(
        self,
        multiplier: Numbers,
        base: Numbers = 1.75,
        allowed_length: int = 2,
        sequence_breakers: Any = (),
    ) -> None:
        self._multiplier = RowValues.read("dry_multiplier", multiplier, in_range("dry_multiplier", 0, 1e4))
        self._base = RowValues.read("dry_base", base, in_range("dry_base", 1, 100))
        self.allowed_length = as_positive_integer("dry_allowed_length", allowed_length)
        self._breakers = TokenIds("dry_sequence_breakers", sequence_breakers)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, pads: torch.Tensor | None = None) -> torch.Tensor:
        """The scores with those of repeating tokens lowered."""
        if input_ids.shape[-1] < 2:
            return scores
        if takes_kernels(scores):
            return self._penalise_by_kernel(input_ids, scores, pads)
        following = input_ids[:, 1:]  # (rows, places): what came after each place
        length = self._match_lengths(input_ids, scores, pads)  # (rows, places)
        exact = exact_dtype(scores)
        over = (length - self.allowed_length).to(exact)
        penalty = self._multiplier.column(scores, exact) * self._base.column(scores, exact) ** over
        penalty = penalty.clamp(max=LARGEST_DRY_PENALTY).masked_fill(over < 0, 0.0)
        lowered = (scores.gather(-1, following) - penalty).clamp(min=torch.finfo(scores.dtype).min)  # stays possible
        # A token that came after several places takes the largest of their penalties.
        return scores.scatter_reduce(-1, following, lowered.to(scores.dtype), "amin")

    def _penalise_by_kernel(
        self, input_ids: torch.Tensor, scores: torch.Tensor, pads: torch.Tensor | None
    ) -> torch.Tensor:
        from unspool.kernels.gpu.sampling.seen import penalise_repeats  # Triton is imported where a GPU is used

        end = input_ids[:, -LONGEST_MATCH:]
        return penalise_repeats(
            scores,
            input_ids,
            ~torch.isin(end, self._breakers.index(scores)),
            self._multiplier.column(scores),
            self._base.column(scores),
            allowed=self.allowed_length,
            largest=LARGEST_DRY_PENALTY,
            pads=pads,
        )

    def _match_lengths(self, input_ids: torch.Tensor, scores: torch.Tensor, pads: torch.Tensor | None) -> torch.Tensor:
        """How many tokens up to each place are those at the text's end: (rows, places)."""
        reach = min(LONGEST_MATCH, input_ids.shape[-1])
        if pads is not None:
            input_ids = torch.where(is_real(input_ids, 0, pads), input_ids, -1)
        reached = torch.nn.functional.pad(input_ids, (reach, 0), value=-1)
        windows = reached.unfold(1, reach, 1)[:, 1:-1]  # (rows, places, reach)
        end = reached[:, None, -reach:]
        is_open = (end >= 0) & ~torch.isin(end, self._breakers.index(scores))
        is_same = (windows == end) & is_open
        place = torch.arange(reach, dtype=torch.int8, device=scores.device)
        last_difference = torch.where(is_same, torch.full_like(place, -1), place).amax(dim=-1)
        return reach - 1 - last_difference.to(torch.int64)


def _find_end(input_ids: torch.Tensor, among: torch.Tensor, size: int) -> torch.Tensor:
    """Where `among` has the `size - 1` tokens that the text ends with, followed by one more: (rows, places)."""
    end = input_ids[:, input_ids.shape[-1] + 1 - size :]  # (rows, size - 1)
    if size > SMALL:
        return (among.unfold(1, size, 1)[..., :-1] == end[:, None]).all(dim=-1)
    num_places = among.shape[-1] + 1 - size
    is_match = torch.ones(among.shape[0], num_places, dtype=torch.bool, device=among.device)
    for offset in range(size - 1):
        is_match &= among[:, offset : offset + num_places] == end[:, offset, None]
    return is_match


def _forbid(scores: torch.Tensor, tokens: torch.Tensor, is_forbidden: torch.Tensor) -> torch.Tensor:
    """The scores with the tokens (rows, n) that are forbidden at -inf."""
    limit = torch.where(is_forbidden, -INF, INF).to(scores.dtype)
    return scores.scatter_reduce(-1, tokens, limit, "amin")

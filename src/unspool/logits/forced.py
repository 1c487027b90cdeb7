"""Processors that force, forbid or allow certain tokens at certain places."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch

from unspool.errors import SettingError, excerpt
from unspool.kernels.sending import send
from unspool.logits.base import LogitsProcessor
from unspool.logits.rows import RowValues, TokenIds, as_positive_integer
from unspool.wording import about

INF = float("inf")


class ForcedBOSTokenLogitsProcessor(LogitsProcessor):
    """Forces a token right after the one that the text starts with."""

    def __init__(self, bos_token_id: int) -> None:
        self.bos_token_id = bos_token_id
        self._tokens = TokenIds("bos_token_id", bos_token_id)

    def __call__(
        self,
        input_ids: torch.Tensor,
        scores: torch.Tensor,
        starts: torch.Tensor | None = None,
        pads: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The scores, at a text of one token with all but the forced one at -inf."""
        before = pads if starts is None else starts
        if before is not None:
            return torch.where(input_ids.shape[-1] - before[:, None] == 1, _force(scores, self._tokens), scores)
        return _force(scores, self._tokens) if input_ids.shape[-1] == 1 else scores

    def find_forbidden(self, width: int) -> Sequence[int] | None:
        """None at a text of one token, nothing else."""
        return None if width == 1 else ()


class ForcedEOSTokenLogitsProcessor(LogitsProcessor):
    """Forces an end token as the last one before a length is reached."""

    def __init__(self, max_length: int, eos_token_id: Any, device: Any = "cpu") -> None:
        self._longest = RowValues.of_columns("max_length", max_length)
        self._tokens = TokenIds("eos_token_id", eos_token_id)
        self.eos_token_id = torch.tensor(self._tokens.ids, device=device)

    @property
    def max_length(self) -> Any:
        """The length that is reached, or a tensor with one per row."""
        return self._longest.given

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, starts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The scores, at the last place with all but the end tokens at -inf."""
        if starts is not None:
            is_last = input_ids.shape[-1] - starts[:, None] == self._longest.column(scores, torch.int64) - 1
            return torch.where(is_last, _force(scores, self._tokens), scores)
        return _force(scores, self._tokens) if input_ids.shape[-1] == self.max_length - 1 else scores

    def find_forbidden(self, width: int) -> Sequence[int] | None:
        """None at the last place, nothing before it."""
        return None if self._longest.is_per_row or width == self.max_length - 1 else ()


class SuppressTokensLogitsProcessor(LogitsProcessor):
    """Forbids tokens everywhere."""

    counts_columns = False

    def __init__(self, suppress_tokens: Any, device: Any = "cpu") -> None:
        self._tokens = TokenIds("suppress_tokens", suppress_tokens)
        self.suppress_tokens = torch.tensor(self._tokens.ids, device=device)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores with the tokens at -inf."""
        return scores.index_fill(-1, self._tokens.index(scores), -INF)

    def find_forbidden(self, width: int) -> Sequence[int] | None:
        """The tokens."""
        return self._tokens.ids


class SuppressTokensAtBeginLogitsProcessor(LogitsProcessor):
    """Forbids tokens at the first place that is written."""

    def __init__(self, begin_suppress_tokens: Any, begin_index: int, device: Any = "cpu") -> None:
        self._tokens = TokenIds("begin_suppress_tokens", begin_suppress_tokens)
        self.begin_suppress_tokens = torch.tensor(self._tokens.ids, device=device)
        self.set_begin_index(begin_index)

    def set_begin_index(self, begin_index: int) -> None:
        """Move the place."""
        self._begin = RowValues.of_columns("begin_index", begin_index, at_least=0)

    @property
    def begin_index(self) -> Any:
        """The column of the first token that is written, or a tensor with one per row."""
        return self._begin.given

    def __call__(
        self, input_ids: torch.Tensor, scores: torch.Tensor, starts: torch.Tensor | None = None
    ) -> torch.Tensor:
        """The scores, at the first place with the tokens at -inf."""
        if starts is not None:
            begin = self._begin.column(scores, torch.int64).flatten()
            return self._forbid(scores, torch.eq(input_ids.shape[-1] - starts, begin))
        if input_ids.shape[-1] != self.begin_index:
            return scores
        return scores.index_fill(-1, self._tokens.index(scores), -INF)

    def _forbid(self, scores: torch.Tensor, is_first: torch.Tensor) -> torch.Tensor:
        """The scores of the rows (rows,) that are at the first place with the tokens at -inf."""
        return torch.where(is_first[:, None], scores.index_fill(-1, self._tokens.index(scores), -INF), scores)

    def find_forbidden(self, width: int) -> Sequence[int] | None:
        """The tokens, at the first place."""
        if self._begin.is_per_row:
            return None
        return self._tokens.ids if width == self.begin_index else ()


class SuppressTokensBehindForcedOnes(SuppressTokensAtBeginLogitsProcessor):
    """The same where a row whose prompt is one token begins with a forced one, and so has its first place behind it."""

    def __call__(
        self,
        input_ids: torch.Tensor,
        scores: torch.Tensor,
        starts: torch.Tensor | None = None,
        pads: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The scores, at each row's first place with the tokens at -inf."""
        if starts is not None or pads is None:
            return super().__call__(input_ids, scores, starts)
        begin = self._begin.column(scores, torch.int64).flatten()
        return self._forbid(scores, torch.eq(begin + (begin - pads <= 1), input_ids.shape[-1]))


def _read_allowed(allowed: Any, device: torch.device) -> torch.Tensor:
    """What a caller's function allows, as a tensor (tokens,); raises if it is no list of token ids."""
    try:
        tokens = torch.as_tensor(allowed, device=device).reshape(-1)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _refuse_allowed(allowed) from error
    if tokens.numel() and (tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool):
        raise _refuse_allowed(allowed)
    return tokens


def _refuse_allowed(allowed: Any) -> SettingError:
    return SettingError(
        about("prefix_allowed_tokens_fn", f"must return a list of token ids, but returned {excerpt(allowed)}.")
    )


class PrefixConstrainedLogitsProcessor(LogitsProcessor):
    """Allows only the tokens that a function of the batch's row and its text names (Cao et al. 2020, arXiv 2010.00904).

    If other processors have forbidden every allowed token, the allowed ones come back.
    """

    def __init__(
        self, prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], Sequence[int]], num_beams: int = 1
    ) -> None:
        if not callable(prefix_allowed_tokens_fn) or isinstance(prefix_allowed_tokens_fn, type):
            raise SettingError(
                about("prefix_allowed_tokens_fn", "has to be a function (batch_id, input_ids) -> token ids.")
            )
        self._function = prefix_allowed_tokens_fn
        self._num_beams = as_positive_integer("num_beams", num_beams)
        self._numbers: list[int] | None = None  # the rows that are left, by their number in the call

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores with all that is not allowed at -inf."""
        vocab = scores.shape[-1]
        mask = torch.full_like(scores, -INF)
        numbers = range(scores.shape[0]) if self._numbers is None else self._numbers
        prompts = [number // self._num_beams for number in numbers]
        for place, prompt in enumerate(prompts):
            allowed = self._function(prompt, input_ids[place])
            tokens = _read_allowed(allowed, scores.device)
            if tokens.numel() == 0:
                raise SettingError(
                    about(
                        "prefix_allowed_tokens_fn",
                        f"returned an empty list for batch ID {prompt}: the constraint can't be satisfied. "
                        "Return at least one token, for instance the end token.",
                    )
                )
            if scores.device.type == "cpu" and not 0 <= int(tokens.min()) <= int(tokens.max()) < vocab:
                raise SettingError(
                    about("prefix_allowed_tokens_fn", f"returned ids outside the vocabulary of {vocab} tokens.")
                )
            mask[place, tokens.long()] = 0
        allowed_scores = scores + mask
        owners = send(prompts, scores.device)  # a group of beams has fewer than `num_beams` of a prompt's
        goes_on = ~allowed_scores.amax(dim=-1).isneginf()
        num_left = owners.new_zeros(max(prompts, default=0) + 1).index_add_(0, owners, goes_on.long())
        return torch.where((num_left[owners] == 0)[:, None], mask, allowed_scores)

    def select_rows(self, index: torch.Tensor) -> LogitsProcessor:
        """The processor for the rows at `index`, which keep the numbers that the function knows them by."""
        chosen = copy.copy(self)
        rows = index.tolist()
        chosen._numbers = rows if self._numbers is None else [self._numbers[row] for row in rows]
        return chosen


def _force(scores: torch.Tensor, tokens: TokenIds) -> torch.Tensor:
    return torch.full_like(scores, -INF).index_fill_(-1, tokens.index(scores), 0.0)

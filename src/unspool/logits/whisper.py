"""Whisper's rules for timestamps (Radford et al. 2022, arXiv 2212.04356)."""

from __future__ import annotations

from typing import Any

import torch

from unspool.errors import SettingError
from unspool.logits.base import LogitsProcessor
from unspool.logits.rows import as_positive_integer

INF = float("inf")


class WhisperTimeStampLogitsProcessor(LogitsProcessor):
    """Keeps timestamps in pairs and in order, lets one stand first, and prefers them where they are likelier than text.

    `generate_config` has `no_timestamps_token_id`, `eos_token_id` (or `bos_token_id`) and, if wanted,
    `max_initial_timestamp_index`; every id after `no_timestamps_token_id` is a timestamp.
    """

    def __init__(
        self,
        generate_config: Any,
        begin_index: int | None = None,
        _detect_timestamp_from_logprob: bool | None = None,
    ) -> None:
        if begin_index is None:
            raise SettingError(
                "`begin_index`, the column of the first token that is not forced, has to be given to "
                "WhisperTimeStampLogitsProcessor."
            )
        self.begin_index = as_positive_integer("begin_index", begin_index, at_least=0)
        self.no_timestamps_token_id: int = generate_config.no_timestamps_token_id
        self.timestamp_begin = self.no_timestamps_token_id + 1
        end = generate_config.eos_token_id or generate_config.bos_token_id
        self.eos_token_id: int = end[0] if isinstance(end, (list, tuple)) else end
        detects = _detect_timestamp_from_logprob
        if detects is None:
            detects = getattr(generate_config, "_detect_timestamp_from_logprob", True)
        self._detect_timestamp_from_logprob = bool(detects)
        self.max_initial_timestamp_index: int | None = getattr(generate_config, "max_initial_timestamp_index", None)

    def set_begin_index(self, begin_index: int) -> None:
        """Move the column of the first token that is not forced."""
        self.begin_index = begin_index

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        """The scores with all that the rules forbid at -inf."""
        token = torch.arange(scores.shape[-1], device=scores.device)  # (vocab,)
        is_stamp = token >= self.timestamp_begin
        is_forbidden = (token == self.no_timestamps_token_id) | self._find_unpaired(input_ids, token, is_stamp)
        if input_ids.shape[-1] == self.begin_index:
            is_forbidden = is_forbidden | ~is_stamp
            if self.max_initial_timestamp_index is not None:
                is_forbidden = is_forbidden | (token > self.timestamp_begin + self.max_initial_timestamp_index)
        scores = scores.masked_fill(is_forbidden, -INF)
        if not self._detect_timestamp_from_logprob:
            return scores
        logprobs = scores.float().log_softmax(dim=-1)
        of_stamps = logprobs[:, self.timestamp_begin :].logsumexp(dim=-1, keepdim=True)
        of_text = logprobs[:, : self.timestamp_begin].amax(dim=-1, keepdim=True)
        return scores.masked_fill((of_stamps > of_text) & ~is_stamp, -INF)

    def _find_unpaired(self, input_ids: torch.Tensor, token: torch.Tensor, is_stamp: torch.Tensor) -> torch.Tensor:
        """What would break a pair, or go back in time: (rows, vocab)."""
        written = input_ids[:, self.begin_index :]  # (rows, written)
        rows, num_written = written.shape
        if num_written == 0:
            return torch.zeros(rows, 1, dtype=torch.bool, device=token.device)
        was_stamp = written >= self.timestamp_begin
        last = was_stamp[:, -1:]  # (rows, 1)
        one_before = was_stamp[:, -2:-1] if num_written > 1 else torch.ones_like(last)
        is_forbidden = last & one_before & is_stamp  # after a pair comes text
        is_forbidden = is_forbidden | (last & ~one_before & (token < self.eos_token_id))  # a lone one wants its pair
        place = torch.arange(num_written, device=written.device)
        newest = torch.where(was_stamp, place, -1).amax(dim=-1, keepdim=True)  # (rows, 1), -1 where there is none
        reached = written.gather(-1, newest.clamp(min=0)) + (~(last & ~one_before)).long()
        reached = torch.where(newest >= 0, reached, self.timestamp_begin)
        is_past = is_stamp & (token < reached)
        return torch.logical_or(is_forbidden, is_past)

"""Whisper's rules for timestamps (Radford et al. 2022, arXiv 2212.04356)."""

from __future__ import annotations

from typing import Any

import torch

from unspool.errors import SettingError
from unspool.kernels.presence import takes_kernels
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
        if takes_kernels(scores) and input_ids.shape[-1]:
            return self._obey_on_gpu(input_ids, scores)
        scores = scores.clone()
        scores[:, self.no_timestamps_token_id] = -INF
        text, stamps = scores[:, : self.timestamp_begin], scores[:, self.timestamp_begin :]  # views
        place = torch.arange(stamps.shape[-1], device=scores.device)
        if input_ids.shape[-1] == self.begin_index:
            text.fill_(-INF)
            if self.max_initial_timestamp_index is not None:
                stamps[:, self.max_initial_timestamp_index + 1 :] = -INF
        elif input_ids.shape[-1] > self.begin_index:
            is_alone, is_paired, reached = self._follow(input_ids[:, self.begin_index :])
            stamps.masked_fill_(is_paired | (place < reached), -INF)
            _fill_rows(scores[:, : self.eos_token_id], is_alone)
        if self._detect_timestamp_from_logprob:
            # Both sides of the comparison would be divided by the same sum of probabilities.
            of_stamps = stamps.float().logsumexp(dim=-1, keepdim=True)
            _fill_rows(text, of_stamps > text.float().amax(dim=-1, keepdim=True))
        return scores

    def _obey_on_gpu(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        from unspool.kernels.gpu.sampling.timestamps import TimestampRules, obey_timestamps  # Triton, where a GPU is

        last, vocab = self.max_initial_timestamp_index, scores.shape[-1]
        rules = TimestampRules(
            self.begin_index,
            self.timestamp_begin,
            self.eos_token_id,
            vocab if last is None else last,
            self._detect_timestamp_from_logprob,
        )
        return obey_timestamps(input_ids, scores, rules)

    def _follow(self, written: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Whether a lone timestamp wants its pair, whether text must come, and the first timestamp that may come."""
        num_written = written.shape[-1]
        was_stamp = written >= self.timestamp_begin
        last = was_stamp[:, -1:]
        one_before = was_stamp[:, -2:-1] if num_written > 1 else torch.ones_like(last)
        is_alone, is_paired = last & ~one_before, last & one_before
        place = torch.arange(num_written, device=written.device)
        newest = torch.where(was_stamp, place, -1).amax(dim=-1, keepdim=True)  # -1 where there is none
        reached = written.gather(-1, newest.clamp(min=0)) - self.timestamp_begin + (~is_alone).long()
        return is_alone, is_paired, torch.where(newest >= 0, reached, 0)


def _fill_rows(part: torch.Tensor, rows: torch.Tensor) -> None:
    """Forbid a part of the vocabulary for some rows (rows, 1)."""
    if part.device.type != "cpu" or bool(rows.any()):  # a look costs nothing there
        part.masked_fill_(rows, -INF)

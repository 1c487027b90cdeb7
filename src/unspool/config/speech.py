"""The names under which a generation_config.json describes a model of speech; they are no settings of other models."""

from __future__ import annotations

from typing import Final

SPEECH_FIELDS: Final = (
    "alignment_heads",
    "compression_ratio_threshold",
    "condition_on_prev_tokens",
    "is_multilingual",
    "lang_to_id",
    "language",
    "logprob_threshold",
    "max_initial_timestamp_index",
    "no_speech_threshold",
    "no_timestamps_token_id",
    "prev_sot_token_id",
    "return_timestamps",
    "task",
    "task_to_id",
)

"""The names under which a generation_config.json describes a model of speech, and those of what generate() takes for it
alone; they are no settings of other models."""

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

ONE_WINDOW: Final = ("return_timestamps", "task", "language", "is_multilingual", "prompt_ids")
"""Arguments of generate() for such a model that a single window follows too."""

WINDOWS: Final = (
    "compression_ratio_threshold",
    "condition_on_prev_tokens",
    "force_unique_generate_call",
    "logprob_threshold",
    "monitor_progress",
    "no_speech_threshold",
    "num_segment_frames",
    "prompt_condition_type",
    "return_segments",
    "return_token_timestamps",
    "time_precision",
    "time_precision_features",
)
"""Those of sounds that are read window by window."""

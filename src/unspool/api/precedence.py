"""What a caller's stopping criteria replace: settings that ask for a criterion of the same kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from unspool.config import GenerationConfig
from unspool.config.theirs import is_theirs
from unspool.decoding.prompts import Prompts
from unspool.plan import Origin
from unspool.stopping import MaxLengthCriteria

_REPLACED = {"MaxTimeCriteria": "max_time", "StopStringCriteria": "stop_strings"}


def follow_criteria(
    settings: GenerationConfig,
    origins: dict[str, Origin],
    criteria: Sequence[Any],
    prompts: Prompts,
    *,
    counts_rows_alone: bool = False,
) -> None:
    """Let a caller's criterion count in place of the setting that makes one of its kind, as in transformers.

    A `MaxLengthCriteria` of ours replaces a length that the caller has not set: with one that was set, both count.
    """
    listed = [one for each in criteria for one in (each if isinstance(each, list) else (each,))]  # transformers' lists
    is_set = any(origins[name] in ("config", "call") for name in ("max_length", "max_new_tokens"))
    limits = [
        int(one.max_length)
        for one in listed
        if is_theirs(one, "MaxLengthCriteria") or (isinstance(one, MaxLengthCriteria) and not is_set)
    ]
    # Where criteria count each row alone, the last column is that in which the shortest row ends.
    shift = max(0, prompts.width - min(prompts.lengths)) if counts_rows_alone else 0
    if limits and min(limits) + shift > prompts.width:  # otherwise it ends the first step
        # A length counts embeddings that stand for tokens; a criterion sees the tokens alone.
        settings.max_length, settings.max_new_tokens = min(limits) + shift + prompts.num_hidden, None
        origins["max_length"], origins["max_new_tokens"] = "call", "default"
    for kind, name in _REPLACED.items():
        if any(is_theirs(one, kind) for one in listed):
            setattr(settings, name, None)
            origins[name] = "default"

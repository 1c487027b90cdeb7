"""The numbers of candidates that contrastive search may have."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from unspool.config.modes import find_num_candidates, read_top_k
from unspool.config.values import MOST_ROWS
from unspool.errors import SettingError
from unspool.wording import Setting, about, word

if TYPE_CHECKING:
    from unspool.config.generation import GenerationConfig


def check_candidates(config: GenerationConfig, asked: Collection[str], *, vocab_size: int, num_rows: int) -> None:
    """Raise for numbers of candidates that can't be; `asked` are the settings that the caller set."""
    if config.penalty_alpha and "penalty_alpha" in asked and min(read_top_k(config)) < 2:
        raise SettingError(
            word(
                "{penalty_alpha} chooses among the {top_k} likeliest tokens, and {top_k} is {given}; "
                "set {top_k} to 2 or more (4 is usual), or leave {penalty_alpha} out",
                given=config.top_k,
            )
        )
    num = find_num_candidates(config)
    if num > vocab_size:
        raise SettingError(
            about(
                Setting("top_k", str(num)),
                f"candidates were asked for, and the vocabulary has {vocab_size} tokens; ask for fewer",
            )
        )
    if num * num_rows > MOST_ROWS:
        raise SettingError(
            about(
                Setting("top_k", str(num)),
                f"candidates for each of {num_rows} prompts make {num * num_rows} rows, and at most {MOST_ROWS} are "
                "read at once; ask for fewer",
            )
        )

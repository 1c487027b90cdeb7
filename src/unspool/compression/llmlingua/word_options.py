"""The arguments of LLMLingua-2, checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unspool.compression.llmlingua import checks
from unspool.errors import SettingError, excerpt

_MOST_MARKS = 1024  # force tokens or chunk ends
_LONGEST_MARK = 1000  # characters


@dataclass(frozen=True, slots=True)
class WordOptions:
    """What a call of LLMLingua-2 asks for, besides its texts."""

    rate: float = 0.5
    target_token: float = -1
    use_context_level_filter: bool = True
    use_token_level_filter: bool = True
    target_context: int = -1
    context_level_rate: float = 1.0
    context_level_target_token: float = -1
    force_context_ids: Any = None
    return_word_label: bool = False
    word_sep: str = "\t\t|\t\t"
    label_sep: str = " "
    token_to_word: str = "mean"
    force_tokens: Sequence[str] = ()
    force_reserve_digit: bool = False
    drop_consecutive: bool = False
    chunk_end_tokens: Sequence[str] = (".", "\n")

    def __post_init__(self) -> None:
        if checks.check_number("rate", self.rate, 0, 1) == 0:
            raise SettingError("`rate`=0 leaves nothing of a text; give a number above 0, up to 1")
        checks.check_target(self.target_token)
        checks.check_count("target_context", self.target_context, -1)
        checks.check_number("context_level_rate", self.context_level_rate, 0, 1)
        checks.check_target(self.context_level_target_token, "context_level_target_token")
        for name in _SWITCHES:
            checks.check_switch(name, getattr(self, name))
        checks.check_choice("token_to_word", self.token_to_word, ("mean", "first"))
        for name in ("word_sep", "label_sep"):
            _check_mark(name, getattr(self, name), may_be_empty=True)
        for name in ("force_tokens", "chunk_end_tokens"):
            marks = getattr(self, name)
            if not isinstance(marks, list | tuple) or len(marks) > _MOST_MARKS:
                raise SettingError(f"`{name}`={excerpt(marks)} must be a list of at most {_MOST_MARKS} texts")
            for mark in marks:
                _check_mark(name, mark)


_SWITCHES = (
    "use_context_level_filter",
    "use_token_level_filter",
    "return_word_label",
    "force_reserve_digit",
    "drop_consecutive",
)


def _check_mark(name: str, value: Any, *, may_be_empty: bool = False) -> None:
    if not isinstance(value, str) or len(value) > _LONGEST_MARK or not (value or may_be_empty):
        raise SettingError(f"`{name}` holds {excerpt(value)}; it takes texts of 1 to {_LONGEST_MARK} characters")

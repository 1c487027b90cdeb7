"""Constraints out of the setting `force_words_ids`."""

from __future__ import annotations

from typing import Any

from unspool.constraints.base import Constraint
from unspool.constraints.disjunctive import DisjunctiveConstraint
from unspool.constraints.phrasal import PhrasalConstraint
from unspool.errors import SettingError
from unspool.wording import about

MOST_WORDS = 65_536
_SHAPE = "a list of phrases (lists of token ids) and of alternatives (lists of phrases)"


def make_constraints(force_words_ids: list[list[int]] | list[list[list[int]]]) -> list[Constraint]:
    """One constraint a word: a phrase must be written as it is, of alternatives one."""
    if not isinstance(force_words_ids, list) or not force_words_ids:
        raise SettingError(
            about("force_words_ids", f"must be {_SHAPE} and not empty, but is {force_words_ids!r:.200}.")
        )
    if len(force_words_ids) > MOST_WORDS:
        raise SettingError(
            about("force_words_ids", f"has {len(force_words_ids)} words; at most {MOST_WORDS} are taken.")
        )
    return [_make_constraint(word) for word in force_words_ids]


def _make_constraint(word: Any) -> Constraint:
    if not isinstance(word, list) or not word:
        raise SettingError(about("force_words_ids", f"must be {_SHAPE}, but contains {word!r:.200}."))
    try:
        return DisjunctiveConstraint(word) if isinstance(word[0], list) else PhrasalConstraint(word)
    except SettingError as error:
        raise SettingError(about("force_words_ids", f"must be {_SHAPE}. {error}")) from error

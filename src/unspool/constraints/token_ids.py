"""What is accepted as a token id and as a phrase."""

from __future__ import annotations

from typing import Any

from unspool.errors import SettingError
from unspool.numeric import is_token_id

MOST_IDS = 65_536


def check_phrase(name: str, phrase: Any) -> None:
    """Raise a SettingError unless it is a non-empty list of token ids."""
    if not isinstance(phrase, list) or not phrase:
        raise SettingError(f"`{name}` must be a non-empty list of token ids, but is {phrase!r:.200}.")
    if len(phrase) > MOST_IDS:
        raise SettingError(f"`{name}` has a phrase of {len(phrase)} tokens; at most {MOST_IDS} are taken.")
    for token in phrase:
        if not is_token_id(token):
            raise SettingError(
                f"`{name}` must be made of token ids, which are integers from 0 on, but {phrase!r:.200} "
                f"contains {token!r:.200}."
            )


def check_token(token: Any) -> None:
    """Raise a TypeError unless it is an integer: a tensor would compare, and never be found in a dict."""
    if not isinstance(token, int):
        raise TypeError(f"`token_id` must be an int, but is {token!r:.200} of type {type(token).__name__}.")

"""Thoughts in a conversation's earlier answers, in the form in which a chat template reads them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

FIELDS: Final = ("reasoning_content", "reasoning", "thinking")
"""The names under which clients send an answer's thoughts."""

_PARTS: Final = "parts"  # a content of several parts, one of which is the thought
_READ: Final = (
    ("reasoning_content", re.compile(r"\breasoning_content\b")),
    (_PARTS, re.compile(r"""type['"]?\]?\s*==\s*['"]thinking['"]""")),
    ("thinking", re.compile(r"""\w\.thinking\b|['"]thinking['"]\s*(\]|in\b)""")),
    ("reasoning", re.compile(r"""\w\.reasoning\b|['"]reasoning['"]\s*(\]|in\b)""")),
)


def place_thoughts(messages: Sequence[Mapping[str, Any]], template: Any) -> list[Any]:
    """Messages whose thoughts stand where a template reads them; one that reads none gets none, as its model's are
    made to be."""
    if not any(isinstance(one, Mapping) and any(one.get(name) for name in FIELDS) for one in messages):
        return list(messages)
    place = _find_place("\n".join(map(str, template.values())) if isinstance(template, dict) else str(template))
    return [_move(one, place) if isinstance(one, Mapping) else one for one in messages]


@lru_cache(maxsize=32)
def _find_place(template: str) -> str | None:
    """The field in which a template reads thoughts."""
    return next((name for name, pattern in _READ if pattern.search(template)), None)


def _move(message: Mapping[str, Any], place: str | None) -> dict[str, Any]:
    given = [message[name] for name in FIELDS if message.get(name)]
    if not given:
        return dict(message)
    made = {name: value for name, value in message.items() if name not in FIELDS}
    if place == _PARTS:
        content = made.get("content") or []
        rest = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
        made["content"] = [{"type": "thinking", "thinking": given[0]}, *rest]
    elif place is not None:
        made[place] = given[0]
    return made

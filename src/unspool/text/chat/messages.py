"""Checking messages, and copying what a chat template may see into plain values of bounded size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from unspool.errors import InputError, excerpt

MAX_MESSAGES = 16_384
MAX_CHARACTERS = 8 << 20
MAX_VALUES = 500_000
MAX_DEPTH = 64
MAX_NUMBER = 2**128


def copy_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The messages as plain dicts, each with a role and a content (or the tool calls that stand for one)."""
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence):
        raise InputError(
            f"messages must be a list of dicts such as {{'role': 'user', 'content': 'Hello'}}, "
            f"not {type(messages).__name__}"
        )
    if not messages:
        raise InputError("messages is empty; a chat needs at least one message")
    if len(messages) > MAX_MESSAGES:
        raise InputError(f"{len(messages)} messages were given; a chat may have at most {MAX_MESSAGES}")
    copier = _Copier()
    return [_check_message(copier.copy(message, f"messages[{i}]"), i) for i, message in enumerate(messages)]


def copy_plain(value: Any, name: str) -> Any:
    """A copy of a value that is made of dicts, lists, strings, numbers and None alone."""
    return _Copier().copy(value, name)


def _check_message(message: Any, index: int) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise InputError(
            f"messages[{index}] must be a dict with 'role' and 'content', not {type(message).__name__}; "
            "give one conversation at a time"
        )
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InputError(f"messages[{index}] needs a 'role' such as 'user', and has {excerpt(role)}")
    if "content" not in message and "tool_calls" not in message:
        raise InputError(f"messages[{index}] (of {excerpt(role)}) has no 'content'")
    content = message.get("content")
    if content is not None and not isinstance(content, str | list):
        raise InputError(
            f"messages[{index}]: 'content' must be a text or a list of parts, not {type(content).__name__}"
        )
    return message


class _Copier:
    """Copies nested values, counting them: shared and cyclic ones cost what they would cost written out."""

    def __init__(self) -> None:
        self._num_values = 0
        self._num_characters = 0

    def copy(self, value: Any, name: str, depth: int = 0) -> Any:
        self._num_values += 1
        if self._num_values > MAX_VALUES or depth > MAX_DEPTH:
            raise InputError(
                f"{name} is too large for a chat template: at most {MAX_VALUES} values, {MAX_DEPTH} levels deep"
            )
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, str):
            return self._copy_text(value, name)
        if isinstance(value, int | float):
            return _copy_number(value, name)
        if isinstance(value, Mapping):
            return {
                self._copy_key(key, name): self.copy(item, f"{name}[{excerpt(key)}]", depth + 1)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.copy(item, f"{name}[{index}]", depth + 1) for index, item in enumerate(value)]
        raise InputError(
            f"{name} is a {type(value).__name__}, which a chat template can't be given; "
            "use dicts, lists, strings, numbers and None (a tool as its JSON schema)"
        )

    def _copy_key(self, key: Any, name: str) -> str:
        if not isinstance(key, str):
            raise InputError(f"{name} has the key {excerpt(key)}; keys must be strings")
        return self._copy_text(key, name)

    def _copy_text(self, text: str, name: str) -> str:
        self._num_characters += len(text)
        if self._num_characters > MAX_CHARACTERS:
            raise InputError(f"at {name} there are more than {MAX_CHARACTERS} characters, too many for a chat template")
        return str(text)


def _copy_number(value: int | float, name: str) -> int | float:
    is_usual = math.isfinite(value) if isinstance(value, float) else -MAX_NUMBER <= value <= MAX_NUMBER
    if not is_usual:
        raise InputError(f"{name} is {excerpt(value)}, which is not a finite number of usual size")
    return float(value) if isinstance(value, float) else int(value)

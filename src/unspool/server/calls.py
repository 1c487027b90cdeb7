"""Tool calls in a text, read as it is written."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from unspool.grammar.tools import CallFormat


def make_id(kind: str, *parts: object) -> str:
    """An id that follows from what it is of, so that the same request in a batch's file has the same."""
    return f"{kind}_{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a tool."""

    index: int
    name: str
    arguments: dict[str, Any]
    id: str

    @property
    def arguments_text(self) -> str:
        """The arguments as JSON."""
        return json.dumps(self.arguments, ensure_ascii=False)

    def as_openai(self) -> dict[str, Any]:
        """The call in OpenAI's form."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments_text},
        }


class CallReader:
    """Splits a text that comes in pieces into what is said and the calls that are made.

    Text that may still become a call is held back. Special tokens are taken out of what is said.
    """

    def __init__(self, form: CallFormat, specials: Iterable[str], most: int | None = None, name: str = "") -> None:
        self._name = name  # from which the calls' ids follow
        self._form, self._specials, self._most = form, [one for one in specials if one], most
        self._held = ""
        self._num_calls = 0

    @property
    def is_full(self) -> bool:
        """Whether no more calls may come."""
        return self._most is not None and self._num_calls >= self._most

    def put(self, text: str) -> tuple[str, list[Call]]:
        """Read more text: what is said with it, and the calls that are whole with it."""
        self._held += text
        said: list[str] = []
        calls: list[Call] = []
        while not self.is_full:
            start = self._held.find(self._form.begin)
            if start < 0:
                keep = _count_begun(self._held, self._form.begin)
                cut = len(self._held) - keep
                said.append(self._held[:cut])
                self._held = self._held[cut:]
                break
            found = self._read_call(start)
            if found is None:
                said.append(self._held[:start])
                self._held = self._held[start:]
                break
            call, end = found
            said.append(self._held[:start])
            self._held = self._held[end:]
            calls.append(call)
        return self._clean("".join(said)), calls

    def end(self) -> str:
        """What is said with text that was held back for a call that did not come."""
        held, self._held = self._held, ""
        return "" if self.is_full else self._clean(held)

    def _read_call(self, start: int) -> tuple[Call, int] | None:
        """The call at a place, and where it ends; None while it is not whole."""
        form, text = self._form, self._held
        name_at = start + len(form.begin)
        middle = text.find(form.middle, name_at)
        if middle < 0 or "}" not in text[middle:]:
            return None
        at = middle + len(form.middle)
        at += len(text[at:]) - len(text[at:].lstrip())
        try:
            arguments, end = json.JSONDecoder().raw_decode(text, at)
        except (ValueError, RecursionError):
            return None
        rest = text[end:]
        if form.end and form.end in rest:
            end += rest.index(form.end) + len(form.end)
        elif form.end and form.end.startswith(rest.strip()):
            return None
        given = arguments if isinstance(arguments, dict) else {}
        call = Call(self._num_calls, text[name_at:middle], given, make_id("call", self._name, self._num_calls))
        self._num_calls += 1
        return call, end

    def _clean(self, text: str) -> str:
        for special in self._specials:
            text = text.replace(special, "")
        return text


def _count_begun(text: str, mark: str) -> int:
    """Characters at a text's end with which a mark may have begun."""
    for count in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:count]):
            return count
    return 0

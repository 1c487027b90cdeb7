"""Tool calls in a text, read as it is written."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from unspool.grammar.call_forms import Schemas, ToolForm, read_arguments
from unspool.grammar.call_text import Added, Begun, CallText, Event, Said


def make_id(kind: str, *parts: object) -> str:
    """An id that follows from what it is of, so that the same request in a batch's file has the same."""
    return f"{kind}_{hashlib.sha256(repr(parts).encode()).hexdigest()[:24]}"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a tool."""

    index: int
    name: str
    arguments_text: str  # JSON, unless it was cut off
    id: str

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments as an object; empty if they were cut off."""
        return read_arguments(self.arguments_text) or {}

    def as_openai(self) -> dict[str, Any]:
        """The call in OpenAI's form."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments_text},
        }


@dataclass(frozen=True, slots=True)
class CallPart:
    """What a step adds to a call: its beginning, more of its arguments, its end."""

    index: int
    name: str
    id: str
    text: str = ""  # of the arguments
    begins: bool = False
    ends: bool = False


class CallReader:
    """Splits a text that comes in pieces into what is said and the calls that are made.

    Text that may still become a call is held back. Special tokens are taken out of what is said.
    """

    def __init__(
        self,
        form: ToolForm,
        specials: Iterable[str],
        most: int | None = None,
        name: str = "",
        schemas: Schemas | None = None,
    ) -> None:
        self._name, self._form = name, form  # from the name the calls' ids follow
        self._specials, self._most = [one for one in specials if one], most
        self._text = CallText(lambda source: form.read(source, schemas or {}))
        self._num_calls = 0
        self._open: list[str] | None = None  # the arguments of the call that is written
        self._call = Call(0, "", "", "")

    @property
    def is_full(self) -> bool:
        """Whether no more calls may come."""
        return self._most is not None and self._num_calls >= self._most and self._open is None

    def put(self, text: str) -> tuple[str, list[CallPart], list[Call]]:
        """Read more text: what is said with it, what is added to calls, and the calls that end with it."""
        return self._sort(self._text.put(text))

    def end(self) -> tuple[str, list[CallPart], list[Call]]:
        """The same with text that was held back for a call that did not come."""
        return self._sort(self._text.end())

    def _sort(self, events: Iterable[Event]) -> tuple[str, list[CallPart], list[Call]]:
        said: list[str] = []
        parts: list[CallPart] = []
        calls: list[Call] = []
        for event in events:
            if self.is_full:
                break
            if isinstance(event, Said):
                said.append(event.text)
            elif isinstance(event, Begun):
                name = event.id or self._make_id()
                self._call, self._open = Call(self._num_calls, event.name, "", name), []
                self._num_calls += 1
                parts.append(CallPart(self._call.index, event.name, name, begins=True))
            elif self._open is not None and isinstance(event, Added):
                self._open.append(event.text)
                parts.append(CallPart(self._call.index, self._call.name, self._call.id, event.text))
            elif self._open is not None:
                calls.append(replace(self._call, arguments_text="".join(self._open)))
                parts.append(CallPart(self._call.index, self._call.name, self._call.id, ends=True))
                self._open = None
        return self._clean("".join(said)), _join_parts(parts), calls

    def _make_id(self) -> str:
        made = make_id("call", self._name, self._num_calls)
        return made.removeprefix("call_")[: self._form.id_length] if self._form.id_length else made

    def _clean(self, text: str) -> str:
        for special in self._specials:
            text = text.replace(special, "")
        return text


def _join_parts(parts: list[CallPart]) -> list[CallPart]:
    """What is added to each call, as one."""
    joined: list[CallPart] = []
    for part in parts:
        if joined and joined[-1].index == part.index:
            last = joined[-1]
            joined[-1] = replace(last, text=last.text + part.text, ends=part.ends)
        else:
            joined.append(part)
    return joined

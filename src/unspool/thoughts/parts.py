"""A text as it is written, in its parts: what is thought and what is said."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Final, Literal

from unspool.thoughts.entry import ThoughtEntry

Kind = Literal["text", "thought"]
Phase = Literal["open", "closed", "free"]
"""Where a prompt leaves the text behind it: in a thought, behind one, or before one that may come."""

MOST_SPACE: Final = 8  # characters of white space before a thought


class PartText:
    """Splits a text that comes in pieces into thoughts and what is said. How it was cut makes no difference.

    White space around a thought, which templates write as they like, is in neither part. Text that may be a mark is
    held back until it is known.
    """

    def __init__(self, kind: ThoughtEntry, phase: Phase) -> None:
        self._kind = kind
        self._is_thinking = phase == "open"
        self._may_begin = phase == "free"  # nothing was said yet: a thought may come
        self._is_fresh = phase == "open"  # nothing of the part was given out, so white space is left out
        self._held = ""
        self._given: set[Kind] = set()  # kinds of which something was given out

    def put(self, text: str) -> list[tuple[Kind, str]]:
        """Read more text; returns what is known of it, part by part."""
        self._held += text
        made: list[tuple[Kind, str]] = []
        while self._step(made):
            pass
        return _merge(made)

    def end(self) -> list[tuple[Kind, str]]:
        """The text ended: what was held back is no mark."""
        made: list[tuple[Kind, str]] = []
        held, self._held, self._may_begin = self._held, "", False
        if held:
            self._give(held.rstrip() if self._is_thinking else held, made)
        return made

    def _step(self, made: list[tuple[Kind, str]]) -> bool:
        """Give out what is certain; whether a mark was passed, behind which there may be more."""
        if self._may_begin and not self._kind.repeats:
            told = self._held.lstrip()
            space = len(self._held) - len(told)
            if space <= MOST_SPACE and self._kind.begin.startswith(told):
                if told == self._kind.begin:
                    return self._pass(self._kind.begin, len(self._held))
                return False
            self._may_begin = False
            if space <= MOST_SPACE and told.startswith(self._kind.begin):
                return self._pass(self._kind.begin, space + len(self._kind.begin))
        marks = self._list_marks()
        found, open_at = _find_marks(marks).search(self._held), _find_begun(self._held, marks)
        if found is not None and found.start() < open_at:
            before = self._held[: found.start()]
            self._give(before.rstrip() if self._is_thinking else before, made)
            return self._pass(found[0], found.end())
        known = self._held[:open_at]
        if self._is_thinking:
            known = known.rstrip()  # behind a thought, white space is no part of it
        self._give(known, made)
        self._held = self._held[len(known) :]
        return False

    def _list_marks(self) -> tuple[str, ...]:
        if self._is_thinking:
            return (self._kind.end,)
        return (self._kind.begin, *self._kind.drops) if self._kind.repeats else self._kind.drops

    def _pass(self, mark: str, stop: int) -> bool:
        self._held = self._held[stop:]
        was_thinking = self._is_thinking
        self._is_thinking = not was_thinking and mark == self._kind.begin
        self._may_begin = False
        self._is_fresh = self._is_fresh or was_thinking != self._is_thinking or self._kind.repeats
        return True

    def _give(self, text: str, made: list[tuple[Kind, str]]) -> None:
        kind: Kind = "thought" if self._is_thinking else "text"
        if self._is_fresh:
            text = text.lstrip()
            if text and kind in self._given:  # another part of the kind, on a line of its own
                text = f"\n{text}"
        if text:
            self._is_fresh = False
            self._given.add(kind)
            made.append((kind, text))


def find_said(text: str, kind: ThoughtEntry, phase: Phase) -> str:
    """What of a whole text is said."""
    reader = PartText(kind, phase)
    return "".join(part for one, part in [*reader.put(text), *reader.end()] if one == "text")


@lru_cache(maxsize=64)
def _find_marks(marks: tuple[str, ...]) -> re.Pattern[str]:
    """A pattern of the marks, the longest of those that begin alike first."""
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))) or r"(?!)")


def _find_begun(text: str, marks: tuple[str, ...]) -> int:
    """Where the earliest mark begins that the text's end may be the beginning of; its length if there is none."""
    starts = [len(text)]
    for mark in marks:
        for count in range(min(len(text), len(mark) - 1), 0, -1):
            if text.endswith(mark[:count]):
                starts.append(len(text) - count)
                break
    return min(starts)


def _merge(parts: list[tuple[Kind, str]]) -> list[tuple[Kind, str]]:
    merged: list[tuple[Kind, str]] = []
    for kind, text in parts:
        if merged and merged[-1][0] == kind:
            merged[-1] = (kind, merged[-1][1] + text)
        else:
            merged.append((kind, text))
    return merged

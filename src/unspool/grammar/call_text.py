"""Tool calls in a text, read as it is written: what is said, names once they are whole, arguments as they come."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

NAME: Final = re.compile(r"[\w.:-]{1,128}")
_LONGEST_NAME: Final = 160  # characters that are waited for


@dataclass(frozen=True, slots=True)
class Said:
    """Text that is no call's."""

    text: str


@dataclass(frozen=True, slots=True)
class Begun:
    """A call begins."""

    name: str
    id: str = ""  # which the model gave it


@dataclass(frozen=True, slots=True)
class Added:
    """More of the call's arguments, as JSON."""

    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The call ends; one that was cut off, or that its format does not allow, is not whole."""

    is_whole: bool = True


Event = Said | Begun | Added | Ended
Reading = Generator[None, None, None]
"""Reads a source; asks for more text by yielding."""


class Source:
    """Text that is read from its beginning while it grows."""

    def __init__(self) -> None:
        self.text = ""  # what is not read yet
        self.is_over = False
        self.events: list[Event] = []
        self._space = ""  # behind a call: no text unless text follows
        self._has_called = False  # a call stood last

    def take(self, count: int) -> str:
        """Read so many characters."""
        taken, self.text = self.text[:count], self.text[count:]
        return taken

    def say(self, count: int) -> None:
        """Read so many characters that are no call's."""
        text = self._space + self.take(count)
        self._space = ""
        if self._has_called and not text.strip():
            self._space = text
        elif text:
            self.events.append(Said(text))
            self._has_called = False

    def emit(self, event: Begun | Added | Ended) -> None:
        """Tell what was found."""
        self.events.append(event)
        if isinstance(event, Ended):
            self._has_called, self._space = True, ""

    # --- marks --------------------------------------------------------------------------------------
    def match(self, marks: Sequence[str], at: int = 0) -> Generator[None, None, int]:
        """The end of the mark that stands at a place, 0 if none does."""
        while True:
            found = [match_mark(self.text, at, mark) for mark in marks]
            if None not in found or self.is_over:
                return max((one for one in found if one), default=0)
            yield

    def say_rest(self) -> Reading:
        """Say all that comes."""
        while True:
            self.say(len(self.text))
            if self.is_over:
                return
            yield

    def find(self, marks: Sequence[str]) -> Generator[None, None, int]:
        """Say what stands before the first of some marks; the end of that mark, 0 if none comes."""
        firsts = {mark[0] for mark in marks}
        while True:
            held = len(self.text)
            for at, character in enumerate(self.text):
                if character not in firsts:
                    continue
                found = [match_mark(self.text, at, mark) for mark in marks]
                if None in found and not self.is_over:
                    held = at
                    break
                if any(found):
                    self.say(at)
                    return max(one for one in found if one) - at
            self.say(held)
            if self.is_over:
                return 0
            yield

    def read_until(self, ends: Sequence[str], give: Callable[[str], None]) -> Generator[None, None, bool]:
        """Read text up to one of some marks, and that mark; whether it came."""
        pattern = _find_any(tuple(ends))
        while True:
            found, open_at = pattern.search(self.text), _find_begun(self.text, ends)
            if found is not None and (found.start() < open_at or self.is_over):
                give(self.text[: found.start()])
                self.take(found.end())
                return True
            if self.is_over:
                give(self.take(len(self.text)))
                return False
            give(self.take(open_at))
            yield

    def read_name(self, start: int, ends: Sequence[str]) -> Generator[None, None, tuple[str, str, int]]:
        """A name at a place and the mark behind it, which are not taken: both, and where the mark ends; 0 if there is
        no name."""
        while True:
            for at in range(start, min(len(self.text), start + _LONGEST_NAME) + 1):
                found = [match_mark(self.text, at, mark) for mark in ends]
                if None in found and not self.is_over:
                    break
                stop = max((one for one in found if one), default=0)
                if stop > at:
                    name = self.text[start:at]
                    return (name, self.text[at:stop], stop) if NAME.fullmatch(name) else ("", "", 0)
            if self.is_over or len(self.text) > start + _LONGEST_NAME:
                return "", "", 0
            yield

    def peek(self, start: int = 0) -> Generator[None, None, str]:
        """The next character from a place on that is no white space; empty at the end."""
        while True:
            rest = self.text[start:].lstrip()
            if rest or self.is_over:
                return rest[:1]
            yield

    def skip_space(self) -> Reading:
        """Read white space."""
        yield from self.peek()
        self.text = self.text.lstrip()


class CallText:
    """Reads a text that comes in pieces by a format's reading."""

    def __init__(self, read: Callable[[Source], Reading]) -> None:
        self._source = Source()
        self._reading = read(self._source)
        self._is_begun = self._is_done = False

    def put(self, text: str) -> list[Event]:
        """Read more text: what is certain with it."""
        self._source.text += text
        return self._go_on()

    def end(self) -> list[Event]:
        """The text ended."""
        self._source.is_over = True
        return self._go_on()

    def _go_on(self) -> list[Event]:
        if not self._is_done:
            self._is_done = next(self._reading, self) is self
        events, self._source.events = self._source.events, []
        return events


# --- marks ----------------------------------------------------------------------------------------------------------
_ATOMS: Final = re.compile(r"\{index\}|\{id\}|\s+|[^\s{]+|\{")


@lru_cache(maxsize=256)
def _split_mark(mark: str) -> tuple[str, ...]:
    return tuple(_ATOMS.findall(mark))


def match_mark(text: str, at: int, mark: str) -> int | None:
    """Where a mark ends that stands at a place; 0 if it does not, None if it may, once more text is there.

    White space inside a mark may be any, and that at its end may be missing.
    """
    atoms = _split_mark(mark)
    for place, atom in enumerate(atoms):
        if atom.isspace():
            if place == len(atoms) - 1:
                rest = text[at : at + len(atom)]
                if rest == atom:
                    return at + len(atom)
                return None if atom.startswith(rest) else at
            while at < len(text) and text[at].isspace():
                at += 1
            continue
        if atom in ("{index}", "{id}"):
            begin = at
            while at < len(text) and (text[at].isdigit() if atom == "{index}" else text[at].isalnum()):
                at += 1
            if at == len(text):
                return None
            if at == begin:
                return 0
            continue
        rest = text[at : at + len(atom)]
        if rest != atom:
            return None if atom.startswith(rest) and at + len(rest) == len(text) else 0
        at += len(atom)
    return at


@lru_cache(maxsize=256)
def _find_any(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(marks, key=len, reverse=True))))


def _find_begun(text: str, marks: Sequence[str]) -> int:
    """Where the earliest of some marks may begin that the text ends in."""
    starts = [len(text)]
    for mark in marks:
        starts += [
            len(text) - count for count in range(1, min(len(text), len(mark) - 1) + 1) if text.endswith(mark[:count])
        ]
    return min(starts)


def read_json(source: Source) -> Generator[None, None, bool]:
    """Read a JSON object, given out as it comes; whether it was whole."""
    depth, in_string, is_escaped = 0, False, False
    while True:
        for at, character in enumerate(source.text):
            if in_string:
                if is_escaped:
                    is_escaped = False
                elif character == "\\":
                    is_escaped = True
                elif character == '"':
                    in_string = False
                continue
            if character == '"':
                in_string = True
            elif character in "{[":
                depth += 1
            elif character in "}]":
                depth -= 1
                if not depth:
                    source.emit(Added(source.take(at + 1)))
                    return True
        if source.text:
            source.emit(Added(source.take(len(source.text))))
        if source.is_over:
            return False
        yield

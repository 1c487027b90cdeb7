"""Cutting a stream of text at stop strings, without ever showing the beginning of one."""

from __future__ import annotations

import re
from collections.abc import Iterable

from unspool.errors import SettingError

MAX_STOP_STRINGS = 1024
MAX_STOP_CHARACTERS = 16_384


class _Matcher:
    """How much of one stop string the text so far ends with (Knuth, Morris and Pratt, 1977)."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.num_matched = 0
        self._fallback = _find_borders(stop)

    def advance(self, character: str) -> bool:
        """Read one character; whether the stop string is now complete."""
        while self.num_matched and self.stop[self.num_matched] != character:
            self.num_matched = self._fallback[self.num_matched - 1]
        if self.stop[self.num_matched] == character:
            self.num_matched += 1
        return self.num_matched == len(self.stop)


class StopText:
    """A filter for streamed text that stops at the first stop string to be complete.

    Text that may be the beginning of a stop string is held back until it is known. The text that comes out ends
    before the stop string, or with it if `keep`; how the text was cut into pieces makes no difference.
    """

    def __init__(self, stop_strings: str | Iterable[str], keep: bool = False) -> None:
        self.keep = keep
        self.is_stopped = False
        self.stop_string: str | None = None  # the one that was found
        self._matchers = [_Matcher(stop) for stop in check_stop_strings(stop_strings)]
        firsts = sorted({matcher.stop[0] for matcher in self._matchers})
        self._begins = re.compile("[" + "".join(map(re.escape, firsts)) + "]" if firsts else "(?!)")
        self._held = ""

    def put(self, text: str) -> str:
        """Read new text; returns what is now known to lie before any stop string."""
        if self.is_stopped:
            return ""
        index, is_idle, matchers = 0, not self._held, self._matchers
        while index < len(text):
            if is_idle:  # no stop string has begun: only its first character matters
                begin = self._begins.search(text, index)
                if begin is None:
                    break
                index = begin.start()
            complete = [matcher.stop for matcher in matchers if matcher.advance(text[index])]
            index += 1
            if complete:
                return self._stop(self._held + text[:index], max(complete, key=len))
            is_idle = not any(matcher.num_matched for matcher in matchers)
        self._held += text
        num_open = max((matcher.num_matched for matcher in matchers), default=0)
        num_known = len(self._held) - num_open
        known, self._held = self._held[:num_known], self._held[num_known:]
        return known

    def end(self) -> str:
        """The text ended: what was held back is no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _stop(self, text: str, stop: str) -> str:
        self.is_stopped, self.stop_string, self._held = True, stop, ""
        return text if self.keep else text[: len(text) - len(stop)]


def check_stop_strings(stop_strings: str | Iterable[str]) -> list[str]:
    """The stop strings as a list, refused if one can't be looked for."""
    stops = [stop_strings] if isinstance(stop_strings, str) else list(stop_strings)
    if len(stops) > MAX_STOP_STRINGS:
        raise SettingError(f"{len(stops)} stop strings were given; at most {MAX_STOP_STRINGS} can be looked for")
    for stop in stops:
        if not isinstance(stop, str) or not stop:
            raise SettingError(f"{stop!r} is not a stop string; give non-empty strings")
        if len(stop) > MAX_STOP_CHARACTERS:
            raise SettingError(
                f"a stop string of {len(stop)} characters was given; the longest may have {MAX_STOP_CHARACTERS}"
            )
    return stops


def _find_borders(stop: str) -> list[int]:
    """For every prefix of the stop string, the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(stop)
    length = 0
    for index in range(1, len(stop)):
        while length and stop[index] != stop[length]:
            length = borders[length - 1]
        if stop[index] == stop[length]:
            length += 1
        borders[index] = length
    return borders

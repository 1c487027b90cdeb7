"""What is known of a kind of thoughts: the marks around them, and the words with which a model ends one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from unspool.errors import PluginError

LONGEST_MARK: Final = 256  # characters


@dataclass(frozen=True, kw_only=True)
class ThoughtEntry:
    """A kind of thoughts, found in chat templates by its marks."""

    table: ClassVar[str] = "unspool.thoughts.kinds:THOUGHTS"

    name: str
    begin: str  # the mark before a thought
    end: str  # the mark behind it
    found_by: tuple[str, ...] = ()  # texts of which a template of this kind has one; empty: either mark
    before_end: str = ""  # what stands before the mark behind a thought
    header: str = ""  # what stands between that mark and the answer
    direct: str = ""  # what begins an answer without a thought
    drops: tuple[str, ...] = ()  # marks around an answer, or in it, that are no part of its text
    repeats: bool = False  # whether thoughts may come again after text; else one may come first of all

    @property
    def closing(self) -> str:
        """The words with which a model ends a thought and begins its answer."""
        return self.before_end + self.end + self.header

    @property
    def marks(self) -> tuple[str, ...]:
        """All marks."""
        return (self.begin, self.end, *self.drops)

    def is_in(self, template: str) -> bool:
        """Whether a chat template writes thoughts of this kind."""
        return any(text in template for text in self.found_by or (self.begin, self.end))


def check_entry(entry: ThoughtEntry) -> None:
    """Raise a PluginError for a kind that can't be added."""
    for mark in entry.marks:
        if not isinstance(mark, str) or not 0 < len(mark.strip()) == len(mark) <= LONGEST_MARK:
            raise PluginError(
                f"the marks of the thoughts {entry.name!r} must be texts of 1 to {LONGEST_MARK} characters without "
                f"white space around them, and {mark!r:.80} is none"
            )
    for text in (entry.before_end, entry.header, entry.direct):
        if not isinstance(text, str) or len(text) > LONGEST_MARK:
            raise PluginError(
                f"the words of the thoughts {entry.name!r} are texts of at most {LONGEST_MARK} characters"
            )

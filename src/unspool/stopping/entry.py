"""What is known of a stop: its settings, the reason it gives, and how it is decided."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, Protocol

from unspool.config import GenerationConfig
from unspool.config.parameter import Parameter
from unspool.config.parameters import check_new
from unspool.errors import PluginError
from unspool.registry import Reference

OWN_REASON: Final = "criteria"  # what a caller's own criterion gives
OWN_RANK: Final = 2


@dataclass(frozen=True, kw_only=True)
class StopContext:
    """What stops are made from."""

    settings: GenerationConfig
    max_length: int  # columns, prompt included
    eos_token_ids: tuple[int, ...]
    tokenizer: Any = None

    def get(self, parameter: Parameter) -> Any:
        """The value of a setting; None if it is off."""
        value = getattr(self.settings, parameter.name)
        return None if value in parameter.off else value


def take_setting(stop: Any, value: Any, _: StopContext) -> Any:
    """The stop made from the setting that switches it on and nothing else."""
    return stop(value)


class TextStop(Protocol):
    """A stop that looks at a row's last tokens."""

    known_ends: Mapping[int, bool]  # tokens with which a row may end, or can't, as far as that is known

    @property
    def reach(self) -> int:
        """How many of a row's last tokens may have to be looked at."""
        ...

    def match(self, ids: Sequence[int]) -> str | None:
        """What the last of a row's tokens completes, if anything: the row ends then."""
        ...


@dataclass(frozen=True, kw_only=True)
class StopEntry:
    """A stop that settings switch on.

    A stop that has `find_ends`, `find_limit` or `is_over` is decided by a new token alone, which is quick, and one with
    `find_text` by a row's last tokens, on the host; any other is called with the whole history at every step.
    """

    table: ClassVar[str] = "unspool.stopping.order:STOPS"

    stop: Reference
    reason: str  # what a row's finish reason is then
    parameters: tuple[Parameter, ...]  # its settings; the first one switches it on
    make: Callable[[Any, Any, StopContext], Any] = take_setting  # its class, the first setting's value, the context
    is_on: Callable[[StopContext], bool] | None = None  # None: on if the first setting is
    rank: int = 1  # of several reasons that hold at once, the one of the lowest rank is given
    begins_with_run: bool = False  # made when the work begins, because it counts from then
    find_ends: Callable[[Any], Iterable[int]] | None = None  # the tokens that end a row
    find_limit: Callable[[Any], int] | None = None  # the columns at which every row ends
    is_over: Callable[[Any], bool] | None = None  # whether every row ends now
    find_text: Callable[[Any], TextStop] | None = None  # what ends a row by its own last tokens

    @property
    def settings(self) -> tuple[Parameter, ...]:
        """Its settings."""
        return self.parameters

    @property
    def reads_history(self) -> bool:
        """Whether it can't be decided by the new token alone."""
        quick = (self.find_ends, self.find_limit, self.is_over, self.find_text)
        return all(one is None for one in quick)


def check_entry(entry: StopEntry) -> None:
    """Raise a PluginError for a stop that can't be added."""
    if entry.reason == OWN_REASON:
        raise PluginError(f"the reason {OWN_REASON!r} is that of a caller's own criteria; give yours another name")
    check_new(f"stop {entry.reason!r}", entry.parameters)

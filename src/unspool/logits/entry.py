"""What is known of a processor: its settings, when it is on, where it stands and how it is made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from unspool.config.parameter import Parameter
from unspool.config.parameters import check_new
from unspool.errors import PluginError
from unspool.registry import Reference, check_maker, find_name

if TYPE_CHECKING:
    from unspool.logits.building import Build

Stage = Literal["control", "sampling", "last"]
STAGES: tuple[Stage, ...] = ("control", "sampling", "last")


def take_setting(processor: Any, build: Build) -> Any:
    """The processor made from the setting that switches it on and nothing else."""
    return processor(build.value)


@dataclass(frozen=True, kw_only=True)
class ProcessorEntry:
    """A processor that settings switch on."""

    table: ClassVar[str] = "unspool.logits.order:PROCESSORS"

    processor: Reference
    parameters: tuple[Parameter, ...] = ()  # its settings; the first one switches it on, the others say how
    argument: str = ""  # the argument of generate() that switches it on, if no setting does
    make: Callable[[Any, Build], Any] = take_setting  # the processor's class, and what it is built from
    stage: Stage = "control"  # whatever the strategy; when sampling; after all others
    also: tuple[str, ...] = ()  # settings of others that it reads
    needs_eos: bool = False  # without an end token there is nothing for it to do
    needs_read: bool = False  # without tokens that were read, a model's own settings do not switch it on
    unless: str | None = None  # another processor's setting: where that is on, it takes the place of this one
    after: str | None = None  # the setting of the processor that it comes after; None: the last of its stage

    @property
    def setting(self) -> str:
        """The setting (or argument) that switches it on."""
        return self.parameters[0].name if self.parameters else self.argument

    @property
    def off(self) -> tuple[Any, ...]:
        """The values of the setting, beside None, at which it is not there."""
        return self.parameters[0].off if self.parameters else ()

    @property
    def settings(self) -> tuple[Parameter, ...]:
        """Its settings, each with what must be on for it to be read."""
        switch = ("do_sample",) if self.stage == "sampling" else ()
        return tuple(
            parameter if parameter.needs else replace(parameter, needs=(self.setting,) if place else switch)
            for place, parameter in enumerate(self.parameters)
        )

    @property
    def reads(self) -> tuple[str, ...]:
        """The settings that it reads beside the one that switches it on."""
        return (*self.also, *(parameter.name for parameter in self.parameters[1:]))


def check_entry(entry: ProcessorEntry) -> None:
    """Raise a PluginError for a processor that can't be added."""
    check_new(f"processor {find_name(entry.processor)}", entry.parameters)
    if entry.stage not in STAGES:
        raise PluginError(f"the processor of {entry.setting!r} has the stage {entry.stage!r}; use one of {STAGES}")
    check_maker(f"processor of {entry.setting!r}", entry.make)

"""Settings that can't be combined: tables of pairs, each with the reason and what to use instead.

A table is about one method (or setting), and is read if that method is on. The tables of `conflicts` need a config
alone; those of `unspool.plan.tables` need a model, prompts or arguments of the call too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from unspool.config.named import NamedSettings
from unspool.config.parameters import PARAMETERS
from unspool.errors import SettingError, UnspoolError
from unspool.registry import resolve
from unspool.wording import Setting, Wording, word


@dataclass(frozen=True)
class ConfigFacts:
    """What the rules about a config alone look at."""

    settings: NamedSettings
    given: Mapping[str, Any] = field(default_factory=dict, kw_only=True)  # what else the messages name

    def is_on(self, name: str) -> bool:
        """Whether a setting has a value other than its default and those that turn it off."""
        value, parameter = getattr(self.settings, name), PARAMETERS[name]
        return value is not None and value is not False and value not in (parameter.default, *parameter.off)

    @property
    def num_beams(self) -> int:
        """Beams per prompt."""
        return self.settings.num_beams or 1

    @property
    def num_groups(self) -> int:
        """Groups of beams."""
        return self.settings.num_beam_groups or 1

    @property
    def configurable(self) -> tuple[str, ...]:
        """The kinds of cache that have settings of their own."""
        return tuple(name for name, kind in resolve("unspool.cache.kinds:KINDS").items() if kind.options)

    @property
    def is_constrained(self) -> bool:
        """Whether something must be written."""
        return self.settings.constraints is not None or self.settings.force_words_ids is not None

    @property
    def forced(self) -> Setting:
        """The setting that says what must be written."""
        return Setting("constraints" if self.settings.force_words_ids is None else "force_words_ids")

    def name_values(self) -> dict[str, Any]:
        """What messages may name in braces."""
        return {"settings": self.settings, "facts": self, **self.given}


FactsT = TypeVar("FactsT", bound=ConfigFacts)


@dataclass(frozen=True)
class Pair(Generic[FactsT]):
    """One thing that the method of a table can't be combined with."""

    beside: str | Callable[[FactsT], bool]  # a setting, or a condition
    why: str  # with what to use instead; a template (`unspool.wording.word`) that may name what `name_values` has
    error: type[UnspoolError] = SettingError
    message: str = ""  # the whole message, if it is not the table's

    def holds(self, facts: FactsT) -> bool:
        """Whether it is there: the setting is on, or the condition true."""
        return facts.is_on(self.beside) if isinstance(self.beside, str) else self.beside(facts)


@dataclass(frozen=True)
class Method(Generic[FactsT]):
    """A method (or a setting), and all that it can't be combined with."""

    is_on: str | Callable[[FactsT], bool]
    message: str  # a template; `{name}` and `{value}` are the pair's setting, `{why}` its reason
    pairs: tuple[Pair[FactsT], ...]


def check_methods(facts: FactsT, *methods: Method[FactsT]) -> None:
    """Raise for the first pair that can't be combined."""
    for method in methods:
        is_on = facts.is_on(method.is_on) if isinstance(method.is_on, str) else method.is_on(facts)
        found = next((pair for pair in method.pairs if pair.holds(facts)), None) if is_on else None
        if found is not None:
            raise found.error(make_message(method, found, facts))


def make_message(method: Method[FactsT], pair: Pair[FactsT], facts: FactsT) -> Wording:
    """The message of a pair that can't be combined."""
    known = facts.name_values()
    if isinstance(pair.beside, str):
        known |= {"name": Setting(pair.beside), "value": getattr(facts.settings, pair.beside)}
    return word(pair.message or method.message, why=word(pair.why, **known), **known)

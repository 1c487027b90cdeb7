"""What can't stand together: tables of pairs, each with the reason and what to use instead.

Every rule about two settings, or about a method beside a model, a cache or an argument, is a line of a table. A table
is about one method (or setting); it is read where that method is on. Numbers that must fit are checked elsewhere
(`lengths`, `memory`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from unspool.config.parameters import PARAMETERS
from unspool.errors import SettingError, UnspoolError
from unspool.registry import resolve

if TYPE_CHECKING:
    from unspool.config import GenerationConfig
    from unspool.plan.call import PromptShape
    from unspool.protocols import ModelInfo


@dataclass(frozen=True)
class Facts:
    """What the rules look at; a config alone has no model, prompts or origins yet."""

    settings: GenerationConfig
    info: ModelInfo = None  # type: ignore[assignment]  # rules of models are read where there is one
    shape: PromptShape = None  # type: ignore[assignment]
    asked: frozenset[str] = frozenset()  # settings that the caller set, not the model's file
    spoken: Mapping[str, str] = field(default_factory=dict)  # who set each, in words
    cache_kind: str = ""
    given: Mapping[str, Any] = field(default_factory=dict)  # what else the messages name

    def is_on(self, name: str) -> bool:
        """Whether a setting is set to something that is not its way to say "off"."""
        value, parameter = getattr(self.settings, name), PARAMETERS[name]
        return value is not None and value is not False and value not in (parameter.default, *parameter.off)

    def is_asked(self, name: str) -> bool:
        """Whether the caller switched it on."""
        return name in self.asked and self.is_on(name)

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


@dataclass(frozen=True)
class Pair:
    """One thing that the method of a table can't stand beside."""

    beside: str | Callable[[Facts], bool]  # a setting that is on, or what is so
    why: str  # with what to use instead; may name `{settings.…}`, `{info.…}`, `{shape.…}`
    error: type[UnspoolError] = SettingError
    told: str = ""  # the whole message, where it is not the table's

    def holds(self, facts: Facts) -> bool:
        """Whether it stands there."""
        return facts.is_on(self.beside) if isinstance(self.beside, str) else self.beside(facts)


@dataclass(frozen=True)
class Method:
    """A method (or a setting), and all that it can't stand beside."""

    is_on: str | Callable[[Facts], bool]
    told: str  # the message; `{name}` and `{value}` are the pair's setting, `{why}` its reason
    pairs: tuple[Pair, ...]


def check_methods(facts: Facts, *methods: Method) -> None:
    """Raise for the first pair that can't stand together."""
    for method in methods:
        is_on = facts.is_on(method.is_on) if isinstance(method.is_on, str) else method.is_on(facts)
        found = next((pair for pair in method.pairs if pair.holds(facts)), None) if is_on else None
        if found is not None:
            raise found.error(_say(method, found, facts))


def _say(method: Method, pair: Pair, facts: Facts) -> str:
    name = pair.beside if isinstance(pair.beside, str) else ""
    known: dict[str, Any] = {
        "settings": facts.settings,
        "info": facts.info,
        "shape": facts.shape,
        "spoken": facts.spoken,
        "cache_kind": facts.cache_kind,
        "facts": facts,
        "name": name,
        "value": getattr(facts.settings, name) if name else None,
        **facts.given,
    }
    return (pair.told or method.told).format(why=pair.why.format(**known), **known)

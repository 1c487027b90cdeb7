"""The strategies: which one the settings ask for, and what it can't stand beside.

A strategy that chooses one token per row and turn is an object with the methods of `decoding.strategies.base.Strategy`,
and an entry here; a plug-in registers the same entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from unspool.config import pairs
from unspool.config.modes import find_num_candidates
from unspool.config.pairs import ConfigFacts, check_methods
from unspool.config.parameter import Parameter
from unspool.config.parameters import check_new
from unspool.plan.pairs import CallMethod, CallPair, Facts
from unspool.plan.tables.drafts import DRAFTED
from unspool.registry import Table, check_maker

if TYPE_CHECKING:
    from unspool.config import GenerationConfig


@dataclass(frozen=True, kw_only=True)
class StrategyEntry:
    """A way to decode that settings switch on."""

    table: ClassVar[str] = "unspool.plan.strategies:STRATEGIES"

    name: str
    make: (
        str | Callable[[Any], Any]
    )  # from a `decoding.strategies.token_strategy.StrategyContext`; a string says where it is
    parameters: tuple[Parameter, ...] = ()  # its settings; the first one switches it on
    is_on: Callable[[GenerationConfig], bool] | None = None  # None: on if the first setting is
    chooses_tokens: bool = True  # one token per row and turn; otherwise `make` gives turns of its own
    may_sample: bool = False  # it can draw (`do_sample=True`) as well as choose
    not_with: tuple[CallMethod, ...] = ()  # tables of what else it can't stand beside

    @property
    def settings(self) -> tuple[Parameter, ...]:
        """Its settings."""
        return self.parameters

    def is_asked_for(self, settings: GenerationConfig) -> bool:
        """Whether settings ask for it."""
        return ConfigFacts(settings).is_on(self.parameters[0].name) if self.is_on is None else self.is_on(settings)


def _has_beams(settings: GenerationConfig) -> bool:
    return (settings.num_beams or 1) > 1


def _is_constrained(settings: GenerationConfig) -> bool:
    return settings.constraints is not None or settings.force_words_ids is not None


_MAKERS: Final = "unspool.decoding.choice"
_BUILT_IN: tuple[StrategyEntry, ...] = (
    StrategyEntry(
        name="constrained",
        make=f"{_MAKERS}:make_constrained_beams",
        is_on=lambda settings: _has_beams(settings) and _is_constrained(settings),
        chooses_tokens=False,
        may_sample=True,
    ),
    StrategyEntry(
        name="beam_groups",
        make=f"{_MAKERS}:make_group_beams",
        is_on=lambda settings: _has_beams(settings) and (settings.num_beam_groups or 1) > 1,
        chooses_tokens=False,
        may_sample=True,
    ),
    StrategyEntry(
        name="beams",
        make=f"{_MAKERS}:make_beam_search",
        is_on=_has_beams,
        chooses_tokens=False,
        may_sample=True,
    ),
    StrategyEntry(
        name="contrastive",
        make=f"{_MAKERS}:make_contrastive_search",
        is_on=lambda settings: bool(find_num_candidates(settings)),
    ),
    StrategyEntry(name="tokens", make=f"{_MAKERS}:make_sample", is_on=lambda _: True, may_sample=True),
)


def _check_entry(entry: StrategyEntry) -> None:
    part = f"strategy {entry.name!r}"
    check_new(part, entry.parameters)
    check_maker(part, entry.make)


STRATEGIES: Final = Table[StrategyEntry]("strategy", _BUILT_IN, lambda entry: entry.name, _check_entry)
"""Every strategy, by name; of the built-in ones the first that is on is taken."""


def find_strategy(settings: GenerationConfig) -> StrategyEntry:
    """The strategy that settings ask for: one that was registered, or else the first of the built-in ones."""
    own = STRATEGIES.built_in
    names = {entry.name for entry in own}
    others = [entry for entry in STRATEGIES.values() if entry.name not in names]
    return next(entry for entry in (*others, *own) if entry.is_asked_for(settings))


def check_strategy(facts: Facts) -> None:
    """Raise for what the strategy that was asked for can't stand beside; the built-in ones have tables of their own."""
    entry = find_strategy(facts.settings)
    if not entry.parameters:
        return
    setting = entry.parameters[0].name
    draws = () if entry.may_sample else (CallPair("do_sample", "which draws; leave {do_sample} out"),)
    others = [one for one in STRATEGIES.values() if one.parameters and one is not entry]
    check_methods(
        facts,
        CallMethod(
            setting,
            f"{{{setting}}} asks for the strategy {entry.name!r}, and {{name:is {{value!r}}}} for another way to "
            "choose tokens, {why}",
            (
                *draws,
                CallPair("num_beams", "which follows several texts at once; use {num_beams:=1}"),
                CallPair("penalty_alpha", "contrastive search; leave {penalty_alpha} out"),
                *(
                    CallPair(one.parameters[0].name, f"the strategy {one.name!r}; leave one of them out")
                    for one in others
                ),
            ),
        ),
        *entry.not_with,
    )


def refuse_drafts() -> pairs.Method[ConfigFacts]:
    """What a drafter can't stand beside among the strategies that were registered: drafts are checked against greedy
    search and sampling."""
    own = [entry.parameters[0].name for entry in STRATEGIES.values() if entry.parameters]
    why = "drafts are checked against greedy search and sampling; leave one of them out"
    return pairs.Method(lambda _: True, DRAFTED, tuple(pairs.Pair(name, why) for name in own))

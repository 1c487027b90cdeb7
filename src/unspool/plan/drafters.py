"""The drafters: which one the settings name, and how many tokens it guesses.

A drafter is an object with the methods of `decoding.speculative.drafters.base.Drafter`, and an entry here; a plug-in
registers the same entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from unspool.config.parameter import Parameter, make_count
from unspool.config.parameters import check_new
from unspool.registry import Table, check_maker

if TYPE_CHECKING:
    from unspool.config import GenerationConfig

FORCED_LENGTH: Final = 32  # tokens of a text that a grammar forces
DEFAULT_LENGTH: Final = 10  # tokens of a plug-in's draft, unless its entry says otherwise


@dataclass(frozen=True, kw_only=True)
class DrafterEntry:
    """A drafter that settings, or an argument of generate(), switch on."""

    table: ClassVar[str] = "unspool.plan.drafters:DRAFTERS"

    name: str
    make: str | Callable[[Any], Any]  # from a `decoding.speculative.making.DrafterContext`; a string says where it is
    parameters: tuple[Parameter, ...] = ()  # its settings; the first one switches it on
    argument: str = ""  # the argument of generate() that switches it on, if no setting does
    count: Callable[[GenerationConfig], int] = lambda _: DEFAULT_LENGTH  # tokens of a draft

    @property
    def settings(self) -> tuple[Parameter, ...]:
        """Its settings."""
        return self.parameters

    @property
    def setting(self) -> str:
        """The setting (or argument) that switches it on."""
        return self.parameters[0].name if self.parameters else self.argument


_MAKERS: Final = "unspool.decoding.speculative.making"
_BUILT_IN: tuple[DrafterEntry, ...] = (
    DrafterEntry(name="draft_model", make=f"{_MAKERS}:make_draft_model", argument="assistant_model"),
    DrafterEntry(
        name="prompt_lookup",
        make=f"{_MAKERS}:make_prompt_lookup",
        parameters=(
            make_count(
                "prompt_lookup_num_tokens", None, "assistance", "Tokens drafted from the prompt itself.", at_least=1
            ),
            make_count(
                "max_matching_ngram_size", None, "assistance", "Longest n-gram looked up in the prompt.", at_least=1
            ),
        ),
    ),
    DrafterEntry(
        name="early_exit",
        make=f"{_MAKERS}:make_early_exit",
        parameters=(
            make_count(
                "assistant_early_exit",
                None,
                "assistance",
                "Layer after which the model drafts for itself.",
                at_least=1,
            ),
        ),
    ),
    DrafterEntry(
        name="grammar",
        make=f"{_MAKERS}:make_forced_text",
        parameters=(
            Parameter(
                "drafter",
                None,
                "choice",
                "assistance",
                "'grammar' drafts what a structured text must go on with; false drafts nothing by itself.",
                choices=("grammar", False),
                off=(False,),
                is_ours=True,
            ),
        ),
        count=lambda _: FORCED_LENGTH,
    ),
)


def _check_entry(entry: DrafterEntry) -> None:
    part = f"drafter {entry.name!r}"
    check_new(part, entry.parameters)
    check_maker(part, entry.make)


DRAFTERS: Final = Table[DrafterEntry]("drafter", _BUILT_IN, lambda entry: entry.name, _check_entry)
"""Every drafter, by name."""

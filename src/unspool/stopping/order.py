"""The stops: each with its settings, its reason and how it is made. A new stop is its class and an entry here."""

from __future__ import annotations

from typing import Any, Final

from unspool.config.parameter import Parameter, make_count, make_other, make_token
from unspool.registry import Table, resolve
from unspool.stopping.entry import OWN_RANK, StopContext, StopEntry, check_entry

_HERE: Final = "unspool.stopping"

_BUILT_IN: tuple[StopEntry, ...] = (
    StopEntry(
        stop=f"{_HERE}.length:MaxLengthCriteria",
        reason="length",
        parameters=(
            make_count("max_length", 20, "length", "Longest sequence, prompt included."),
            make_count("max_new_tokens", None, "length", "Most tokens to write, the prompt not counted.", at_least=1),
        ),
        make=lambda kind, _, context: kind(context.max_length),
        is_on=lambda _: True,  # every call has an end
        rank=OWN_RANK + 1,  # what the text says comes before what a limit says
        find_limit=lambda stop: stop.max_length,
    ),
    StopEntry(
        stop=f"{_HERE}.strings:StopStringCriteria",
        reason="stop_string",
        parameters=(make_other("stop_strings", "texts", "length", "Text, or several, at which to stop."),),
        make=lambda kind, value, context: kind(context.tokenizer, value),
        find_text=lambda stop: stop,
    ),
    StopEntry(
        stop=f"{_HERE}.repeats:RepeatCriteria",
        reason="repetition",
        parameters=(
            make_count(
                "stop_on_repeats",
                None,
                "length",
                "Stop when the last so many tokens are the same few over and over, three times or more; 0 is off.",
                off=(0,),
                is_ours=True,
            ),
        ),
        find_text=lambda stop: stop,
    ),
    StopEntry(
        stop=f"{_HERE}.eos:EosTokenCriteria",
        reason="eos",
        parameters=(make_token("eos_token_id", "Token(s) that end a sequence.", kind="ids"),),
        make=lambda kind, _, context: kind(list(context.eos_token_ids)),
        is_on=lambda context: bool(context.eos_token_ids),
        rank=0,
        find_ends=lambda stop: stop.eos_token_id.tolist(),
    ),
    StopEntry(
        stop=f"{_HERE}.time:MaxTimeCriteria",
        reason="time",
        parameters=(Parameter("max_time", None, "number", "length", "Seconds after which to stop.", at_least=0),),
        rank=OWN_RANK + 2,
        begins_with_run=True,
        is_over=lambda stop: stop.is_over(),
    ),
)

STOPS: Final = Table[StopEntry]("stop", _BUILT_IN, lambda entry: entry.reason, check_entry)
"""Every stop that a setting switches on, by the reason it gives."""


def find_entry(criterion: Any) -> StopEntry | None:
    """The entry of a criterion's class, or of the class it is derived from; None for a caller's own."""
    return next((entry for entry in STOPS.values() if isinstance(criterion, resolve(entry.stop))), None)


def build_stops(context: StopContext, *, begins_with_run: bool = False) -> list[Any]:
    """The stops that a call's settings switch on: those made before it, or those made when it begins."""
    made = []
    for entry in STOPS.values():
        value = context.get(entry.parameters[0])
        is_on = value is not None if entry.is_on is None else entry.is_on(context)
        if is_on and entry.begins_with_run == begins_with_run:
            made.append(entry.make(resolve(entry.stop), value, context))
    return made

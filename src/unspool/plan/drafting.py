"""What the settings say of drafting: which drafter, how many tokens, and what does not go with it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Literal

from unspool.config.generation import GenerationConfig
from unspool.config.pairs import ConfigFacts, check_methods
from unspool.config.parameters import is_on
from unspool.config.structures import find_structure
from unspool.errors import SettingError, UnsupportedError
from unspool.plan.drafters import DRAFTERS
from unspool.plan.strategies import refuse_drafts
from unspool.plan.tables.drafts import DRAFTS
from unspool.wording import Setting, about, word

Schedule = Literal["constant", "heuristic", "heuristic_transient"]

# A draft model's tokens beside the model's: the same; the same under other numbers; others.
Relation = Literal["same", "renumbered", "other"]

MOST_DRAFTED = 1024  # tokens a draft: their logits are held for the whole vocabulary
LONGEST_NGRAM = 32  # each size has an index of its own
USUAL_NGRAM = 2
LONGEST_LOOKBEHIND = 1024  # tokens that are encoded again at every draft
USUAL_LOOKBEHIND = 10
AUTO_LOOKUP_TOKENS = 16  # what the policy may choose up to where no number was named
AUTO_NGRAM = 3

_OF_MODELS = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
_OF_LOOKUP = ("max_matching_ngram_size",)
_OF_TOKENIZERS = ("assistant_lookbehind", "target_lookbehind")


@dataclass(frozen=True)
class Drafting:
    """A call's drafter, settled."""

    kind: str  # the name of its entry
    num_tokens: int
    schedule: Schedule = "constant"
    confidence: float = 0.0  # a model's draft ends after a token less likely than this
    max_ngram_size: int = USUAL_NGRAM
    num_looked_up: int | None = None  # a draft model is asked where lookup finds nothing; None: there is no lookup
    exit_layer: int | None = None
    relation: Relation = "same"
    assistant_lookbehind: int = USUAL_LOOKBEHIND  # the draft model's tokens that are encoded again with its guesses
    target_lookbehind: int = USUAL_LOOKBEHIND  # the model's that are encoded again with its new ones
    is_auto: bool = False
    is_suggested: bool = False  # it was not asked for: it gives way to whatever it does not go with


def read_drafting(
    settings: GenerationConfig,
    asked: Collection[str],
    *,
    has_assistant: bool,
    num_layers: int,
    can: Collection[str],
    relation: Relation = "same",
) -> Drafting | None:
    """The drafter that the settings ask for, or None; raises for what can't be. `asked` are the caller's own."""
    named = _find_named(settings, asked, has_assistant)
    looks_up = named == ["draft_model", "prompt_lookup"]
    if looks_up:  # first the text, then the model
        named.pop()
    if not named:
        _refuse_alone(settings, asked)
        return None
    if len(named) > 1:
        first, second = map(_name, named[:2])
        raise SettingError(word("{first} and {second} name two drafters; give one of them", first=first, second=second))
    kind = named[0]
    try:
        check_methods(ConfigFacts(settings, given={"source": _name(kind)}), DRAFTS, refuse_drafts())
    except SettingError:
        if has_assistant or _is_asked(kind, asked):
            raise
        return None  # what a model's file or "auto" suggests gives way to what was asked for
    _refuse_unread(kind, settings, asked, looks_up=looks_up)
    _refuse_lookbehind(settings, asked, relation)
    drafting = _settle(kind, settings, num_layers, can, relation)
    if looks_up:
        lookup = _settle("prompt_lookup", settings, num_layers, can, relation)
        drafting = replace(drafting, num_looked_up=lookup.num_tokens, max_ngram_size=lookup.max_ngram_size)
    return drafting


def _find_named(settings: GenerationConfig, asked: Collection[str], has_assistant: bool) -> list[str]:
    named = [
        name
        for name, entry in DRAFTERS.items()
        if (is_on(settings, entry.setting) if entry.parameters else has_assistant)
    ]
    if len(named) > 1:  # what the caller names stands before what a model's file suggests
        own = [kind for kind in named if not DRAFTERS[kind].parameters or DRAFTERS[kind].setting in asked]
        named = own or named[:1]
    if not named and settings.speculate == "auto":
        named.append("prompt_lookup")
    if not named and settings.drafter is None and find_structure(settings):
        named.append("grammar")
    return named


def _name(kind: str) -> Setting:
    return Setting(DRAFTERS[kind].setting)


def _is_asked(kind: str, asked: Collection[str]) -> bool:
    return DRAFTERS[kind].setting in asked


def _refuse_alone(settings: GenerationConfig, asked: Collection[str]) -> None:
    for names, needed in (
        (_OF_MODELS, "a draft model: pass assistant_model, or {assistant_early_exit}"),
        (_OF_LOOKUP, "prompt lookup: set {prompt_lookup_num_tokens}, or {speculate:='auto'}"),
        (_OF_TOKENIZERS, "a draft model with another tokenizer: pass assistant_model"),
    ):
        for name in names:
            value = getattr(settings, name)
            if name in asked and value is not None:
                raise SettingError(
                    word("{name:is {value!r}} steers {needed}", name=Setting(name), value=value, needed=word(needed))
                )


def _refuse_unread(kind: str, settings: GenerationConfig, asked: Collection[str], *, looks_up: bool) -> None:
    reads_model = kind in ("draft_model", "early_exit")
    unread: tuple[str, ...] = (
        _OF_LOOKUP if reads_model else _OF_MODELS if kind == "prompt_lookup" else (*_OF_MODELS, *_OF_LOOKUP)
    )
    unread = () if looks_up else unread
    instead = word("its drafter is a model" if reads_model else "{source} says how many", source=_name(kind))
    if settings.speculate == "auto" and reads_model:
        unread = (*unread, "num_assistant_tokens_schedule")
        instead = word("{speculate:is 'auto'} chooses the length itself")
    for name in unread:
        if name in asked and getattr(settings, name) is not None:
            raise SettingError(
                word(
                    "{name} is not read beside {source}: {instead}; leave it out",
                    name=Setting(name),
                    source=_name(kind),
                    instead=instead,
                )
            )


def _refuse_lookbehind(settings: GenerationConfig, asked: Collection[str], relation: Relation) -> None:
    """The look-behinds are read if guesses go through text."""
    if relation == "other" and not settings.do_sample:
        return
    why = "they are drawn from the tokens that both have" if relation == "other" else "both have the same tokens"
    for name in _OF_TOKENIZERS:
        if name in asked and getattr(settings, name) is not None:
            raise SettingError(
                about(
                    Setting(name, repr(getattr(settings, name))),
                    f"steers guesses that are encoded again for another tokenizer, and here {why}; leave it out",
                )
            )


def _settle(
    kind: str, settings: GenerationConfig, num_layers: int, can: Collection[str], relation: Relation
) -> Drafting:
    is_auto = settings.speculate == "auto"
    if kind == "prompt_lookup":
        given, size = settings.prompt_lookup_num_tokens, settings.max_matching_ngram_size
        num_tokens = AUTO_LOOKUP_TOKENS if given is None else given
        size = (AUTO_NGRAM if given is None else USUAL_NGRAM) if size is None else size
        _check_most("prompt_lookup_num_tokens", num_tokens, MOST_DRAFTED)
        _check_most("max_matching_ngram_size", size, LONGEST_NGRAM)
        is_suggested = is_auto and given is None
        return Drafting(kind, num_tokens, max_ngram_size=size, is_auto=is_auto, is_suggested=is_suggested)
    if kind not in ("draft_model", "early_exit"):  # a grammar's, and what a plug-in added
        num_tokens = DRAFTERS[kind].count(settings)
        _check_most(DRAFTERS[kind].setting, num_tokens, MOST_DRAFTED)
        is_suggested = kind == "grammar" and settings.drafter is None
        return Drafting(kind, num_tokens, is_auto=is_auto, is_suggested=is_suggested)
    num_tokens = 20 if settings.num_assistant_tokens is None else settings.num_assistant_tokens
    _check_most("num_assistant_tokens", num_tokens, MOST_DRAFTED)
    threshold = settings.assistant_confidence_threshold or 0.0
    if not 0.0 <= threshold <= 1.0:
        raise SettingError(
            about(
                Setting("assistant_confidence_threshold", str(threshold)),
                "is a probability: give a number from 0 to 1",
            )
        )
    schedule: Schedule = settings.num_assistant_tokens_schedule or "constant"
    layer = settings.assistant_early_exit if kind == "early_exit" else None
    if layer is not None:
        if "early_exit" not in can:
            raise UnsupportedError(
                word(
                    "{assistant_early_exit} was asked for, and this model can't stop after its first layers; use "
                    "{prompt_lookup_num_tokens}, or an assistant_model"
                )
            )
        if not 1 <= layer < num_layers:
            raise SettingError(
                about(
                    Setting("assistant_early_exit", str(layer)),
                    f"is to name one of the model's layers before its last: it has {num_layers}, so give 1 to "
                    f"{num_layers - 1}",
                )
            )
    return Drafting(
        kind,
        num_tokens,
        schedule,
        threshold,
        exit_layer=layer,
        relation=relation,
        assistant_lookbehind=_read_lookbehind("assistant_lookbehind", settings.assistant_lookbehind),
        target_lookbehind=_read_lookbehind("target_lookbehind", settings.target_lookbehind),
        is_auto=is_auto,
    )


def _read_lookbehind(name: str, value: int | None) -> int:
    lookbehind = USUAL_LOOKBEHIND if value is None else value
    _check_most(name, lookbehind, LONGEST_LOOKBEHIND)
    return lookbehind


def _check_most(name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise SettingError(about(Setting(name, str(value)), f"is out of bounds; give 1 to {most}"))

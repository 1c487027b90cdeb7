"""What the settings say of drafting: which drafter, how many tokens, and what does not go with it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from unspool.config.generation import GenerationConfig
from unspool.errors import SettingError, UnsupportedError

Schedule = Literal["constant", "heuristic", "heuristic_transient"]
DrafterKind = Literal["prompt_lookup", "draft_model", "early_exit"]

MOST_DRAFTED = 1024  # tokens a draft: their logits are held for the whole vocabulary
LONGEST_NGRAM = 32  # each size has an index of its own
USUAL_NGRAM = 2
AUTO_LOOKUP_TOKENS = 16  # what the policy may choose up to where nobody named a number
AUTO_NGRAM = 3

_OF_MODELS = ("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold")
_OF_LOOKUP = ("max_matching_ngram_size",)
_OF_TOKENIZERS = ("assistant_lookbehind", "target_lookbehind")
_DRAFTERS: dict[DrafterKind, str] = {
    "prompt_lookup": "`prompt_lookup_num_tokens`",
    "draft_model": "`assistant_model`",
    "early_exit": "`assistant_early_exit`",
}
# What decides tokens in another way than one at a time from one distribution; each with what to do instead.
_NOT_WITH_DRAFTS: tuple[tuple[str, tuple[Any, ...], str], ...] = (
    ("num_beams", (None, 1), "beam search follows several texts at once; use num_beams=1"),
    ("num_beam_groups", (None, 1), "beam search follows several texts at once; use num_beams=1"),
    ("constraints", (None,), "constraints are kept by beam search; use num_beams without a drafter"),
    ("force_words_ids", (None,), "forced words are kept by beam search; use num_beams without a drafter"),
    ("penalty_alpha", (None, 0, 0.0), "contrastive search chooses by hidden states; leave penalty_alpha out"),
    ("dola_layers", (None,), "DoLa contrasts layers at every token; leave dola_layers out"),
    ("guidance_scale", (None, 1, 1.0), "guidance reads a second prompt at every token; leave guidance_scale out"),
    ("mirostat_tau", (None,), "Mirostat's cut follows every token drawn; use top_p or min_p"),
    ("use_cache", (None, True), "drafts are checked against kept keys and values; leave use_cache on"),
    ("output_hidden_states", (None, False), "a check reads tokens that may be refused; decode without a drafter"),
    ("output_attentions", (None, False), "a check reads tokens that may be refused; decode without a drafter"),
)


@dataclass(frozen=True)
class Drafting:
    """A call's drafter, settled."""

    kind: DrafterKind
    num_tokens: int
    schedule: Schedule = "constant"
    confidence: float = 0.0  # a model's draft ends after a token less likely than this
    max_ngram_size: int = USUAL_NGRAM
    exit_layer: int | None = None
    is_auto: bool = False


def read_drafting(
    settings: GenerationConfig, asked: Collection[str], *, has_assistant: bool, num_layers: int, can: Collection[str]
) -> Drafting | None:
    """The drafter that the settings ask for, or None; raises for what can't be. `asked` are the caller's own."""
    for name in _OF_TOKENIZERS:
        if name in asked and getattr(settings, name) is not None:
            raise UnsupportedError(
                f"`{name}` steers a drafter with another tokenizer, which this version of unspool does not have yet; "
                "use an assistant_model with the model's own tokenizer"
            )
    named = _find_named(settings, asked, has_assistant)
    if not named:
        _refuse_alone(settings, asked)
        return None
    if len(named) > 1:
        raise SettingError(f"{_DRAFTERS[named[0]]} and {_DRAFTERS[named[1]]} name two drafters; give one of them")
    kind = named[0]
    for name, off, why in _NOT_WITH_DRAFTS:
        value = getattr(settings, name)
        if value not in off:
            if not has_assistant and not _is_asked(kind, asked):
                return None  # what a model's file suggests gives way to what was asked for
            what = _DRAFTERS[kind] if has_assistant or _is_asked(kind, asked) else "`speculate`"
            raise SettingError(f"`{name}`={value!r} does not go with a drafter ({what}): {why}")
    _refuse_unread(kind, settings, asked)
    return _settle(kind, settings, num_layers, can)


def _find_named(settings: GenerationConfig, asked: Collection[str], has_assistant: bool) -> list[DrafterKind]:
    named: list[DrafterKind] = []
    if has_assistant:
        named.append("draft_model")
    if settings.prompt_lookup_num_tokens is not None:
        named.append("prompt_lookup")
    if settings.assistant_early_exit is not None:
        named.append("early_exit")
    if len(named) > 1:  # what the caller names stands before what a model's file suggests
        own = [kind for kind in named if kind == "draft_model" or _SETTING_OF[kind] in asked]
        named = own or named[:1]
    if not named and settings.speculate == "auto":
        named.append("prompt_lookup")
    return named


_SETTING_OF: dict[DrafterKind, str] = {
    "prompt_lookup": "prompt_lookup_num_tokens",
    "early_exit": "assistant_early_exit",
    "draft_model": "assistant_model",
}


def _is_asked(kind: DrafterKind, asked: Collection[str]) -> bool:
    return _SETTING_OF[kind] in asked or "speculate" in asked


def _refuse_alone(settings: GenerationConfig, asked: Collection[str]) -> None:
    for names, needed in (
        (_OF_MODELS, "a draft model: pass assistant_model, or assistant_early_exit"),
        (_OF_LOOKUP, "prompt lookup: set prompt_lookup_num_tokens, or speculate='auto'"),
    ):
        for name in names:
            if name in asked and getattr(settings, name) is not None:
                raise SettingError(f"`{name}`={getattr(settings, name)!r} steers {needed}")


def _refuse_unread(kind: DrafterKind, settings: GenerationConfig, asked: Collection[str]) -> None:
    unread = _OF_MODELS if kind == "prompt_lookup" else _OF_LOOKUP
    instead = "prompt_lookup_num_tokens says how many" if kind == "prompt_lookup" else "its drafter is a model"
    if settings.speculate == "auto" and kind != "prompt_lookup":
        unread = (*unread, "num_assistant_tokens_schedule")
        instead = "speculate='auto' chooses the length itself"
    for name in unread:
        if name in asked and getattr(settings, name) is not None:
            raise SettingError(f"`{name}` is not read beside {_DRAFTERS[kind]}: {instead}; leave it out")


def _settle(kind: DrafterKind, settings: GenerationConfig, num_layers: int, can: Collection[str]) -> Drafting:
    is_auto = settings.speculate == "auto"
    if kind == "prompt_lookup":
        given, size = settings.prompt_lookup_num_tokens, settings.max_matching_ngram_size
        num_tokens = AUTO_LOOKUP_TOKENS if given is None else given
        size = (AUTO_NGRAM if given is None else USUAL_NGRAM) if size is None else size
        _check_most("prompt_lookup_num_tokens", num_tokens, MOST_DRAFTED)
        _check_most("max_matching_ngram_size", size, LONGEST_NGRAM)
        return Drafting(kind, num_tokens, max_ngram_size=size, is_auto=is_auto)
    num_tokens = 20 if settings.num_assistant_tokens is None else settings.num_assistant_tokens
    _check_most("num_assistant_tokens", num_tokens, MOST_DRAFTED)
    threshold = settings.assistant_confidence_threshold or 0.0
    if not 0.0 <= threshold <= 1.0:
        raise SettingError(f"`assistant_confidence_threshold`={threshold} is a probability: give a number from 0 to 1")
    schedule: Schedule = settings.num_assistant_tokens_schedule or "constant"
    layer = settings.assistant_early_exit if kind == "early_exit" else None
    if layer is not None:
        if "early_exit" not in can:
            raise UnsupportedError(
                "`assistant_early_exit` was asked for, and this model can't stop after its first layers; "
                "use prompt_lookup_num_tokens, or an assistant_model"
            )
        if not 1 <= layer < num_layers:
            raise SettingError(
                f"`assistant_early_exit`={layer} is to name one of the model's layers before its last: it has "
                f"{num_layers}, so give 1 to {num_layers - 1}"
            )
    return Drafting(kind, num_tokens, schedule, threshold, exit_layer=layer, is_auto=is_auto)


def _check_most(name: str, value: int, most: int) -> None:
    if not 1 <= value <= most:
        raise SettingError(f"`{name}`={value} is out of bounds; give 1 to {most}")

"""What makes a call faster: a drafter, and steps that are compiled."""

from __future__ import annotations

from collections.abc import Mapping

from unspool.cache.kinds import KINDS
from unspool.config import GenerationConfig
from unspool.config.compiling import Compiling, read_compiling
from unspool.config.pairs import check_methods
from unspool.errors import SettingError
from unspool.plan.drafting import Drafting, Relation, read_drafting
from unspool.plan.origins import SPOKEN, Origin, find_asked
from unspool.plan.pairs import Facts
from unspool.plan.prompt_shape import PromptShape
from unspool.plan.tables.drafts import ASSISTANT, DRAFTED_ROWS, DRAFTED_SINGLY, DRAFTED_STATES, DRAFTED_UNEVENLY
from unspool.plan.tables.models import COMPILABLE, COMPILED
from unspool.protocols import ModelInfo
from unspool.wording import Setting


def decide_drafting(
    settings: GenerationConfig,
    origins: Mapping[str, Origin],
    info: ModelInfo,
    shape: PromptShape,
    assistant: ModelInfo | None,
    relation: Relation,
) -> Drafting | None:
    drafting = read_drafting(
        settings,
        find_asked(origins),
        has_assistant=assistant is not None,
        num_layers=info.num_layers,
        can=info.can,
        relation=relation,
    )
    if drafting is None:
        return None
    why_even = info.why_even or ("" if assistant is None else assistant.why_even)
    facts = Facts(settings, info, shape, given={"assistant": assistant, "relation": relation, "why_even": why_even})
    try:
        check_methods(facts, DRAFTED_SINGLY, DRAFTED_UNEVENLY, DRAFTED_ROWS, *DRAFTED_STATES)
    except SettingError:
        if drafting.is_suggested:
            return None
        raise
    check_methods(facts, ASSISTANT)
    return drafting


def check_assistant_room(assistant: ModelInfo, shape: PromptShape, relation: Relation) -> None:
    """Raise if the prompt is too long for a draft model."""
    room, needed = assistant.max_context, shape.longest
    if relation != "other" and room is not None and needed >= room:  # in other tokens, the prompt has other lengths
        raise SettingError(
            f"the prompt has {needed} tokens and the assistant_model's context ends at {room}; "
            "use one with a longer context"
        )


def decide_compiling(
    settings: GenerationConfig, origins: Mapping[str, Origin], info: ModelInfo, shape: PromptShape, cache_kind: str
) -> Compiling | None:
    """Whether steps are compiled; a `compile_config` that no step could follow is refused."""
    compiling = read_compiling(settings, find_asked(origins))
    if compiling is None:
        return None
    name = "compile_config" if compiling.is_forced else "compile"
    is_plain = shape.cache_is_plain if shape.has_cache else KINDS[cache_kind].is_plain
    facts = Facts(
        settings, info, shape, given={"wish": Setting(name), "origin": SPOKEN[origins[name]], "is_plain": is_plain}
    )
    check_methods(facts, COMPILABLE, *((COMPILED,) if compiling.is_forced else ()))
    return compiling

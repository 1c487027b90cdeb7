"""From a call's merged settings to its plan: every conflict is found before the first forward pass."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any

from unspool.beams.rules import check_constraints
from unspool.cache.kinds import KINDS
from unspool.config import GenerationConfig
from unspool.config.layers import find_candidate_layers
from unspool.config.pairs import check_methods
from unspool.errors import SettingError
from unspool.plan.call import Plan
from unspool.plan.contrastive import check_candidates
from unspool.plan.drafting import Relation
from unspool.plan.lengths import check_reachable, decide_length
from unspool.plan.memo import Memo, describe_values
from unspool.plan.memory import check_cache, name_cache
from unspool.plan.origins import SPOKEN, Origin, find_asked
from unspool.plan.pairs import Facts
from unspool.plan.prompt_shape import PromptShape
from unspool.plan.refusals import check_rows, refuse_unfollowed, refuse_unused
from unspool.plan.speed import check_assistant_room, decide_compiling, decide_drafting
from unspool.plan.strategies import check_strategy, find_strategy
from unspool.plan.tables.methods import (
    BEAMS,
    BEAMS_ALONE,
    CONTRASTIVE,
    CONTRASTIVE_ASKED,
    DOLA,
    GUIDANCE,
    GUMBEL,
    LOW_MEMORY,
    STRICT,
)
from unspool.plan.tables.models import GIVEN_CACHE, LEGACY_CACHE, OF_MODEL, OF_WHOLE_PROMPTS
from unspool.protocols import ModelInfo
from unspool.wording import Setting, about

_known: Memo[Plan] = Memo()


def settle(
    settings: GenerationConfig,
    origins: Mapping[str, Origin],
    info: ModelInfo,
    shape: PromptShape,
    assistant: ModelInfo | None = None,
    relation: Relation = "same",
) -> Plan:
    """Decide a call's merged settings for a model, its drafter and prompts, or raise the error that names what can't
    be.

    What does not depend on the prompts' lengths is decided once for all calls with equal settings.
    """
    kind = shape.without_lengths()
    values = describe_values(vars(settings), origins) if assistant is None else None
    key = None if values is None else (values, info, kind)
    plan = _known.find(key)
    if plan is None:
        plan = _settle_kind(settings, origins, info, kind, assistant, relation)
        if key is not None:
            _known.keep(key, plan)
    if plan.drafting is not None and assistant is not None:
        check_assistant_room(assistant, shape, relation)
    return settle_lengths(replace(plan, settings=settings, origins=origins), info, shape)


def settle_lengths(plan: Plan, info: ModelInfo, shape: PromptShape) -> Plan:
    """The plan of a call that differs from another's in the lengths of its prompts alone."""
    settings, origins = plan.settings, plan.origins
    is_endless = shape.is_endless if shape.has_cache else KINDS[plan.cache_kind].is_endless
    max_length = decide_length(settings, origins, info, shape, is_endless)
    num_new = max_length - shape.width
    check_reachable(settings, origins)
    check_constraints(settings, vocab_size=info.vocab_size, end_ids=plan.eos_token_ids, max_new_tokens=num_new)
    made = copy(plan)
    vars(made).update(
        max_length=max_length,
        prompt_width=shape.width,
        hidden_width=shape.hidden,
        cache_config=check_cache(plan.cache_kind, settings, shape, num_new),
    )
    return made


def _settle_kind(
    settings: GenerationConfig,
    origins: Mapping[str, Origin],
    info: ModelInfo,
    shape: PromptShape,
    assistant: ModelInfo | None,
    relation: Relation,
) -> Plan:
    """The plan of a call but for its lengths, which `shape` does not have."""
    refuse_unfollowed(settings, origins)
    refuse_unused(settings, origins)
    asked = find_asked(origins)
    facts = Facts(settings, info, shape, asked, {name: SPOKEN[origin] for name, origin in origins.items()})
    check_methods(facts, *BEAMS_ALONE, LOW_MEMORY, *OF_MODEL, DOLA, GUIDANCE, STRICT, BEAMS, CONTRASTIVE_ASKED)
    check_candidates(settings, asked, vocab_size=info.vocab_size, num_rows=shape.num_rows)
    check_methods(facts, CONTRASTIVE)
    check_strategy(facts)
    check_rows(settings, origins, shape)
    check_methods(facts, GUMBEL)
    eos = as_token_ids(settings.eos_token_id, "eos_token_id", info)
    cache_kind = name_cache(settings, origins, info, shape)
    check_methods(replace(facts, cache_kind=cache_kind), LEGACY_CACHE, GIVEN_CACHE, OF_WHOLE_PROMPTS)
    return Plan(
        settings=settings,
        origins=origins,
        asked=asked,
        strategy=find_strategy(settings).name,
        do_sample=bool(settings.do_sample),
        max_length=0,
        eos_token_ids=eos,
        pad_token_id=_decide_padding(settings, origins, eos, info),
        num_beams=settings.num_beams or 1,
        num_return_sequences=settings.num_return_sequences or 1,
        seeds=_decide_seeds(settings),
        cache_kind=cache_kind,
        prompt_width=0,
        dola_layers=_decide_layers(settings, info),
        drafting=decide_drafting(settings, origins, info, shape, assistant, relation),
        compiling=decide_compiling(settings, origins, info, shape, cache_kind),
    )


def _decide_layers(settings: GenerationConfig, info: ModelInfo) -> tuple[int, ...]:
    if settings.dola_layers is None:
        return ()
    return find_candidate_layers(settings.dola_layers, info.num_layers, is_tied=info.has_tied_embeddings)


def as_token_ids(value: Any, name: str, info: ModelInfo) -> tuple[int, ...]:
    """One token id, a list or a tensor of them, as a tuple; checked against the vocabulary."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    ids = () if value is None else (value,) if isinstance(value, int) else tuple(value)
    for token in ids:
        # Negative ids are a known way to say "none"; they match nothing.
        if token >= info.vocab_size:
            raise SettingError(
                about(
                    Setting(name, str(token)),
                    f"is outside the model's vocabulary of {info.vocab_size} tokens; use ids below it",
                )
            )
    return ids


def find_marking_pad(settings: GenerationConfig) -> int | None:
    """The pad token, where it shows which tokens are padding: one that also ends a text does not."""
    pad, ends = settings.pad_token_id, settings.eos_token_id
    if hasattr(ends, "tolist"):
        ends = ends.tolist()
    is_end = pad in ends if isinstance(ends, list | tuple) else pad == ends
    return None if is_end else pad


def _decide_padding(
    settings: GenerationConfig, origins: Mapping[str, Origin], eos: tuple[int, ...], info: ModelInfo
) -> int:
    pad = settings.pad_token_id
    if pad is not None and pad >= 0:
        if origins["pad_token_id"] == "model":  # it only fills rows, and some models' files name one past the last
            return int(pad)
        return as_token_ids(pad, "pad_token_id", info)[0]
    return next((token for token in eos if token >= 0), 0)


def _decide_seeds(settings: GenerationConfig) -> tuple[int, ...] | None:
    seed = settings.seed
    if seed is None:
        return None
    return tuple(seed) if isinstance(seed, (list, tuple)) else (int(seed),)

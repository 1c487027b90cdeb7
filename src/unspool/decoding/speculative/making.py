"""From a plan to a drafter and its policy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from unspool.cache import ROLL_BACK, TRIAL, Cache
from unspool.config import GenerationConfig
from unspool.decoding.prompts import Prompts
from unspool.decoding.reader import Reader
from unspool.decoding.rows import Rows
from unspool.decoding.scorer import Scorer
from unspool.decoding.speculative.drafters.base import Drafter
from unspool.decoding.speculative.drafters.confidence import Confidence
from unspool.decoding.speculative.drafters.draft_model import DraftModel
from unspool.decoding.speculative.drafters.draft_rows import DraftRows
from unspool.decoding.speculative.drafters.early_exit import EarlyExit, check_shared_cache
from unspool.decoding.speculative.drafters.forced import ForcedText
from unspool.decoding.speculative.drafters.lookup_first import LookupFirst
from unspool.decoding.speculative.drafters.prompt_lookup import PromptLookup
from unspool.decoding.speculative.drafters.shared_vocabulary import SharedVocabulary
from unspool.decoding.speculative.drafters.translation import Translation
from unspool.decoding.speculative.drafters.universal import UniversalDraft
from unspool.decoding.speculative.drafters.vocabulary import Vocabularies
from unspool.decoding.speculative.policy import Policy, Scheduled
from unspool.decoding.speculative.sources import encode_draft
from unspool.decoding.speculative.weighing import Weighed
from unspool.errors import SettingError, UnsupportedError
from unspool.grammar.processor import GrammarLogitsProcessor
from unspool.logits import LogitsProcessorList
from unspool.plan import Plan
from unspool.plan.drafters import DRAFTERS
from unspool.plan.drafting import MOST_DRAFTED, Drafting
from unspool.protocols import Encoded, Model
from unspool.registry import resolve

CAPACITY_AHEAD = 256  # positions that a draft model's cache makes room for at once


@dataclass(frozen=True, slots=True)
class DrafterContext:
    """What a drafter is made from."""

    plan: Plan
    drafting: Drafting
    scorer: Scorer
    rows: Rows
    prompts: Prompts
    assistant: Model | None = None  # a model that drafts
    vocabularies: Vocabularies | None = None  # the model's and the assistant's, if they differ
    encoded: Encoded | None = None  # what the model's encoder made of the sources


def make_policy(drafting: Drafting, drafter: Drafter) -> Policy:
    """What decides how long drafts are."""
    if drafting.is_auto:
        return Weighed(drafting.num_tokens, is_free=drafter.is_free)
    return Scheduled(drafting.num_tokens, drafting.schedule)


def remember_length(drafting: Drafting, policy: Policy, model: object) -> None:
    """Leave the length that the schedule "heuristic" came to in the drafting model's own settings, for later calls."""
    config = getattr(model, "generation_config", None)
    if drafting.schedule == "heuristic" and isinstance(policy, Scheduled) and isinstance(config, GenerationConfig):
        # An adapter shows a copy of settings that stand somewhere else.
        keep = getattr(model, "keep_setting", partial(setattr, config))
        keep("num_assistant_tokens", min(policy.num_tokens, MOST_DRAFTED))


def check_processors(processors: LogitsProcessorList) -> None:
    """Raise for a processor that carries a state from token to token: drafts are tried and taken back."""
    for processor in processors:
        if getattr(processor, "remembers_steps", False):
            raise SettingError(
                f"{type(processor).__name__} remembers the step before, and a drafter's tokens are tried and taken "
                "back; leave one of them out"
            )


def check_cache(drafting: Drafting, cache: Cache) -> None:
    """Raise, before anything is read, for a cache that drafts can't be tried in."""
    name = type(cache).__name__
    if not {ROLL_BACK, TRIAL} & cache.can:
        raise UnsupportedError(
            f"a drafter's tokens are tried and taken back, which a {name} can't; "
            "use cache_implementation='dynamic', or decode without a drafter"
        )
    if drafting.kind == "early_exit":
        check_shared_cache(cache.can, name)


def make_drafter(
    plan: Plan,
    scorer: Scorer,
    rows: Rows,
    prompts: Prompts,
    assistant: Model | None,
    vocabularies: Vocabularies | None = None,
    encoded: Encoded | None = None,
) -> Drafter | None:
    """The drafter that the plan names, ready to guess what follows the rows; None if it names none.

    `vocabularies` are the model's and the assistant's, if they differ; `encoded` are the model's states of the sources.
    """
    if plan.drafting is None:
        return None
    context = DrafterContext(plan, plan.drafting, scorer, rows, prompts, assistant, vocabularies, encoded)
    drafter: Drafter = resolve(DRAFTERS[plan.drafting.kind].make)(context)
    return drafter


# --- the drafters, as their entries in plan/drafters.py name them ----------------------------------------------


def make_prompt_lookup(context: DrafterContext) -> Drafter:
    """Prompt lookup."""
    plan, sources = context.plan, _read_sources(context.prompts, context.plan.copies)
    return PromptLookup(context.rows, context.drafting.max_ngram_size, plan.eos_token_ids, sources)


def make_forced_text(context: DrafterContext) -> Drafter:
    """What the rows' grammars force."""
    scorer = context.scorer

    def find() -> GrammarLogitsProcessor:
        return next(one for one in scorer.processors if isinstance(one, GrammarLogitsProcessor))

    return ForcedText(find)


def make_early_exit(context: DrafterContext) -> Drafter:
    """The model's own first layers."""
    plan, layer = context.plan, context.drafting.exit_layer
    assert layer is not None
    confidence = Confidence(context.drafting.confidence)
    return EarlyExit(context.scorer, layer, do_sample=plan.do_sample, confidence=confidence, ends=plan.eos_token_ids)


def make_draft_model(context: DrafterContext) -> Drafter:
    """Another model, of the same tokenizer or another; behind prompt lookup if both were asked for."""
    most = context.drafting.num_looked_up
    model = _make_model_drafter(context)
    return model if most is None else LookupFirst(make_prompt_lookup(context), model, most)


def _make_model_drafter(context: DrafterContext) -> Drafter:
    plan, scorer, assistant = context.plan, context.scorer, context.assistant
    assert assistant is not None

    def open_reader(num_rows: int) -> Reader:
        return Reader(assistant, _new_cache(assistant, context, num_rows), answer=scorer.reader.answer)

    if context.vocabularies is not None:
        rows = DraftRows(open_reader, len(context.rows))
        return _make_translating(plan, context.drafting, rows, context.vocabularies, scorer)
    reader = open_reader(len(context.rows))
    confidence = Confidence(context.drafting.confidence)
    return DraftModel(reader, scorer, do_sample=plan.do_sample, confidence=confidence, ends=plan.eos_token_ids)


def _make_translating(
    plan: Plan, drafting: Drafting, rows: DraftRows, vocabularies: Vocabularies, scorer: Scorer
) -> Drafter:
    """A drafter with other tokens: through text where nothing is drawn, and else in the tokens that both have.

    If both have the same tokens under other numbers, nothing is gained by going through text.
    """
    confidence = Confidence(drafting.confidence)
    if plan.do_sample or drafting.relation == "renumbered":
        return SharedVocabulary(
            rows, vocabularies, scorer, do_sample=plan.do_sample, confidence=confidence, ends=plan.eos_token_ids
        )
    translate = partial(
        Translation,
        vocabularies,
        target_lookbehind=drafting.target_lookbehind,
        assistant_lookbehind=drafting.assistant_lookbehind,
    )
    return UniversalDraft(rows, vocabularies.drafts, translate, confidence)


def _new_cache(assistant: Model, context: DrafterContext, num_rows: int) -> Cache:
    """An empty cache of the draft model for so many rows, with what an encoder-decoder reads."""
    rows, reader, copies = context.rows, context.scorer.reader, context.plan.copies
    capacity, source = max(rows.lengths) + CAPACITY_AHEAD, context.prompts.source
    if source is None:
        opened = None if reader.open_draft_cache is None else reader.open_draft_cache(assistant)
        return assistant.new_cache("dynamic", num_rows, capacity) if opened is None else opened
    encoded = encode_draft(assistant, reader.model, source, context.encoded, reader.answer_source)
    cache = assistant.new_cache("dynamic", len(source.lengths), capacity, encoded=encoded)
    if copies > 1:
        cache.select_rows([row for row in range(len(source.lengths)) for _ in range(copies)])
    return cache


def _read_sources(prompts: Prompts, copies: int) -> list[list[int]] | None:
    """An encoder's tokens, for every row of the call."""
    source = prompts.source
    if source is None or source.tokens is None:
        return None
    rows = [source.tokens[row, :length].tolist() for row, length in enumerate(source.lengths)]
    return [tokens for tokens in rows for _ in range(copies)]

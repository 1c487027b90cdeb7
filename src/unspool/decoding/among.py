"""Runs among others: which can share blocks and passes, what they may take, and what stepping their rows needs."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from unspool.cache import find_kind
from unspool.decoding.choice import read_beams
from unspool.decoding.finish import Finish
from unspool.decoding.preparation import build_late_criteria, make_seeds
from unspool.decoding.run import Run
from unspool.decoding.run_parts import RunParts
from unspool.logits import LogitsProcessorList
from unspool.protocols import LAST
from unspool.stopping import StoppingCriteriaList

_MOST_DRAFTS: Final = 64  # tokens that a drafter may propose at once


@dataclass(frozen=True, slots=True)
class PlainParts:
    """A run that chooses one token per row a step: what an engine needs to step it among others."""

    token_ids: list[list[int]]  # prompts without padding
    texts: list[np.ndarray]  # the same as arrays
    copies: int  # rows for each of them
    seeds: list[int]  # one per row, copies included
    width: int  # columns of the prompts
    processors: LogitsProcessorList
    do_sample: bool
    num_top: int | None  # likeliest tokens whose log-probabilities are wanted; None: no log-probabilities


@dataclass(frozen=True, slots=True)
class Needs:
    """What a run may take."""

    num_prompts: int  # rows that it reads
    num_rows: int  # that it decodes in
    num_read_rows: int  # rows of its cache while it reads its prompts
    num_cache_rows: int  # the most rows that its cache gets
    longest_prompt: int
    longest: int  # the most positions of a row, candidates and drafts included
    own_cache: bool  # its cache is the caller's, is returned to the caller, or is of a kind that the caller chose
    reads_whole_prompts: bool  # something is made of every position of the prompts, so that all of them must be read
    not_plain: str | None = None  # why its rows can't be stepped token by token among those of others, in blocks
    joins: bool = (
        False  # they can in a cache of the model's own kind, which takes in rows (an encoder-decoder's, states)
    )

    @property
    def is_plain(self) -> bool:
        """Whether its rows can be stepped token by token among those of others."""
        return self.not_plain is None


def find_needs(parts: RunParts, kind: str = "paged", config: Mapping[str, Any] | None = None) -> Needs:
    """What a run may take, known before its first pass, if its keys are to lie in blocks of a kind of cache."""
    plan, prompts, want, settings = parts.plan, parts.prompts, parts.want, parts.plan.settings
    num_rows = prompts.num_rows * plan.copies
    forks = "forks" in parts.model.info.can and find_kind(kind).forks and not settings.low_memory
    longest = parts.readout.longest_prompt(prompts.lengths)
    reads_every_logit = settings.prompt_logprobs is not None or prompts.embeds is not None
    needs = Needs(
        num_prompts=prompts.num_rows,
        num_rows=num_rows,
        num_read_rows=prompts.num_rows * parts.readout.num_sets,
        num_cache_rows=num_rows * parts.readout.num_sets * (1 if forks else max(1, plan.num_candidates)),
        longest_prompt=longest,
        longest=longest + plan.max_new_tokens + plan.num_candidates + (_MOST_DRAFTS if plan.drafting else 0),
        own_cache=(
            parts.hooks.cache is not None
            or parts.returns_output
            or not _lies_in_blocks(parts, kind, dict(config or {}))
            or prompts.source is not None
        ),
        reads_whole_prompts=want.last_states or want.hidden_states or want.attentions or reads_every_logit,
    )
    not_stepped = _explain_not_stepped(parts, needs)
    not_plain = "its keys don't lie in the engine's blocks" if not_stepped is None and needs.own_cache else not_stepped
    return replace(needs, not_plain=not_plain, joins=not_stepped is None and not _chose_cache(parts))


def _lies_in_blocks(parts: RunParts, kind: str, config: dict[str, Any]) -> bool:
    """Whether the caller chose blocks of that kind, or did not choose."""
    plan = parts.plan
    kinds = (kind,) if "cache_implementation" in plan.asked else ("dynamic", kind)
    return plan.cache_kind in kinds and dict(plan.cache_config or {}) == config


def _chose_cache(parts: RunParts) -> bool:
    """Whether the caller gave the cache, gets it, or said which kind it is."""
    plan = parts.plan
    is_given = parts.hooks.cache is not None or parts.returns_output or bool(plan.cache_config)
    return is_given or "cache_implementation" in plan.asked or plan.cache_kind not in ("dynamic", "mamba")


def _explain_not_stepped(parts: RunParts, needs: Needs) -> str | None:
    plan, hooks, prompts = parts.plan, parts.hooks, parts.prompts
    if plan.strategy != "tokens" or plan.drafting is not None or not parts.readout.is_plain:
        return "it does more than choose one token per row from the logits of a pass"
    if hooks.processors or hooks.criteria or hooks.prefix_allowed_tokens_fn is not None:
        return "it runs code of the caller"
    if plan.settings.use_cache is False:
        return "it keeps no keys"
    if needs.reads_whole_prompts or parts.record.keeps_steps or parts.want != LAST:
        return "something is kept of every position"
    if not prompts.hides_padding and min(prompts.lengths) < prompts.width:
        return "its padding counts as tokens"
    return None


def find_kind_of_steps(parts: RunParts) -> Hashable | None:
    """What runs whose steps can be shared have in common, if this one's can though it is not plain: rows of all runs of
    a kind are stepped as one set. None if its steps are its own.
    """
    plan, settings = parts.plan, parts.plan.settings
    runs_theirs = bool(parts.hooks.processors or parts.hooks.criteria or parts.hooks.prefix_allowed_tokens_fn)
    is_seen = parts.hooks.observer is not None or parts.hooks.shows_beams or bool(settings.return_beam_trace)
    prompts = parts.prompts
    keeps_all = parts.wants_every_row or parts.record.keeps_steps or settings.prompt_logprobs is not None
    is_text = prompts.embeds is None and prompts.source is None and prompts.hides_padding
    if runs_theirs or is_seen or keeps_all or not is_text or settings.use_cache is False or settings.low_memory:
        return None
    way = _find_way(parts)
    if way is None:
        return None
    # Processors of one list are called once for all rows that have them, those of different lists apart anyway.
    processors = tuple(type(processor).__qualname__ for processor in parts.processors)
    return way, plan.do_sample, tuple(plan.eos_token_ids), parts.record.num_top, processors


def _find_way(parts: RunParts) -> Hashable | None:
    """How tokens are chosen; None if rows of several runs can't be chosen so at once."""
    plan, settings, readout = parts.plan, parts.plan.settings, parts.readout
    if plan.drafting is not None:
        drafting = plan.drafting
        is_free = drafting.kind == "prompt_lookup" and drafting.schedule == "constant" and readout.is_plain
        return drafting if is_free and plan.strategy == "tokens" else None
    if plan.strategy == "beams" and readout.is_plain and parts.record.num_top is None:
        return "beams", read_beams(plan, max_new_tokens=0)
    if plan.strategy == "contrastive" and readout.is_plain and isinstance(settings.top_k, int):
        return "contrastive", float(settings.penalty_alpha or 0.0), settings.top_k
    if plan.strategy == "tokens" and not readout.is_plain:
        return "tokens", plan.dola_layers, plan.guidance_scale
    return None


def make_finish(run: Run) -> Finish:
    """The stops of a run that begins now."""
    parts = run.parts
    criteria = StoppingCriteriaList([*parts.criteria, *build_late_criteria(parts.plan, parts.hooks)])
    return Finish(criteria, is_last_forced=parts.plan.is_last_forced)


def take_apart(parts: RunParts) -> PlainParts:
    """What it takes to step a plain run's rows among those of others."""
    prompts = parts.prompts
    texts = prompts.list_arrays()
    return PlainParts(
        [text.tolist() for text in texts] if prompts.listed is None else prompts.listed,
        texts,
        parts.plan.copies,
        make_seeds(parts.plan, prompts.num_rows),
        prompts.width,
        parts.processors,
        parts.plan.do_sample,
        parts.record.num_top,
    )

"""What a call has before its first forward pass: the caller's hooks, its stops, what processors know, its seeds."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from unspool.cache import Cache
from unspool.decoding.alone import ask_alone
from unspool.decoding.observer import Observer
from unspool.decoding.prompts import Prompts
from unspool.decoding.randomness import derive_seed, draw_seed
from unspool.decoding.speculative.drafters.vocabulary import Vocabularies
from unspool.logits import LogitsProcessor
from unspool.logits.alone import Apart
from unspool.logits.building import Context
from unspool.plan import Plan
from unspool.protocols import Model
from unspool.stopping import StoppingCriteria, StoppingCriteriaList
from unspool.stopping.entry import StopContext
from unspool.stopping.order import build_stops


@dataclass(slots=True)
class Hooks:
    """What a caller plugs into a call."""

    processors: list[LogitsProcessor] = field(default_factory=list)
    criteria: list[StoppingCriteria] = field(default_factory=list)
    tokenizer: Any = None
    cache: Cache | None = None
    prefix_allowed_tokens_fn: Callable[[int, torch.Tensor], Sequence[int]] | None = None
    assistant: Model | None = None  # a model that drafts
    drafting_owner: Any = None  # whose settings keep the length of drafts, if not the model that drafts
    vocabularies: Vocabularies | None = None  # the model's and the assistant's, if they differ
    shows_beams: bool = False  # the whole table of beams is wanted at every step
    owns_cache: bool = False  # the cache that was given is this call's alone
    keeps_padding: bool = False  # rows that ended hold the padding behind their text too, as transformers' do
    observer: Observer | None = None  # is shown what happens in the call
    sees_rows_alone: bool = False  # the caller's own functions are shown each prompt's rows by themselves, unpadded

    @property
    def has_foreign_processors(self) -> bool:
        """Whether a processor is of a caller's own class: it may write into what it is given."""
        return any(type(one).__module__.partition(".")[0] != "unspool" for one in self.processors)

    @property
    def knows_places(self) -> bool:
        """Whether functions of the caller's may know rows by their place among all rows."""
        return bool(self.processors or self.criteria) and not self.sees_rows_alone


def build_criteria(plan: Plan, prompts: Prompts, hooks: Hooks) -> StoppingCriteriaList:
    """The stops of a call, but for those that count from its beginning."""
    apart = _set_apart(prompts, plan, hooks)
    own = hooks.criteria if apart is None else ask_alone(hooks.criteria, apart)
    return StoppingCriteriaList([*build_stops(_describe_stops(plan, hooks)), *own])


def _set_apart(prompts: Prompts, plan: Plan, hooks: Hooks) -> Apart | None:
    """How rows stand apart for the caller's own functions; None if these are shown the whole batch."""
    if not hooks.sees_rows_alone:
        return None
    offsets = [max(0, prompts.width - length) for length in prompts.lengths for _ in range(plan.copies)]
    return Apart(tuple(offsets), plan.copies if plan.num_beams > 1 else 1)


def build_late_criteria(plan: Plan, hooks: Hooks) -> list[StoppingCriteria]:
    """The stops that count from the beginning of the work, made when it begins."""
    return build_stops(_describe_stops(plan, hooks), begins_with_run=True)


def _describe_stops(plan: Plan, hooks: Hooks) -> StopContext:
    return StopContext(
        settings=plan.settings,
        max_length=plan.max_length,
        eos_token_ids=plan.eos_token_ids,
        tokenizer=hooks.tokenizer,
    )


def describe_call(model: Model, prompts: Prompts, plan: Plan, hooks: Hooks) -> Context:
    """What the processors must know of a call."""
    return Context(
        num_rows=prompts.num_rows * plan.copies,
        vocab_size=model.info.vocab_size,
        prompt_width=prompts.width - prompts.num_written,
        max_length=plan.max_length,
        hidden_width=plan.hidden_width,
        eos_token_ids=plan.eos_token_ids,
        encoder_input_ids=partial(_copy_read_ids, prompts, plan) if _has_read_ids(prompts) else None,
        prefix_allowed_tokens_fn=hooks.prefix_allowed_tokens_fn,
        custom=tuple(hooks.processors),
        apart=_set_apart(prompts, plan, hooks),
        asked=plan.asked,
        tokenizer=hooks.tokenizer,
    )


def _has_read_ids(prompts: Prompts) -> bool:
    return bool(prompts.width) if prompts.source is None else prompts.source.tokens is not None


def _copy_read_ids(prompts: Prompts, plan: Plan) -> torch.Tensor:
    """What the encoder reads, or the prompt, for each of the call's rows; made for the few processors that need it."""
    read = _find_read_ids(prompts)
    return read if plan.copies == 1 else read.repeat_interleave(plan.copies, dim=0)


def _find_read_ids(prompts: Prompts) -> torch.Tensor:
    """What the encoder reads, or the prompt: (rows, length), as it was given, or without what is no token of a row."""
    source = prompts.source
    if source is not None and source.given is not None and not prompts.hides_padding:
        return source.given
    if source is not None and source.tokens is not None:
        column = torch.arange(source.tokens.shape[1], device=source.tokens.device)
        ends = torch.tensor(source.lengths, device=source.tokens.device)[:, None]
        return source.tokens.masked_fill(column >= ends, -1)
    if not prompts.hides_padding or min(prompts.lengths) >= prompts.width:
        return prompts.ids[:, : prompts.width - prompts.num_written]
    column = torch.arange(prompts.width, device=prompts.ids.device)
    firsts = torch.tensor([prompts.width - length for length in prompts.lengths], device=prompts.ids.device)
    return prompts.ids.masked_fill(column < firsts[:, None], -1)


def make_seeds(plan: Plan, num_prompts: int) -> list[int]:
    """A seed for each row, copies included."""
    given = plan.seeds or (draw_seed() if plan.do_sample else 0,)
    if len(given) == num_prompts:
        return [derive_seed(seed, copy) for seed in given for copy in range(plan.copies)]
    # Numbered through, not derived twice: the second copy of one prompt must not share the seed of the next.
    return [derive_seed(given[0], row) for row in range(num_prompts * plan.copies)]

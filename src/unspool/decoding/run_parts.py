"""What a call is made of before its first pass, and what follows from that alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from unspool.cache import find_kind
from unspool.config import GenerationConfig
from unspool.decoding.choice import find_want, make_readout
from unspool.decoding.preparation import Hooks, build_criteria, describe_call
from unspool.decoding.prompts import Prompts
from unspool.decoding.readouts.base import Readout
from unspool.decoding.record import Record
from unspool.decoding.speculative.making import check_processors
from unspool.errors import SettingError, UnsupportedError
from unspool.logits import LogitsProcessorList
from unspool.logits.pipeline import build_processors
from unspool.plan import Plan
from unspool.protocols import Model, Want
from unspool.stopping import StoppingCriteriaList
from unspool.wording import word


@dataclass(frozen=True, slots=True)
class RunParts:
    """A call that can run: its model, prompts and plan, and what was built from them."""

    model: Model
    prompts: Prompts
    plan: Plan
    hooks: Hooks
    readout: Readout
    want: Want
    record: Record
    criteria: StoppingCriteriaList
    processors: LogitsProcessorList

    @property
    def settings(self) -> GenerationConfig:
        """The call's settings, merged."""
        return self.plan.settings

    @property
    def num_rows(self) -> int:
        """Sequences that the call returns."""
        return self.prompts.num_rows * self.plan.num_return_sequences

    @property
    def num_decoded_rows(self) -> int:
        """Rows that are decoded in, beams included."""
        return self.prompts.num_rows * self.plan.copies

    @property
    def prompt_ids(self) -> torch.Tensor:
        """The decoder's prompts as they were given, one for each sequence that is returned."""
        prompts = self.prompts
        given = prompts.ids if prompts.shown is None else prompts.shown
        return given.repeat_interleave(self.plan.num_return_sequences, dim=0)

    @property
    def returns_output(self) -> bool:
        """Whether an output object was asked for instead of the sequences alone."""
        return bool(self.settings.return_dict_in_generate)

    @property
    def has_bursts(self) -> bool:
        """Whether rows get different numbers of tokens per step: those that beams agree on, or accepted drafts."""
        return self.plan.num_beams > 1 or self.plan.drafting is not None

    @property
    def drafts_unasked(self) -> bool:
        """Whether it drafts without having been asked to."""
        return self.plan.drafting is not None and self.plan.drafting.is_suggested

    def without_drafts(self) -> RunParts:
        """The same call, which chooses one token a step."""
        return replace(self, plan=replace(self.plan, drafting=None))

    @property
    def divides_rows(self) -> bool:
        """Whether beams are read in parts, to save memory."""
        return bool(self.settings.low_memory) and self.plan.num_beams > 1

    @property
    def wants_every_row(self) -> bool:
        """Whether rows that have ended must stay in the batch."""
        return (
            self.hooks.knows_places
            or (self.hooks.cache is not None and not self.hooks.owns_cache)  # the caller's: no row of it may go
            or self.returns_output  # the cache and the steps' tensors are part of the answer
            or self.readout.needs_every_row
            or bool(self.model.info.why_placed)
        )

    @property
    def keeps_places(self) -> bool:
        """Whether row `i` of the call is row `i` of the cache to the end, and whoever made the call gets the cache."""
        return self.plan.num_beams == 1 and self.wants_every_row and not self.settings.return_legacy_cache

    def explain_shortage(self, error: BaseException) -> str:
        """What to say if memory ran out in the call."""
        plan, prompts = self.plan, self.prompts
        cause = error.__cause__ or error
        return (
            f"memory ran out in this call, which has {self.num_decoded_rows} rows ({prompts.num_rows} prompts of up to "
            f"{max(prompts.lengths)} tokens) and up to {plan.max_new_tokens} new tokens each, with a {plan.cache_kind} "
            "cache; other calls are not affected. Give fewer or shorter prompts at once, fewer beams or sequences, a "
            "smaller max_new_tokens or prefill_chunk_size, or cache_implementation='quantized' or 'offloaded'. "
            f"The allocator says: {str(cause)[:200] or type(cause).__name__}"
        )


def prepare_parts(model: Model, prompts: Prompts, plan: Plan, hooks: Hooks) -> RunParts:
    """Build a call's parts; raises for what can't be, before the first forward pass."""
    settings = plan.settings
    readout = make_readout(plan, prompts)
    readout.observer = hooks.observer
    record = Record(
        scores=bool(settings.output_scores),
        logits=bool(settings.output_logits),
        hidden_states=bool(settings.output_hidden_states),
        attentions=bool(settings.output_attentions),
        logprobs=settings.logprobs,
        observer=hooks.observer,
        order=prompts.order,
    )
    parts = RunParts(
        model,
        prompts,
        plan,
        hooks,
        readout,
        find_want(plan),
        record,
        build_criteria(plan, prompts, hooks),
        build_processors(settings, describe_call(model, prompts, plan, hooks), plan.derived),
    )
    if parts.drafts_unasked and not _takes_suggestion(parts):
        parts = parts.without_drafts()
    _check(parts)
    return parts


def _takes_suggestion(parts: RunParts) -> bool:
    """Whether a drafter that the call did not ask for goes with everything else: one row, and nothing of the caller's;
    one that `speculate="auto"` chose takes all that can be."""
    drafting = parts.plan.drafting
    if drafting is not None and drafting.is_auto:
        return not parts.processors.remembers_steps
    return (
        parts.num_decoded_rows == 1
        and not parts.wants_every_row
        and parts.hooks.cache is None
        and parts.plan.cache_kind == "dynamic"
        and not parts.processors.remembers_steps
    )


def _check(parts: RunParts) -> None:
    plan, hooks, num_rows = parts.plan, parts.hooks, parts.num_rows
    if plan.drafting is not None:
        check_processors(parts.processors)
    if hooks.observer is not None and (parts.prompts.num_rows > 1 or (plan.num_beams == 1 and num_rows > 1)):
        raise SettingError(
            word(
                "an observed call follows one text, and this one writes {num_rows}; give one prompt, and leave out "
                "{num_return_sequences} or search with {num_beams}",
                num_rows=num_rows,
            )
        )
    if parts.divides_rows and hooks.cache is None and not find_kind(plan.cache_kind).divides:
        raise UnsupportedError(
            f"`low_memory` reads beams in parts, and a {plan.cache_kind!r} cache can't divide rows; use "
            "cache_implementation='dynamic', 'static' or 'paged', or leave `low_memory` out"
        )

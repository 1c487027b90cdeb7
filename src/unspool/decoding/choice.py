"""Which strategy and which readout a plan asks for."""

from __future__ import annotations

from typing import Any

from unspool.beams import BeamSearchScorer
from unspool.beams.punctual import PunctualScorer
from unspool.beams.rules import prepare_constraints
from unspool.decoding.ahead import AheadTurns, can_run_ahead
from unspool.decoding.beam import BeamSearch, BeamSettings
from unspool.decoding.beam_scored import ConstrainedBeams, GroupBeams
from unspool.decoding.beam_trace import BeamTrace
from unspool.decoding.contrastive import ContrastiveSearch
from unspool.decoding.dola import Dola
from unspool.decoding.finish import Finish
from unspool.decoding.guidance import Guidance
from unspool.decoding.loop import Turns
from unspool.decoding.prompts import Prompts
from unspool.decoding.readout import Readout
from unspool.decoding.rows import Rows
from unspool.decoding.sample import Sample
from unspool.decoding.speculative.drafter import Drafter
from unspool.decoding.speculative.making import make_policy
from unspool.decoding.speculative.turns import SpeculativeTurns
from unspool.decoding.step import Step
from unspool.decoding.strategy import Strategy
from unspool.decoding.stretch import StretchTurns, can_stretch
from unspool.decoding.tokens import TokenTurns
from unspool.outputs import Speculation
from unspool.plan import Plan


def make_readout(plan: Plan, prompts: Prompts) -> Readout:
    """The way from forward passes to logits that the plan names."""
    if plan.dola_layers:
        # Callers who hide padding expect a row not to depend on the rows beside it.
        return Dola(plan.dola_layers, chooses_by_row=prompts.hides_padding)
    if plan.guidance_scale is not None:
        return Guidance.of(plan.guidance_scale, prompts)
    return Readout()


def make_turns(
    step: Step,
    rows: Rows,
    finish: Finish,
    plan: Plan,
    *,
    rows_may_leave: bool,
    shows_table: bool,
    drafter: Drafter | None = None,
) -> Turns:
    """The strategy at work that the plan names."""
    if drafter is not None and plan.drafting is not None:
        return SpeculativeTurns(
            step,
            rows,
            drafter,
            make_policy(plan.drafting, drafter),
            finish,
            step.record,
            Speculation.of_rows(len(rows)),
            plan.max_length,
            do_sample=plan.do_sample,
            rows_may_leave=rows_may_leave,
        )
    if plan.strategy in ("tokens", "contrastive"):
        strategy = _make_strategy(step, plan)
        if can_run_ahead(step, rows, finish, rows_may_leave=rows_may_leave):
            return AheadTurns(rows, strategy, finish, step.record, rows_may_leave=rows_may_leave, step=step)
        if not plan.do_sample and can_stretch(step, rows):
            return StretchTurns(rows, strategy, finish, step.record, rows_may_leave=rows_may_leave, step=step)
        return TokenTurns(rows, strategy, finish, step.record, rows_may_leave=rows_may_leave)
    settings = _read_beams(plan)
    trace = BeamTrace(plan.num_beams, settings.num_groups) if plan.settings.return_beam_trace else None
    if plan.strategy == "beams":
        return BeamSearch(step, rows, finish, settings, shows_table=shows_table, trace=trace)
    common: dict[str, Any] = {
        "batch_size": len(rows) // plan.num_beams,
        "num_beams": plan.num_beams,
        "device": rows.device,
        "length_penalty": settings.length_penalty,
        "do_early_stopping": settings.early_stopping,
        "num_beam_hyps_to_keep": plan.num_return_sequences,
        "max_length": plan.max_length,
    }
    more: dict[str, Any] = {
        "eos_token_ids": plan.eos_token_ids,
        "max_length": plan.max_length,
        "shows_table": shows_table,
        "trace": trace,
    }
    if plan.strategy == "beam_groups":
        groups = BeamSearchScorer(**common, num_beam_groups=settings.num_groups)
        return GroupBeams(step, rows, finish, settings, groups, **more)
    is_last_forced = plan.settings.forced_eos_token_id is not None  # and no place for a constraint
    constrained = PunctualScorer(
        **common,
        constraints=prepare_constraints(
            plan.settings, vocab_size=step.model.info.vocab_size, end_ids=plan.eos_token_ids
        ),
        is_strict=bool(plan.settings.strict_constraints),
        prompt_width=plan.prompt_width,
        last_place=plan.max_length - is_last_forced,
        end_ids=plan.eos_token_ids,
    )
    return ConstrainedBeams(step, rows, finish, settings, constrained, **more)


def _make_strategy(step: Step, plan: Plan) -> Strategy:
    """What chooses one token a row a turn."""
    if plan.strategy == "contrastive":
        settings = plan.settings
        return ContrastiveSearch(step, penalty_alpha=float(settings.penalty_alpha), top_k=settings.top_k)
    return Sample(step, do_sample=plan.do_sample)


def _read_beams(plan: Plan) -> BeamSettings:
    settings = plan.settings
    return BeamSettings(
        num_beams=plan.num_beams,
        num_returned=plan.num_return_sequences,
        length_penalty=1.0 if settings.length_penalty is None else settings.length_penalty,
        early_stopping=settings.early_stopping or False,
        do_sample=plan.do_sample,
        num_eos=len(plan.eos_token_ids),
        max_new_tokens=plan.max_new_tokens,
        num_groups=settings.num_beam_groups or 1,
    )

"""Which strategy and which readout a plan asks for."""

from __future__ import annotations

from functools import partial

from unspool.beams import BeamSearchScorer
from unspool.beams.punctual import PunctualScorer
from unspool.beams.rules import prepare_constraints
from unspool.decoding.beams.ahead import AheadBeamTurns, can_search_ahead
from unspool.decoding.beams.plain import PlainBeams
from unspool.decoding.beams.scored import ConstrainedBeams, GroupBeams
from unspool.decoding.beams.search import Beams, BeamTurns
from unspool.decoding.beams.settings import BeamSettings
from unspool.decoding.beams.trace import BeamTrace
from unspool.decoding.finish import Finish
from unspool.decoding.loop import Turns
from unspool.decoding.observer import Observer
from unspool.decoding.prompts import Prompts
from unspool.decoding.reader import Reader
from unspool.decoding.readouts.base import Readout
from unspool.decoding.readouts.dola import Dola
from unspool.decoding.readouts.guidance import Guidance
from unspool.decoding.rows import Rows
from unspool.decoding.scorer import Scorer
from unspool.decoding.speculative.drafters.base import Drafter
from unspool.decoding.speculative.making import make_policy, remember_length
from unspool.decoding.speculative.turns import SpeculativeTurns
from unspool.decoding.strategies.ahead import AheadTurns, can_run_ahead
from unspool.decoding.strategies.base import Strategy
from unspool.decoding.strategies.candidates import Candidates
from unspool.decoding.strategies.contrastive import ContrastiveSearch
from unspool.decoding.strategies.sample import Sample
from unspool.decoding.strategies.stretch import StretchTurns, can_stretch
from unspool.decoding.strategies.token_strategy import StrategyContext
from unspool.decoding.strategies.turns import TokenTurns
from unspool.outputs import Speculation, Stats
from unspool.plan import Plan
from unspool.plan.strategies import STRATEGIES
from unspool.protocols import Model, Want
from unspool.registry import resolve


def make_readout(plan: Plan, prompts: Prompts) -> Readout:
    """The way from forward passes to logits that the plan names."""
    if plan.dola_layers:
        # Callers who hide padding expect a row not to depend on the rows beside it.
        return Dola(plan.dola_layers, chooses_by_row=prompts.hides_padding)
    if plan.guidance_scale is not None:
        return Guidance.of(plan.guidance_scale, prompts)
    return Readout()


def find_want(plan: Plan) -> Want:
    """What every pass of the call must return."""
    settings = plan.settings
    return Want(
        hidden_states=bool(settings.output_hidden_states),
        attentions=bool(settings.output_attentions),
        last_states=plan.strategy == "contrastive",
    )


def make_candidates(plan: Plan, reader: Reader, observer: Observer | None = None) -> Candidates | None:
    """What a strategy must have before the prompts are read, where it compares candidates with the past."""
    if plan.strategy != "contrastive":
        return None
    return Candidates(reader, one_by_one=bool(plan.settings.low_memory), observer=observer)


def make_turns(
    scorer: Scorer,
    rows: Rows,
    finish: Finish,
    plan: Plan,
    *,
    rows_may_leave: bool,
    shows_table: bool,
    stats: Stats,
    candidates: Candidates | None = None,
    drafter: Drafter | None = None,
    drafting_model: Model | None = None,
) -> Turns:
    """The strategy at work that the plan names."""
    if drafter is not None and plan.drafting is not None:
        policy = make_policy(plan.drafting, drafter)
        stats.speculation = Speculation.of_rows(len(rows))
        return SpeculativeTurns(
            scorer,
            rows,
            drafter,
            policy,
            finish,
            {number: (stats.speculation, number) for number in rows.numbers},
            [plan.max_length] * len(rows),
            do_sample=plan.do_sample,
            rows_may_leave=rows_may_leave,
            remember=partial(remember_length, plan.drafting, policy, drafting_model),
        )
    entry, record = STRATEGIES[plan.strategy], scorer.record
    made = resolve(entry.make)(StrategyContext(scorer, rows, finish, plan, candidates, shows_table, rows_may_leave))
    if not entry.chooses_tokens:
        turns: Turns = made
        return turns
    strategy: Strategy = made
    if can_run_ahead(scorer, strategy, rows, finish, rows_may_leave=rows_may_leave):
        return AheadTurns(rows, strategy, finish, record, rows_may_leave=rows_may_leave)
    if isinstance(strategy, Sample) and can_stretch(scorer, rows):
        return StretchTurns(rows, strategy, finish, record, rows_may_leave=rows_may_leave, scorer=scorer)
    return TokenTurns(rows, strategy, finish, record, rows_may_leave=rows_may_leave)


# --- the strategies, as their entries in plan/strategies.py name them ------------------------------------------


def make_sample(context: StrategyContext) -> Strategy:
    """Greedy search or sampling."""
    return Sample(context.scorer, do_sample=context.plan.do_sample)


def make_contrastive_search(context: StrategyContext) -> Strategy:
    """Contrastive search."""
    assert context.candidates is not None
    settings = context.plan.settings
    alpha, top_k = float(settings.penalty_alpha), settings.top_k
    return ContrastiveSearch(context.scorer, context.candidates, penalty_alpha=alpha, top_k=top_k)


def make_beam_search(context: StrategyContext) -> Turns:
    """Beam search and beam sampling."""
    settings, trace = read_beams(context.plan), _make_trace(context)
    # Steps that were captured on a GPU are those of so many rows, and `low_memory` divides all rows alike.
    rows_may_leave = (
        context.rows_may_leave and context.rows.device.type == "cpu" and not context.plan.settings.low_memory
    )
    scorer, rows, finish = context.scorer, context.rows, context.finish
    beams = PlainBeams(scorer, rows, finish, settings, trace=trace, rows_may_leave=rows_may_leave)
    num_prompts = len(rows) // settings.num_beams
    if can_search_ahead(scorer, rows, finish, rows_may_leave=context.rows_may_leave, num_prompts=num_prompts):
        return AheadBeamTurns(
            beams, scorer, rows, finish, settings, num_prompts=num_prompts, shows_table=context.shows_table
        )
    return _turn_beams(context, beams)


def make_group_beams(context: StrategyContext) -> Turns:
    """Diverse beam search."""
    plan, settings = context.plan, read_beams(context.plan)
    judge = BeamSearchScorer(
        len(context.rows) // plan.num_beams,
        plan.num_beams,
        context.rows.device,
        length_penalty=settings.length_penalty,
        do_early_stopping=settings.early_stopping,
        num_beam_hyps_to_keep=plan.num_return_sequences,
        num_beam_groups=settings.num_groups,
        max_length=plan.max_length,
    )
    trace = _make_trace(context)
    beams = GroupBeams(
        context.scorer, context.rows, context.finish, settings, judge, max_length=plan.max_length, trace=trace
    )
    return _turn_beams(context, beams)


def make_constrained_beams(context: StrategyContext) -> Turns:
    """Constrained beam search."""
    plan, settings = context.plan, read_beams(context.plan)
    vocab_size = context.scorer.reader.model.info.vocab_size
    judge = PunctualScorer(
        batch_size=len(context.rows) // plan.num_beams,
        num_beams=plan.num_beams,
        constraints=prepare_constraints(plan.settings, vocab_size=vocab_size, end_ids=plan.eos_token_ids),
        device=context.rows.device,
        length_penalty=settings.length_penalty,
        do_early_stopping=settings.early_stopping,
        num_beam_hyps_to_keep=plan.num_return_sequences,
        max_length=plan.max_length,
        is_strict=bool(plan.settings.strict_constraints),
        prompt_width=plan.prompt_width,
        last_place=plan.max_length - plan.is_last_forced,  # a forced token is no place for a constraint
        end_ids=plan.eos_token_ids,
    )
    trace = _make_trace(context)
    beams = ConstrainedBeams(
        context.scorer, context.rows, context.finish, settings, judge, max_length=plan.max_length, trace=trace
    )
    return _turn_beams(context, beams)


def _turn_beams(context: StrategyContext, beams: Beams) -> BeamTurns:
    plan = context.plan
    num_prompts = len(context.rows) // plan.num_beams
    return BeamTurns(
        beams,
        context.scorer,
        context.rows,
        num_prompts,
        plan.num_return_sequences,
        shows_table=context.shows_table,
    )


def _make_trace(context: StrategyContext) -> BeamTrace | None:
    settings, observer = context.plan.settings, context.scorer.record.observer
    if not settings.return_beam_trace and observer is None:
        return None
    keeps_all = bool(settings.return_beam_trace)
    return BeamTrace(context.plan.num_beams, settings.num_beam_groups or 1, observer=observer, keeps_all=keeps_all)


def read_beams(plan: Plan, *, max_new_tokens: int | None = None) -> BeamSettings:
    """What steers a plan's beam search; with `max_new_tokens`, beside another length."""
    settings = plan.settings
    return BeamSettings(
        num_beams=plan.num_beams,
        num_returned=plan.num_return_sequences,
        length_penalty=1.0 if settings.length_penalty is None else settings.length_penalty,
        early_stopping=settings.early_stopping or False,
        do_sample=plan.do_sample,
        eos_token_ids=tuple(plan.eos_token_ids),
        max_new_tokens=plan.max_new_tokens if max_new_tokens is None else max_new_tokens,
        num_groups=settings.num_beam_groups or 1,
        returns_scores=bool(settings.output_scores),
    )

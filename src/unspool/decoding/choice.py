"""Which strategy and which readout a plan asks for."""

from __future__ import annotations

from functools import partial

from unspool.beams import BeamSearchScorer
from unspool.beams.punctual import PunctualScorer
from unspool.beams.rules import prepare_constraints
from unspool.decoding.beams.plain import PlainBeams
from unspool.decoding.beams.scored import ConstrainedBeams, GroupBeams
from unspool.decoding.beams.search import Beams, BeamTurns
from unspool.decoding.beams.settings import BeamSettings
from unspool.decoding.beams.trace import BeamTrace
from unspool.decoding.finish import Finish
from unspool.decoding.loop import Turns
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
from unspool.decoding.strategies.turns import TokenTurns
from unspool.outputs import Speculation, Stats
from unspool.plan import Plan
from unspool.protocols import Model, Want


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


def make_candidates(plan: Plan, reader: Reader) -> Candidates | None:
    """What a strategy must have before the prompts are read, where it compares candidates with the past."""
    if plan.strategy != "contrastive":
        return None
    return Candidates(reader, one_by_one=bool(plan.settings.low_memory))


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
            stats.speculation,
            plan.max_length,
            do_sample=plan.do_sample,
            rows_may_leave=rows_may_leave,
            remember=partial(remember_length, plan.drafting, policy, drafting_model),
        )
    record = scorer.record
    if plan.strategy in ("tokens", "contrastive"):
        strategy = _make_strategy(scorer, plan, candidates)
        if can_run_ahead(scorer, strategy, rows, finish, rows_may_leave=rows_may_leave):
            return AheadTurns(rows, strategy, finish, record, rows_may_leave=rows_may_leave)
        if not plan.do_sample and can_stretch(scorer, rows):
            return StretchTurns(rows, strategy, finish, record, rows_may_leave=rows_may_leave, reader=scorer.reader)
        return TokenTurns(rows, strategy, finish, record, rows_may_leave=rows_may_leave)
    settings = _read_beams(plan)
    return BeamTurns(
        _make_beams(scorer, rows, finish, settings, plan),
        scorer,
        rows,
        len(rows) // plan.num_beams,
        plan.num_return_sequences,
        shows_table=shows_table,
    )


def _make_beams(scorer: Scorer, rows: Rows, finish: Finish, settings: BeamSettings, plan: Plan) -> Beams:
    """What decides which beams go on."""
    trace = BeamTrace(plan.num_beams, settings.num_groups) if plan.settings.return_beam_trace else None
    if plan.strategy == "beams":
        return PlainBeams(scorer, rows, finish, settings, trace=trace)
    num_prompts = len(rows) // plan.num_beams
    if plan.strategy == "beam_groups":
        judge = BeamSearchScorer(
            num_prompts,
            plan.num_beams,
            rows.device,
            length_penalty=settings.length_penalty,
            do_early_stopping=settings.early_stopping,
            num_beam_hyps_to_keep=plan.num_return_sequences,
            num_beam_groups=settings.num_groups,
            max_length=plan.max_length,
        )
        return GroupBeams(scorer, rows, finish, settings, judge, max_length=plan.max_length, trace=trace)
    is_last_forced = plan.settings.forced_eos_token_id is not None  # and no place for a constraint
    vocab_size = scorer.reader.model.info.vocab_size
    constrained = PunctualScorer(
        batch_size=num_prompts,
        num_beams=plan.num_beams,
        constraints=prepare_constraints(plan.settings, vocab_size=vocab_size, end_ids=plan.eos_token_ids),
        device=rows.device,
        length_penalty=settings.length_penalty,
        do_early_stopping=settings.early_stopping,
        num_beam_hyps_to_keep=plan.num_return_sequences,
        max_length=plan.max_length,
        is_strict=bool(plan.settings.strict_constraints),
        prompt_width=plan.prompt_width,
        last_place=plan.max_length - is_last_forced,
        end_ids=plan.eos_token_ids,
    )
    return ConstrainedBeams(scorer, rows, finish, settings, constrained, max_length=plan.max_length, trace=trace)


def _make_strategy(scorer: Scorer, plan: Plan, candidates: Candidates | None) -> Strategy:
    """What chooses one token a row a turn."""
    if candidates is not None:
        settings = plan.settings
        return ContrastiveSearch(scorer, candidates, penalty_alpha=float(settings.penalty_alpha), top_k=settings.top_k)
    return Sample(scorer, do_sample=plan.do_sample)


def _read_beams(plan: Plan) -> BeamSettings:
    settings = plan.settings
    return BeamSettings(
        num_beams=plan.num_beams,
        num_returned=plan.num_return_sequences,
        length_penalty=1.0 if settings.length_penalty is None else settings.length_penalty,
        early_stopping=settings.early_stopping or False,
        do_sample=plan.do_sample,
        eos_token_ids=tuple(plan.eos_token_ids),
        max_new_tokens=plan.max_new_tokens,
        num_groups=settings.num_beam_groups or 1,
        returns_scores=bool(settings.output_scores),
    )

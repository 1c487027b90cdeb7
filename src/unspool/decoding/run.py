"""One call under way: built from a model, prompts and a plan; iterated for what is emitted; asked for its output."""

from __future__ import annotations

import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch

from unspool.cache import DIVIDE, Cache
from unspool.decoding.beams.trace import BeamTrace
from unspool.decoding.call_cache import CallCache
from unspool.decoding.choice import make_candidates, make_turns
from unspool.decoding.finish import Finish
from unspool.decoding.loan import Loan
from unspool.decoding.loop import Emitted, Result, Turns, run_turns
from unspool.decoding.preparation import Hooks, build_late_criteria, make_seeds
from unspool.decoding.prompt_logprobs import read_prompt_logprobs
from unspool.decoding.prompts import Prompts
from unspool.decoding.randomness import draw_seed
from unspool.decoding.reader import OpenDraftCache, Reader, between_passes
from unspool.decoding.record import Reported, list_reported
from unspool.decoding.returns import append_rows, build_output
from unspool.decoding.rows import Rows
from unspool.decoding.run_parts import prepare_parts
from unspool.decoding.scorer import Scorer
from unspool.decoding.speculative.making import check_cache, make_drafter
from unspool.decoding.tails import prepare_draws
from unspool.errors import ResourceError, UnsupportedError
from unspool.forks import make_lock
from unspool.outputs import GenerateOutput, Stats, TokenLogprob
from unspool.plan import Plan
from unspool.protocols import Answer, Model, SourceAnswer
from unspool.shortage import explain_shortage, is_out_of_memory

_reading = make_lock(sys.modules[__name__], "_reading")  # of what steps of an engine reported


class Run:
    """One call: `for emitted in run`, then `run.output()`."""

    def __init__(self, model: Model, prompts: Prompts, plan: Plan, hooks: Hooks) -> None:
        self.parts = prepare_parts(model, prompts, plan, hooks)
        self.cache = CallCache(self.parts)
        self.num_rows = self.parts.num_rows
        self.answer: Answer | None = None  # who answers what it asks of its models; None: they themselves, at once
        self.answer_source: SourceAnswer | None = None  # and of their encoders
        self.open_cache: Callable[[], Cache] | None = None  # who makes its cache; None: the model
        self.open_draft_cache: OpenDraftCache | None = None  # and that of a model that drafts
        self._reader: Reader | None = None
        self._turns: Turns | None = None
        self._left: Result | None = None  # what its strategy adds to the output, if nothing else of it is kept
        self.emitted: list[list[int]] = [[] for _ in range(self.num_rows)]
        self.reasons: list[str | None] = [None] * self.num_rows
        self._num_repeated = [0] * self.num_rows  # tokens that come once more, after a restart
        self._is_timed = False  # the stops that count from the beginning are there
        self._logprobs: list[list[TokenLogprob]] = [[] for _ in range(self.num_rows)]
        self.reported: deque[Reported] = deque()  # log-probabilities of row 0 that nobody has looked at
        self.prompt_logprobs: list[list[TokenLogprob | None]] | None = None
        self.added_texts = [""] * self.num_rows  # what healing added to each row's prompt
        lengths = prompts.lengths if prompts.source is None else prompts.source.lengths
        self.stats = Stats(prompt_tokens=sum(lengths), cached_tokens=_count_given(hooks.cache, prompts))

    def __iter__(self) -> Iterator[Emitted]:
        started = time.perf_counter()
        self._start_clocks()
        parts = self.parts
        loan = Loan(parts.hooks.cache) if parts.hooks.cache is not None and not parts.hooks.owns_cache else None
        try:
            yield from self._iterate(started)
        except GeneratorExit:
            self._close()
            raise
        except BaseException as error:
            is_short = is_out_of_memory(error)
            if is_short:
                self._turns = self._reader = None
                traceback.clear_frames(error.__traceback__)  # they hold what there was no room for
            if loan is not None:
                loan.give_back()
            if is_short:
                raise ResourceError(parts.explain_shortage(error)) from error
            raise
        self._close()

    def _iterate(self, started: float) -> Iterator[Emitted]:
        observer = self.parts.hooks.observer
        with torch.no_grad():
            turns = self._turns = self._begin()
        scope = self._share_threads if self.parts.model.device.type == "cpu" else nullcontext
        for emitted in run_turns(turns, self.stats, started, scope):
            self._count_passes()
            self.skip_repeated(emitted)
            self.gather(emitted)
            if observer is not None:
                emitted.seen = observer.sum_up(emitted)
            yield emitted

    def _share_threads(self) -> AbstractContextManager[None]:
        """Between passes of the CPU library, its threads have the cores."""
        return between_passes(self.parts.model, self.parts.num_decoded_rows)

    def _close(self) -> None:
        """Leave things as the next call wants them."""
        reads_choice = False
        if self._turns is not None:
            self._turns.close()
            reads_choice = self._turns.reads_choice and any(self.emitted)
        if self._reader is not None:
            self._count_passes()
            if self.parts.readout.num_sets > 1 and self.parts.wants_every_row:
                self._reader.close_sets()
            if all(self.reasons):
                self.cache.read_padding(self._reader, self.emitted, reads_choice=reads_choice)
                self.stats.forward_passes = self._reader.num_passes
        self.cache.forget_padding(self.emitted, num_unread=int(reads_choice))

    def _count_passes(self) -> None:
        reader, stats = self._reader, self.stats
        assert reader is not None
        stats.forward_passes, stats.path, stats.path_reason = reader.num_passes, reader.path, reader.path_reason

    # --- an engine that steps its rows with those of others ----------------------------------------------
    def begin(self) -> Turns:
        """Read the prompts, and set the strategy to work on what follows them; what it emits is for the caller to
        `gather`."""
        self._start_clocks()
        with torch.no_grad():
            turns = self._turns = self._begin()
        self._count_passes()
        return turns

    def hand_over(self) -> None:
        """Keep nothing of the turns that have begun: they are another's."""
        self._turns = self._reader = None
        self._left = Result()
        self.cache.held = self.cache.encoded = None

    def restart(self) -> None:
        """Begin again, from the prompts; what was emitted before is not emitted again."""
        parts, self._left = self.parts, None
        made = prepare_parts(parts.model, parts.prompts, parts.plan, parts.hooks)
        self.parts = replace(made, criteria=parts.criteria)  # clocks go on
        self.cache = CallCache(self.parts)
        self._turns = self._reader = None
        self._num_repeated = list(map(len, self.emitted))
        self.stats.new_tokens = 0

    def _start_clocks(self) -> None:
        if not self._is_timed:
            self._is_timed = True
            self.parts.criteria.extend(build_late_criteria(self.parts.plan, self.parts.hooks))

    def skip_repeated(self, emitted: Emitted) -> None:
        """Take out of a turn what was emitted before a restart."""
        if not any(self._num_repeated):
            return
        for row in list(emitted.tokens):
            count = min(self._num_repeated[row], len(emitted.tokens[row]))
            self._num_repeated[row] -= count
            emitted.tokens[row] = emitted.tokens[row][count:]
            if row in emitted.logprobs:
                emitted.logprobs[row] = emitted.logprobs[row][count:]
            if self.reasons[row] is not None:
                del emitted.tokens[row]
                emitted.logprobs.pop(row, None)
                emitted.finished.pop(row, None)

    def gather(self, emitted: Emitted) -> None:
        """Enter what a turn added to the rows."""
        for row, tokens in emitted.tokens.items():
            self.emitted[row] += tokens
        for row, found in emitted.logprobs.items():
            self._logprobs[row] += found
        for row, reason in emitted.finished.items():
            self.reasons[row] = reason
        if emitted.finished and not all(map(bool, self.reasons)):
            self.cache.put_aside(list(emitted.finished))

    @property
    def logprobs(self) -> list[list[TokenLogprob]]:
        """Every row's log-probabilities so far, if they were asked for."""
        if self.reported:
            with _reading:
                new = [self.reported.popleft() for _ in range(len(self.reported))]
                self._logprobs[0] += list_reported(new)
        return self._logprobs

    def release(self) -> None:
        """Let go of what its steps needed, once it has ended; what it returned stays."""
        if self.parts.returns_output:
            return
        with suppress(Exception):  # of a strategy that was stopped before it had anything
            self._left = self._result()
        self._turns = self._reader = None
        self.cache.held = self.cache.encoded = None

    def make_cache(self) -> Cache:
        """A cache as it would make for itself, with what its encoder reads: for an engine that steps its rows."""
        return self.cache.make(self.answer_source)

    def settle_seed(self) -> int | None:
        """The seed that tokens are drawn with, drawn now if none was given; None if nothing is drawn."""
        plan = self.parts.plan
        if not plan.do_sample:
            return None
        if not plan.seeds:
            plan = replace(plan, seeds=(draw_seed(),))
            self.parts = replace(self.parts, plan=plan)
        assert plan.seeds is not None
        return plan.seeds[0]

    # --- the prompts -----------------------------------------------------------------------------------
    def _begin(self) -> Turns:
        """Read the prompts, and set the strategy to work on what follows them."""
        parts = self.parts
        plan, prompts, settings, hooks = parts.plan, parts.prompts, parts.settings, parts.hooks
        cache = self.cache.open(self.open_cache, self.answer_source)
        if parts.divides_rows and DIVIDE not in cache.can:  # a model may make another cache than the kind's
            raise UnsupportedError(
                f"`low_memory` reads beams in parts, and the cache of a {parts.model.info.family} model "
                f"({type(cache).__name__}) can't divide rows; leave `low_memory` out"
            )
        if plan.drafting is not None:
            check_cache(plan.drafting, cache)
        rows = Rows(prompts, plan.pad_token_id)
        reader = self._reader = Reader(
            parts.model,
            cache,
            want=parts.want,
            answer=self.answer,
            answer_source=self.answer_source,
            open_draft_cache=self.open_draft_cache,
            readout=parts.readout,
            chunk=settings.prefill_chunk_size,
            keeps_cache=settings.use_cache is not False,
            prompt_embeds=prompts.embeds,
            reads_whole=prompts.is_whole,
            prompt_lengths=prompts.lengths,
            divides_rows=parts.divides_rows,
        )
        scorer = Scorer(
            reader,
            parts.processors,
            parts.record,
            copies_logits=hooks.has_foreign_processors,
            shows_all_rows=hooks.has_foreign_processors and hooks.knows_places,
        )
        candidates = make_candidates(plan, reader, hooks.observer)
        if settings.prompt_logprobs is not None:
            self.prompt_logprobs = read_prompt_logprobs(reader, rows, settings.prompt_logprobs)
        if plan.do_sample and plan.num_beams == 1:
            vocab = parts.model.info.vocab_size
            prepare_draws(scorer.divide(whole=False)[1], parts.num_decoded_rows, vocab, rows.device)
        finish = Finish(parts.criteria, is_last_forced=plan.is_last_forced)
        if finish.needs_history and plan.num_beams == 1:
            finish.begin([text.tolist() for text in prompts.list_arrays() for _ in range(plan.copies)])
        reader.prefill(rows)
        if plan.copies > 1:
            index = [row for row in range(prompts.num_rows) for _ in range(plan.copies)]
            rows.repeat(index)
            reader.repeat_rows(index, branches=plan.num_beams)
            self.cache.held = reader.cache
        rows.seeds = torch.tensor(make_seeds(plan, prompts.num_rows), dtype=torch.int64, device=rows.seeds.device)
        return make_turns(
            scorer,
            rows,
            finish,
            plan,
            rows_may_leave=not parts.wants_every_row,
            shows_table=hooks.shows_beams,
            stats=self.stats,
            candidates=candidates,
            drafter=make_drafter(plan, scorer, rows, prompts, hooks.assistant, hooks.vocabularies, self.cache.encoded),
            drafting_model=hooks.drafting_owner or hooks.assistant or parts.model,
        )

    # --- after the last ----------------------------------------------------------------------------------
    @explain_shortage("the sequences were put together")
    def sequences(self) -> torch.Tensor:
        """Prompts and new tokens as the reference returns them: (rows, length), padded on the right."""
        own, prompts = self._result().sequences, self.parts.prompts
        if own is not None and prompts.shown is not None:
            return torch.cat((self.parts.prompt_ids, own[:, prompts.width :]), dim=1)
        if own is not None:
            return own
        return append_rows(self.parts.prompt_ids, self.emitted, self.parts.plan.fill_token_id)

    def finish_reasons(self) -> list[str]:
        """Why each row ended; "cancelled" if the caller stopped."""
        return [reason or "cancelled" for reason in self.reasons]

    @property
    def beam_trace(self) -> BeamTrace | None:
        """Every step's candidates of a beam search, if they were asked for."""
        trace: BeamTrace | None = self._result().fields.get("beam_trace")
        return trace

    @property
    def dola_layers(self) -> list[list[int]] | None:
        """The layer that each new token was contrasted with, one per row; None without DoLa."""
        layers: list[list[int]] | None = self.parts.readout.result(self.emitted).get("dola_layers")
        return layers

    @explain_shortage("the output object was built")
    def output(self) -> GenerateOutput:
        """What the reference's `return_dict_in_generate=True` returns."""
        record, has_encoder = self.parts.record, self.parts.prompts.source is not None
        fields: dict[str, Any] = {
            "sequences": self.sequences(),
            "scores": record.scores,
            "logits": record.logits,
            "past_key_values": self.cache.give_out(self.reasons),
            "stats": self.stats,
        }
        fields |= self._result().fields | self.parts.readout.result(self.emitted)
        if record.num_top is not None:
            fields["logprobs"] = self.logprobs
        if not has_encoder:
            fields["prompt_logprobs"] = self.prompt_logprobs
        return build_output(fields, record, self.cache.encoded, is_encoder_decoder=has_encoder)

    def _result(self) -> Result:
        if self._left is not None:
            return self._left
        return Result() if self._turns is None else self._turns.result()


def _count_given(cache: Cache | None, prompts: Prompts) -> int:
    """Tokens of the prompts that a caller's cache holds already."""
    if cache is None or prompts.source is not None:
        return 0
    return sum(map(min, cache.lengths, prompts.lengths))

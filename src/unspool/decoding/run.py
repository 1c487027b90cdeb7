"""One call under way: built from a model, prompts and a plan; iterated for what is emitted; asked for its output."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from unspool.cache import DIVIDE, LEGACY, ROLL_BACK, Cache, find_kind
from unspool.config import GenerationConfig
from unspool.decoding.beams.trace import BeamTrace
from unspool.decoding.choice import find_want, make_candidates, make_readout, make_turns
from unspool.decoding.finish import Finish
from unspool.decoding.loan import Loan
from unspool.decoding.loop import Emitted, Result, Turns, run_turns
from unspool.decoding.preparation import Hooks, build_criteria, build_late_criteria, describe_call, make_seeds
from unspool.decoding.prompt_logprobs import read_prompt_logprobs
from unspool.decoding.prompts import Prompts, join_encoded, mark_columns
from unspool.decoding.randomness import draw_seed
from unspool.decoding.reader import OpenDraftCache, Reader, between_passes, encode_at_once
from unspool.decoding.readouts.base import Readout
from unspool.decoding.record import Record
from unspool.decoding.returns import append_rows, build_output
from unspool.decoding.rows import Rows
from unspool.decoding.scorer import Scorer
from unspool.decoding.speculative.making import check_cache, check_processors, make_drafter
from unspool.decoding.tails import prepare_draws
from unspool.errors import ResourceError, SettingError, UnsupportedError
from unspool.logits import LogitsProcessorList
from unspool.logits.pipeline import build_processors
from unspool.outputs import Output, Stats, TokenLogprob
from unspool.plan import Plan
from unspool.protocols import Answer, Encoded, Model, SourceAnswer, SourceAsk, Want
from unspool.shortage import explain_shortage, is_out_of_memory
from unspool.stopping import StoppingCriteriaList

CAPACITY_AHEAD = 256  # new positions a dynamic cache makes room for at once
CAPACITY_AHEAD_ON_GPU = 2048  # there growing costs more, for a step ahead waits for it


@dataclass(frozen=True, slots=True)
class RunParts:
    """What a run is made of before its first pass."""

    model: Model
    prompts: Prompts
    plan: Plan
    hooks: Hooks
    readout: Readout
    want: Want
    record: Record
    criteria: StoppingCriteriaList
    processors: LogitsProcessorList


class Run:
    """One call: `for emitted in run`, then `run.output()`."""

    def __init__(self, model: Model, prompts: Prompts, plan: Plan, hooks: Hooks) -> None:
        self._model, self._prompts, self._plan, self._hooks = model, prompts, plan, hooks
        self._settings = settings = plan.settings
        self._readout = make_readout(plan, prompts)
        self._readout.observer = hooks.observer
        self._encoded: Encoded | None = None
        self._cache: Cache | None = hooks.cache
        self.num_rows = prompts.num_rows * plan.num_return_sequences
        self.answer: Answer | None = None  # who answers what it asks of its models; None: they themselves, at once
        self.answer_source: SourceAnswer | None = None  # and of their encoders
        self.open_cache: Callable[[], Cache] | None = None  # who makes its cache; None: the model
        self.open_draft_cache: OpenDraftCache | None = None  # and that of a model that drafts
        self._reader: Reader | None = None
        self._turns: Turns | None = None
        self.emitted: list[list[int]] = [[] for _ in range(self.num_rows)]
        self.reasons: list[str | None] = [None] * self.num_rows
        self.logprobs: list[list[TokenLogprob]] = [[] for _ in range(self.num_rows)]
        self.prompt_logprobs: list[list[TokenLogprob | None]] | None = None
        self.added_texts = [""] * self.num_rows  # what healing added to each row's prompt
        self.stats = Stats(prompt_tokens=sum(prompts.lengths if prompts.source is None else prompts.source.lengths))
        self.record = Record(
            scores=bool(settings.output_scores),
            logits=bool(settings.output_logits),
            hidden_states=bool(settings.output_hidden_states),
            attentions=bool(settings.output_attentions),
            logprobs=settings.logprobs,
            observer=hooks.observer,
        )
        self._want = find_want(plan)
        # Built now, so that what can't be raises before the first forward pass.
        self._criteria = build_criteria(plan, hooks)
        self._processors = build_processors(settings, describe_call(model, prompts, plan, hooks), plan.derived)
        if plan.drafting is not None and plan.drafting.is_suggested and not self._takes_suggestion():
            plan = self._plan = replace(plan, drafting=None)
        if plan.drafting is not None:
            check_processors(self._processors)
        if hooks.observer is not None and (prompts.num_rows > 1 or (plan.num_beams == 1 and self.num_rows > 1)):
            raise SettingError(
                f"an observed call follows one text, and this one writes {self.num_rows}; give one prompt, and leave "
                "out `num_return_sequences` or search with num_beams"
            )
        if self._divides_rows and self._cache is None and not find_kind(plan.cache_kind).divides:
            raise UnsupportedError(
                f"`low_memory` reads beams in parts, and a {plan.cache_kind!r} cache can't divide rows; use "
                "cache_implementation='dynamic', 'static' or 'paged', or leave `low_memory` out"
            )

    def _takes_suggestion(self) -> bool:
        """Whether a drafter that nobody asked for goes with everything else: one row, and nothing of the caller's."""
        return (
            self._prompts.num_rows * self._plan.copies == 1
            and not self._wants_every_row()
            and self._hooks.cache is None
            and self._plan.cache_kind == "dynamic"
            and not any(hasattr(processor, "snapshot") for processor in self._processors)
        )

    def __iter__(self) -> Iterator[Emitted]:
        started = time.perf_counter()
        self._criteria.extend(build_late_criteria(self._plan, self._hooks))
        loan = Loan(self._hooks.cache) if self._hooks.cache is not None and not self._hooks.owns_cache else None
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
                raise ResourceError(self._explain_shortage(error)) from error
            raise
        self._close()

    def _explain_shortage(self, error: BaseException) -> str:
        plan, prompts = self._plan, self._prompts
        num_rows = prompts.num_rows * plan.copies
        cause = error.__cause__ or error
        return (
            f"memory ran out in this call, which has {num_rows} rows ({prompts.num_rows} prompts of up to "
            f"{max(prompts.lengths)} tokens) and up to {plan.max_new_tokens} new tokens each, with a {plan.cache_kind} "
            "cache; other calls are not affected. Give fewer or shorter prompts at once, fewer beams or sequences, a "
            "smaller max_new_tokens or prefill_chunk_size, or cache_implementation='quantized' or 'offloaded'. "
            f"Told by the allocator: {str(cause)[:200] or type(cause).__name__}"
        )

    def _iterate(self, started: float) -> Iterator[Emitted]:
        with torch.no_grad():
            turns = self._turns = self._begin()
        for emitted in run_turns(turns, self.stats, started, self._share_threads):
            self._count_passes()
            self.gather(emitted)
            if self._hooks.observer is not None:
                emitted.seen = self._hooks.observer.sum_up(emitted)
            yield emitted

    def _share_threads(self) -> AbstractContextManager[None]:
        """Between passes of the CPU library, its threads have the cores."""
        return between_passes(self._model, self._prompts.num_rows * self._plan.copies)

    def _close(self) -> None:
        """Leave things as the next call wants them."""
        if self._turns is not None:
            self._turns.close()
        if self._reader is not None:
            self._count_passes()
            if self._readout.num_sets > 1 and self._wants_every_row():
                self._reader.close_sets()
        self._forget_padding()

    def _count_passes(self) -> None:
        reader, stats = self._reader, self.stats
        assert reader is not None
        stats.forward_passes, stats.path, stats.path_reason = reader.num_passes, reader.path, reader.path_reason

    def gather(self, emitted: Emitted) -> None:
        """Enter what a turn added to the rows."""
        for row, tokens in emitted.tokens.items():
            self.emitted[row] += tokens
        for row, told in emitted.logprobs.items():
            self.logprobs[row] += told
        for row, reason in emitted.finished.items():
            self.reasons[row] = reason
        if emitted.finished and self._keeps_places() and not all(map(bool, self.reasons)):
            assert self._cache is not None
            self._cache.put_aside(list(emitted.finished))

    def _wants_every_row(self) -> bool:
        return (
            bool(self._hooks.processors or self._hooks.criteria)  # they may know rows by their place
            or (self._hooks.cache is not None and not self._hooks.owns_cache)  # the caller's: no row of it may go
            or bool(self._settings.return_dict_in_generate)  # the cache and the steps' tensors are part of the answer
            or self._readout.needs_every_row
        )

    def _keeps_places(self) -> bool:
        """Whether row `i` of the call is row `i` of the cache to the end, and whoever made the call gets the cache."""
        return self._plan.num_beams == 1 and self._wants_every_row() and not self._settings.return_legacy_cache

    @property
    def parts(self) -> RunParts:
        """What it is made of, for an engine that steps it among others."""
        return RunParts(
            self._model,
            self._prompts,
            self._plan,
            self._hooks,
            self._readout,
            self._want,
            self.record,
            self._criteria,
            self._processors,
        )

    # --- what callers ask of it --------------------------------------------------------------------------
    @property
    def returns_output(self) -> bool:
        """Whether an output object was asked for instead of the sequences alone."""
        return bool(self._settings.return_dict_in_generate)

    @property
    def settings(self) -> GenerationConfig:
        """The call's settings, merged."""
        return self._settings

    @property
    def pad_token_id(self) -> int:
        """What fills rows up."""
        return self._plan.pad_token_id

    @property
    def cache_bytes(self) -> int:
        """Bytes that the keys and values take; 0 before the run has begun, or where the cache does not say."""
        return int(getattr(self._cache, "nbytes", 0))

    @property
    def has_bursts(self) -> bool:
        """Whether rows get different numbers of tokens per step: those that beams agree on, or accepted drafts."""
        return self._plan.num_beams > 1 or self._plan.drafting is not None

    @property
    def tells_beams(self) -> bool:
        """Whether the trace of a beam search was asked for."""
        return bool(self._settings.return_beam_trace)

    @property
    def beam_trace(self) -> BeamTrace | None:
        """Every step's candidates of a beam search, if they were asked for."""
        trace: BeamTrace | None = self._result().fields.get("beam_trace")
        return trace

    @property
    def dola_layers(self) -> list[list[int]] | None:
        """The layer that each new token was contrasted with, one per row; None without DoLa."""
        layers: list[list[int]] | None = self._readout.result(self.emitted).get("dola_layers")
        return layers

    @property
    def prompt_ids(self) -> torch.Tensor:
        """The decoder's prompts as they were given, one for each row of the call."""
        prompts = self._prompts
        given = prompts.ids if prompts.shown is None else prompts.shown
        return given.repeat_interleave(self._plan.num_return_sequences, dim=0)

    @property
    def model(self) -> Model:
        """The model that is decoded from."""
        return self._model

    @property
    def prompt_mask(self) -> torch.Tensor:
        """Which columns of the prompts are real: (prompts, width)."""
        return mark_columns(self._prompts)

    @property
    def stop_strings(self) -> list[str]:
        """The texts that end a row."""
        stops = self._settings.stop_strings
        return [stops] if isinstance(stops, str) else list(stops or [])

    @property
    def keeps_stop_strings(self) -> bool:
        """Whether the stop string stays in the text."""
        return bool(self._settings.keep_stop_strings)

    def prompt_token_ids(self) -> list[list[int]]:
        """The prompts' tokens without padding."""
        prompts = self._prompts
        if prompts.source is not None:
            tokens, lengths = prompts.source.tokens, prompts.source.lengths
            return [] if tokens is None else [tokens[row, :n].tolist() for row, n in enumerate(lengths)]
        return [row.tolist() for row in self.prompt_arrays()]

    def prompt_arrays(self) -> list[np.ndarray]:
        """The same of a decoder's own prompts, as arrays."""
        prompts = self._prompts
        ids = (prompts.ids.cpu() if prompts.on_host is None else prompts.on_host).numpy()
        return [ids[row, max(0, prompts.width - n) :] for row, n in enumerate(prompts.lengths)]

    # --- the prompts -----------------------------------------------------------------------------------
    def _begin(self) -> Turns:
        """Read the prompts, and set the strategy to work on what follows them."""
        plan, prompts, settings = self._plan, self._prompts, self._settings
        if self._cache is None:
            self._cache = self._new_cache() if self.open_cache is None else self.open_cache()
        if self._divides_rows:
            self._cache.require(DIVIDE)  # a model may make another cache than the kind's
        if plan.drafting is not None:
            check_cache(plan.drafting, self._cache)
        rows = Rows(prompts, plan.pad_token_id)
        reader = self._reader = Reader(
            self._model,
            self._cache,
            want=self._want,
            answer=self.answer,
            answer_source=self.answer_source,
            open_draft_cache=self.open_draft_cache,
            readout=self._readout,
            chunk=settings.prefill_chunk_size,
            keeps_cache=settings.use_cache is not False,
            prompt_embeds=prompts.embeds,
            prompt_lengths=prompts.lengths,
            divides_rows=self._divides_rows,
        )
        scorer = Scorer(reader, self._processors, self.record, copies_logits=bool(self._hooks.processors))
        candidates = make_candidates(plan, reader, self.record.observer)
        if settings.prompt_logprobs is not None:
            self.prompt_logprobs = read_prompt_logprobs(reader, rows, settings.prompt_logprobs)
        if plan.do_sample and plan.num_beams == 1:
            vocab = self._model.info.vocab_size
            prepare_draws(scorer.divide(whole=False)[1], prompts.num_rows * plan.copies, vocab, rows.device)
        reader.prefill(rows)
        if plan.copies > 1:
            index = [row for row in range(prompts.num_rows) for _ in range(plan.copies)]
            rows.repeat(index)
            reader.repeat_rows(index, branches=plan.num_beams)
            self._cache = reader.cache
        rows.seeds = torch.tensor(make_seeds(plan, prompts.num_rows), dtype=torch.int64, device=rows.seeds.device)
        assistant = self._hooks.assistant
        return make_turns(
            scorer,
            rows,
            Finish(self._criteria),
            plan,
            rows_may_leave=not self._wants_every_row(),
            shows_table=self._hooks.shows_beams,
            stats=self.stats,
            candidates=candidates,
            drafter=make_drafter(plan, scorer, rows, prompts, assistant, self._hooks.vocabularies),
            drafting_model=assistant or self._model,
        )

    @property
    def _divides_rows(self) -> bool:
        return bool(self._settings.low_memory) and self._plan.num_beams > 1

    def make_cache(self) -> Cache:
        """A cache as it would make for itself, with what its encoder reads: for an engine that steps its rows."""
        return self._new_cache()

    def _new_cache(self) -> Cache:
        plan, prompts, settings = self._plan, self._prompts, self._settings
        source = prompts.source
        if source is not None:
            ask = SourceAsk(self._model, source.tokens, source.lengths, self._want, source.embeds)
            self._encoded = source.encoded or (self.answer_source or encode_at_once)(ask)
        longest = self._readout.longest_prompt(prompts.lengths)
        last = longest + plan.max_new_tokens
        kind = find_kind(plan.cache_kind)
        told = dict(plan.cache_config or {})
        room = settings.max_cache_len or told.get("max_cache_len") or 0
        if kind.is_sized or (kind.may_be_sized and room):
            capacity = max(room, last + plan.num_candidates)  # they lie past the row's end
            if kind.may_be_sized:
                told["max_cache_len"] = capacity
            rows = prompts.num_rows * plan.copies * self._readout.num_sets
            if not settings.low_memory and not (kind.forks and "forks" in self._model.info.can):
                rows *= max(1, plan.num_candidates)  # they are read in copies of their row
        else:
            # Beams grow beside the prompt, in a cache of their own.
            ahead = CAPACITY_AHEAD_ON_GPU if self._model.device.type == "cuda" else CAPACITY_AHEAD
            capacity = longest if plan.num_beams > 1 else min(last, longest + ahead)
            rows = prompts.num_rows * self._readout.num_sets
        given = {"config": told} if told else {}
        return self._model.new_cache(plan.cache_kind, rows, capacity, encoded=self._encode_all(), **given)

    def _encode_all(self) -> Encoded | None:
        """What the decoder's rows read: the sources and, beside them, the negative prompts of guidance."""
        negative = self._prompts.negative
        if self._encoded is None or negative is None:
            return self._encoded
        other = (self.answer_source or encode_at_once)(SourceAsk(self._model, negative.tokens, negative.lengths))
        return join_encoded(self._encoded, other)

    def find_held(self) -> tuple[list[int], Cache] | None:
        """The tokens that a call of one row has read, and the cache that holds them; None if it was let go."""
        cache = self._cache
        if self.num_rows != 1 or self._plan.num_beams > 1 or not self._wants_every_row() or cache is None:
            return None
        tokens = self.prompt_token_ids()[0] + self.emitted[0]
        return tokens[: cache.lengths[0]], cache

    def _forget_padding(self) -> None:
        """Roll the cache's rows that ended early back to their own tokens, so that they can be continued."""
        cache = self._cache
        assert cache is not None
        if self._plan.num_beams > 1 or not self._wants_every_row():
            return  # rows have left and nobody gets the cache
        cache.take_back()
        if ROLL_BACK not in cache.can:
            return
        # Where the last token was read to be chosen: the next call expects it unread.
        unread = 1 if self._turns is not None and self._turns.reads_choice and any(self.emitted) else 0
        if self._settings.return_legacy_cache:  # tuples must keep one length
            cache.truncate([max(0, held - unread) for held in cache.lengths])
            return
        copies = self._plan.num_return_sequences
        prompts = [length for length in self._prompts.lengths for _ in range(copies)]
        real = [length + len(tokens) - unread for length, tokens in zip(prompts, self.emitted, strict=True)]
        cache.truncate([min(held, length) for held, length in zip(cache.lengths, real, strict=True)])

    # --- after the last ----------------------------------------------------------------------------------
    @explain_shortage("the sequences were put together")
    def sequences(self) -> torch.Tensor:
        """Prompts and new tokens as the reference returns them: (rows, length), padded on the right."""
        own = self._result().sequences
        if own is not None and self._prompts.shown is not None:
            return torch.cat((self.prompt_ids, own[:, self._prompts.width :]), dim=1)
        if own is not None:
            return own
        return append_rows(self.prompt_ids, self.emitted, self._plan.fill_token_id)

    def settle_seed(self) -> int | None:
        """The seed that tokens are drawn with, drawn now if none was given; None if nothing is drawn."""
        if not self._plan.do_sample:
            return None
        if not self._plan.seeds:
            self._plan = replace(self._plan, seeds=(draw_seed(),))
        assert self._plan.seeds is not None
        return self._plan.seeds[0]

    def finish_reasons(self) -> list[str]:
        """Why each row ended; "cancelled" if the caller stopped."""
        return [reason or "cancelled" for reason in self.reasons]

    @explain_shortage("the output object was built")
    def output(self) -> Output:
        """What the reference's `return_dict_in_generate=True` returns."""
        record, has_encoder = self.record, self._prompts.source is not None
        fields: dict[str, Any] = {
            "sequences": self.sequences(),
            "scores": record.scores,
            "logits": record.logits,
            "past_key_values": self._returned_cache(),
            "stats": self.stats,
        }
        fields |= self._result().fields | self._readout.result(self.emitted)
        if record.num_top is not None:
            fields["logprobs"] = self.logprobs
        if not has_encoder:
            fields["prompt_logprobs"] = self.prompt_logprobs
        return build_output(fields, record, self._encoded, is_encoder_decoder=has_encoder)

    def _result(self) -> Result:
        return Result() if self._turns is None else self._turns.result()

    def _returned_cache(self) -> Any:
        if self._settings.use_cache is False or self._cache is None:  # the latter: stopped before it began
            return None
        cache: Any = self._cache.merge()
        if self._settings.return_legacy_cache and LEGACY in cache.can:
            return cache.to_legacy_cache()
        return cache

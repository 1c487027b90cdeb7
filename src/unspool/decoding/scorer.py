"""From passes to scores: the readout, the processors, and what is kept of both."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from unspool.cache import ROLL_BACK, Cache
from unspool.decoding.arguments import find_arguments, list_asked, pick_arguments
from unspool.decoding.forwards import take_first_rows, take_position
from unspool.decoding.observer import Observer, ProcessorStep, Scored
from unspool.decoding.reader import Reader
from unspool.decoding.readouts.base import Scores
from unspool.decoding.record import Record
from unspool.decoding.rows import Joining, Rows
from unspool.errors import NoTokenLeftError
from unspool.kernels.sending import send
from unspool.logits import LogitsProcessorList
from unspool.logits.alone import unwrap
from unspool.logits.blame import explain_no_token
from unspool.logits.diversity import HammingDiversityLogitsProcessor
from unspool.logits.fused import FusedTail, split_tail
from unspool.protocols import Forward, Want


class Scorer:
    """The processors of one call behind a reader: `next_logits` scores every row's next token."""

    def __init__(
        self,
        reader: Reader,
        processors: LogitsProcessorList,
        record: Record,
        *,
        copies_logits: bool = False,
        shows_all_rows: bool = False,
    ) -> None:
        self.reader = reader
        self.record = record
        self._readout = reader.readout
        self._copies_logits = copies_logits  # a caller's own processor may write into what it is given
        self._shows_all_rows = shows_all_rows  # and may know rows by their place: it is shown all of them
        self._given: torch.Tensor | None = None  # the last step's logits, as the processors were given them at last
        self._logits: torch.Tensor | None = None  # as they came, if log-probabilities are asked for
        self._before: torch.Tensor | None = None  # the step's before it, if the cache can't go back to that one
        self._follow_processors(processors)

    def next_logits(
        self, rows: Rows, *, whole: bool = True, normalise: bool = False, want: Want | None = None
    ) -> Scores:
        """Read what the cache has not seen of each row, and score the next token.

        If the scores of the `whole` vocabulary are not wanted, the end of the chain may be left to the draw.
        With `normalise` the processors are given log-probabilities, as beam methods need them. With `want` a pass is to
        return that, instead of what passes of the reader return; an epilogue that it asks for has done the processors'
        work.
        """
        if "host_ids" in self._takes:
            rows.fetch_history()  # behind the pass, a copy would wait for it
        result = self._read(rows, normalise=normalise, want=want)
        if want is not None and result.epilogue is not None:
            return result
        if self.processors:
            result.likeliest = result.epilogue = None  # they are of other scores
            given = result.scores
            processors = self.processors
            if not whole and self._tail is not None and not self.record.keeps_scores:
                processors, result.tail = self._head, self._tail
            extra = find_arguments(self._takes, rows)
            if not self._readout.is_plain and "logits" in self._takes:
                extra["logits"] = result.logits
            history, observer = rows.history(), self.record.observer
            result.scores = self._process(processors, history, result.logits, given, extra, observer)
        elif self.record.observer is not None:
            self.record.observer.see(Scored(result.logits, result.scores, result.scores, ()))
        if self.record.keeps_steps:
            self.record.keep_scores(result.logits, result.scores)
        return result

    def next_unprocessed(self, rows: Rows) -> torch.Tensor:
        """The logits (rows, vocab) of every row's next token, for a caller that does the processors' work, which is no
        more than what `find_forbidden` says."""
        want = None
        if rows.device.type == "cpu":
            want = replace(self.reader.want, finds_likeliest=False)
        return self._read(rows, normalise=False, want=want).scores

    def next_groups(
        self,
        rows: Rows,
        groups: Sequence[Sequence[int]],
        index: Sequence[torch.Tensor],
        current_tokens: torch.Tensor,
    ) -> Iterator[torch.Tensor]:
        """Score the next tokens of groups of rows in turn: each sees in `current_tokens` (rows,) what those before it
        have chosen. `index` has the groups where the rows are. Yields each group's processed log-probabilities (rows of
        the group, vocab)."""
        result, history = self._read(rows, normalise=True), rows.history()
        whole = torch.zeros_like(result.logits) if self.record.keeps_steps else None
        if self.record.observer is not None:
            self.record.observer.see(Scored(result.logits, result.scores, result.scores, ()))
        for number, (places, own) in enumerate(zip(groups, index, strict=True)):
            extra = pick_arguments(find_arguments(self._takes, rows), own, places)
            shown, given = (take_rows(values, places, own) for values in (history, result.scores))
            if self._copies_logits:
                shown, given = shown.clone(), given.clone()
            scores = self.processors.select_rows(own)(
                shown,
                given,
                current_tokens=current_tokens,
                beam_group_idx=number,
                **extra,
            )
            if whole is not None:
                whole[own] = scores
            yield scores
        if whole is not None:
            self.record.keep_scores(result.logits, whole)

    @property
    def diversity(self) -> float | None:
        """The penalty between groups, if nothing else tells groups of rows apart, and nobody looks at what it makes of
        the scores: then it can be left to the choice, in steps of which `leaves_diversity` says so."""
        place = self._find_diversity()
        if place is None or self._copies_logits or self.record.keeps_steps:
            return None
        processor = self.processors[place]
        assert isinstance(processor, HammingDiversityLogitsProcessor)
        return processor.diversity_penalty

    def _find_diversity(self) -> int | None:
        places = [n for n, one in enumerate(self.processors) if type(one) is HammingDiversityLogitsProcessor]
        return places[0] if len(places) == 1 else None

    def leaves_diversity(self, rows: Rows) -> bool:
        """Whether processors behind the `diversity` do no more in the next step than forbid tokens, so that it may as
        well come after them."""
        place = self._find_diversity()
        assert place is not None
        behind = LogitsProcessorList(self.processors[place + 1 :], starts=self.processors.starts)
        return self._find_forbidden(behind, rows) is not None

    def next_undivided(self, rows: Rows) -> tuple[torch.Tensor, tuple[int, ...] | None]:
        """Score every row's next token but for the `diversity`: log-probabilities (rows, vocab), or logits and the
        tokens that are forbidden of them, which is all that the other processors do then."""
        place = self._find_diversity()
        assert place is not None
        others = [*self.processors[:place], *self.processors[place + 1 :]]
        head = LogitsProcessorList(others, starts=self.processors.starts)
        forbidden = self._find_forbidden(head, rows) if self._readout.is_plain else None
        if forbidden is not None and (not forbidden or rows.device.type == "cpu"):
            return self.next_unprocessed(rows), forbidden
        scores = self._read(rows, normalise=True).scores
        return head(rows.history(), scores, **find_arguments(self._takes, rows)) if head else scores, None

    def _process(
        self,
        processors: LogitsProcessorList,
        history: torch.Tensor,
        logits: torch.Tensor,
        given: torch.Tensor,
        extra: Mapping[str, Any],
        observer: Observer | None,
    ) -> torch.Tensor:
        """The scores after the processors; an observer sees each one's work.

        Where they leave nothing of the few tokens that the readout left, the model's own logits stand in: they forbid
        as much of these.
        """
        steps: list[ProcessorStep] = []
        scores = self._apply(processors, history, given, extra, None if observer is None else steps)
        if self._readout.cuts:
            is_lost = ~((scores > -torch.inf) & (given > -torch.inf)).any(dim=-1, keepdim=True)
            if bool(is_lost.any()):
                given = torch.where(is_lost, logits, given)
                steps.clear()
                again = self._apply(processors, history, given, extra, None if observer is None else steps)
                scores = torch.where(is_lost, again, scores)
        if observer is not None:
            observer.see(Scored(logits, given, scores, steps))
        return scores

    def _apply(
        self,
        processors: LogitsProcessorList,
        history: torch.Tensor,
        given: torch.Tensor,
        extra: Mapping[str, Any],
        steps: list[ProcessorStep] | None,
    ) -> torch.Tensor:
        """The scores after the processors; the work of each is added to `steps`."""
        if steps is None:
            return processors(history, given.clone() if self._copies_logits else given, **extra)
        scores = given
        for processor in processors:
            alone = LogitsProcessorList([processor], starts=processors.starts)
            after = alone(history, scores.clone() if self._copies_logits else scores, **extra)
            steps.append(ProcessorStep(unwrap(processor), scores, after))
            scores = after
        return scores

    def _read(self, rows: Rows, *, normalise: bool, want: Want | None = None) -> Scores:
        """The logits for every row's next token, as the readout makes them of a pass."""
        forward = self.reader.next(rows, want)
        if self.record.keeps_states:
            self._keep_states(forward, rows)
        result = self._readout.read(forward, rows, normalise=normalise)
        if ROLL_BACK not in self.reader.cache.can:
            self._before = self._given
        self._given = result.logits if self._readout.cuts else result.scores
        if self.record.num_top is not None:
            self._logits = result.logits
        return result

    def forget(self, num_steps: int) -> None:
        """Undo the last steps, each of one token per row."""
        self.reader.forget(num_steps)
        self._readout.forget(num_steps)
        self._given, self._before = self._before, None

    def _keep_states(self, forward: Forward, rows: Rows) -> None:
        starts, counts = self.reader.starts[: len(rows)], self.reader.counts[: len(rows)]
        if self._readout.num_sets > 1:
            forward = take_first_rows(forward, starts, counts)
        self.record.keep_forward(forward, rows.pads(), starts, counts)

    # --- several positions at once -------------------------------------------------------------------
    def keep_tried(self, forward: Forward, rows: Rows, num_taken: Sequence[int], *, is_prompt: bool) -> None:
        """Keep what a check returned for the positions of each row that were accepted, one entry each."""
        if not self.record.keeps_states or not any(num_taken):
            return
        if is_prompt:
            self._keep_states(forward, rows)
            return
        if len(rows) > 1:
            self.record.keep_taken(forward, rows.pads(), self.reader.starts, num_taken)
            return
        num_new, start = self.reader.counts[0], self.reader.starts[0]
        for place in range(num_taken[0]):
            self.record.keep_forward(take_position(forward, place, num_new), rows.pads(), [start + place], [1])

    def foresee(self, rows: Rows, drafts: Sequence[list[int]]) -> None:
        """Let processors that keep states read drafts at once that will be scored position by position."""
        able = [processor for processor in self.processors if hasattr(processor, "foresee")]
        if able and any(drafts):
            ends = rows.ends
            shown = {width: rows.read_history(width) for width in set(ends)}
            listed = [shown[width][place].tolist() for place, width in enumerate(ends)]
            for processor in able:
                processor.foresee(listed, drafts, rows.device)

    def score_places(
        self, rows: Rows, logits: torch.Tensor, places: Sequence[int], *, whole: bool, is_draft: bool = True
    ) -> torch.Tensor:
        """Process the logits (rows, vocab) of the next token of the rows at `places`; others' scores mean nothing.

        Without `whole`, the fused tail is left to the draw. A drafter's scores are not shown to an observer.
        Processors count columns, and after drafts of different fortune rows end in different ones: those that end alike
        are shown together.
        """
        processors = self.processors if whole or self._tail is None else self._head
        given = logits.clone() if self._copies_logits else logits
        observer = None if is_draft else self.record.observer
        if not processors:
            if observer is not None:
                observer.see(Scored(logits, logits, logits, ()))
            return given
        ends = rows.ends
        groups: dict[int, list[int]] = {}
        for place in places:
            groups.setdefault(ends[place], []).append(place)
        if len(groups) == 1 and (self._shows_all_rows or len(places) == len(rows)):
            extra = find_arguments(self._takes, rows, ends[places[0]])
            return self._process(processors, rows.history(ends[places[0]]), logits, given, extra, observer)
        scores = given.clone()
        for width, members in groups.items():
            index = send(members, logits.device)
            extra = find_arguments(self._takes, rows, width)
            if self._shows_all_rows:
                scores[index] = processors(rows.history(width), given.clone(), **extra)[index]
                continue
            chosen = processors.select_rows(index)
            scores[index] = chosen(rows.history(width)[index], given[index], **pick_arguments(extra, index, members))
        return scores

    # --- what others ask -----------------------------------------------------------------------------
    @property
    def tail(self) -> FusedTail | None:
        """The end of the chain that can be done with the draw."""
        return self._tail

    @property
    def can_choose(self) -> bool:
        """Whether tokens can be chosen from a step's logits alone, before the step's turn comes: nothing is kept of it,
        and no processor is a caller's own."""
        return self._readout.is_plain and not self.record.keeps_any and not self._copies_logits

    def divide(self, *, whole: bool) -> tuple[LogitsProcessorList, FusedTail | None]:
        """The processors, and their end if it is left to the draw, which needs no scores of the `whole` vocabulary."""
        return (self.processors, None) if whole or self._tail is None else (self._head, self._tail)

    @property
    def given(self) -> torch.Tensor | None:
        """The last step's logits (rows, vocab), as the processors were given them."""
        return self._given

    @property
    def logits(self) -> torch.Tensor:
        """The last step's logits (rows, vocab), as the model gave them, in a call that asks for log-probabilities."""
        assert self._logits is not None
        return self._logits

    @property
    def changes_logits(self) -> bool:
        """Whether scores are more than the model's logits."""
        return bool(self.processors) or not self._readout.is_plain

    def find_forbidden(self, rows: Rows, *, whole: bool = True, ahead: int = 0) -> tuple[int, ...] | None:
        """The tokens that the processors, as `divide` gives them, take from every row's scores so many tokens ahead, if
        they do nothing else to them."""
        return self._find_forbidden(self.divide(whole=whole)[0], rows, ahead)

    def _find_forbidden(self, processors: LogitsProcessorList, rows: Rows, ahead: int = 0) -> tuple[int, ...] | None:
        if not processors:
            return ()
        ends = rows.ends
        has_padding = "pads" in self._takes and rows.padding() is not None
        return None if has_padding or min(ends) < max(ends) else processors.find_forbidden(ends[0] + ahead)

    def find_forbidden_ahead(
        self, rows: Rows, num_steps: int, *, whole: bool = True
    ) -> tuple[int, tuple[int, ...] | None]:
        """How many of the next steps, up to `num_steps`, have the same forbidden tokens, and which."""
        forbidden = self.find_forbidden(rows, whole=whole)
        if forbidden is not None and self.divide(whole=whole)[0]:
            ahead = range(1, num_steps)
            others = (n for n in ahead if self.find_forbidden(rows, whole=whole, ahead=n) != forbidden)
            num_steps = next(others, num_steps)
        return num_steps, forbidden

    @property
    def reads_host(self) -> bool:
        """Whether a processor reads the history on the host."""
        return "host_ids" in self._takes

    @property
    def looks_back(self) -> bool:
        """Whether a processor before the fused tail has to see the history, position by position."""
        return bool(self._head) if self._tail is not None else bool(self.processors)

    @property
    def has_custom_processors(self) -> bool:
        """Whether a caller's own processors run in a step."""
        return self._copies_logits

    def explain_no_token(self, rows: Rows, place: int) -> NoTokenLeftError:
        """Which processors left the row at `place` without a token, found by running them one by one again."""
        assert self._given is not None
        return self.blame(rows, self._given, place)

    def blame(
        self, rows: Rows, logits: torch.Tensor, place: int, history: torch.Tensor | None = None
    ) -> NoTokenLeftError:
        """Which processors left the row at `place` without a token, from logits (rows, vocab) of its next one.

        `history` is what they saw, if rows have moved since. Groups of beams are judged as the first one is, whose
        tokens no other group has lowered.
        """
        width = rows.ends[place]
        return explain_no_token(
            self.processors,
            rows.history(width) if history is None else history,
            logits,
            {
                **find_arguments(self._takes, rows, width),
                "current_tokens": rows.history(width)[:, -1],
                "beam_group_idx": 0,
            },
            place=place,
            where=f"row {rows.numbers[place]}, at position {rows.lengths[place]}",
        )

    def keep_rows(self, index: Sequence[int]) -> None:
        """Let the cache and the processors follow rows that stay while others leave."""
        self.reader.keep_rows(index)
        self._follow_processors(self.processors.select_rows(torch.tensor(list(index))))

    def admit(self, others: Sequence[Scorer], cache: Cache, joining: Joining) -> None:
        """Take in the rows of other scorers, after these; `cache` holds the keys of all."""
        self.reader.admit([one.reader for one in others], cache, joining)
        self._given = self._before = None
        self._copies_logits = self._copies_logits or any(one._copies_logits for one in others)
        self._shows_all_rows = self._shows_all_rows or any(one._shows_all_rows for one in others)
        processors, held, shift = self.processors, joining.counts[0], joining.shifts[0]
        if processors or any(one.processors for one in others):
            for other, count, own in zip(others, joining.counts[1:], joining.shifts[1:], strict=True):
                processors = processors.join_rows(other.processors, (held, count), (shift, own))
                held, shift = held + count, 0
            self._follow_processors(processors)

    def _follow_processors(self, processors: LogitsProcessorList) -> None:
        self.processors = processors
        self._head, self._tail = split_tail(processors)
        self._takes = list_asked(processors)


def take_rows(values: torch.Tensor, places: Sequence[int], index: torch.Tensor) -> torch.Tensor:
    """The rows at `places`, which `index` has on their device; a part of the values if they stand side by side."""
    first, stop = places[0], places[0] + len(places)
    return values[first:stop] if list(places) == list(range(first, stop)) else values.index_select(0, index)

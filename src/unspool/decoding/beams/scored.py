"""Diverse and constrained beam search: a beam scorer decides which continuations go on."""

from __future__ import annotations

import math
from collections.abc import Iterator, MutableMapping, Sequence
from functools import partial
from typing import Any

import torch

from unspool.beams.hypotheses import Hypothesis
from unspool.beams.offers import BeamOffers, list_offers, pack_offers, read_offers
from unspool.beams.result import pick_best
from unspool.beams.scorer import BeamSearchScorer, HypothesisScorer, RunningBeams
from unspool.decoding.beams.moves import Moves
from unspool.decoding.beams.notes import VerdictNotes
from unspool.decoding.beams.reports import make_reports
from unspool.decoding.beams.selection import (
    Best,
    find_best,
    read_best,
    read_groups,
    select_groups,
)
from unspool.decoding.beams.settings import NEVER, BeamSettings
from unspool.decoding.beams.trace import BeamTrace
from unspool.decoding.finish import Finish
from unspool.decoding.loop import LiveBeam, Result
from unspool.decoding.rows import Rows
from unspool.decoding.scorer import Scorer, take_rows
from unspool.kernels.sending import fetch, fetch_once, send


class ScoredBeams:
    """What both have in common: running scores, the beam scorer's verdict, and the sequences it settles on."""

    def __init__(
        self,
        scorer: Scorer,
        rows: Rows,
        finish: Finish,
        settings: BeamSettings,
        judge: HypothesisScorer,
        *,
        max_length: int,
        trace: BeamTrace | None = None,
    ) -> None:
        self._scorer, self._rows, self._finish, self._settings, self._judge = scorer, rows, finish, settings, judge
        self._eos = list(settings.eos_token_ids) or None
        self._max_length = max_length
        self._prompts = rows.history()  # (rows, width): beams of a prompt begin alike, so they may move
        self._width = self._prompts.shape[1]
        self._prompts_on_host: torch.Tensor | None = None
        self._num_prompts = len(rows) // settings.num_beams
        self._size = settings.num_beams // settings.num_groups
        self.reports = make_reports(scorer, settings, self._num_prompts)
        self._offered: list[tuple[int, int]] = []  # rows and tokens of the step's candidates, to report them
        self._trace = trace
        self._notes = None if trace is None else VerdictNotes(trace, judge, settings.eos_token_ids, self._explain_end)
        self._num_tokens = 0
        # What the rows have so far, on the host: log-probabilities (one beam of each group begins), new tokens, and the
        # rows that each token came from.
        self._running: torch.Tensor | None = None  # the first where the rows are, if the last step was decided there
        self._totals = [0.0 if row % self._size == 0 else NEVER for row in range(len(rows))]
        self._written: list[tuple[int, ...]] = [() for _ in range(len(rows))]
        self._origins: list[tuple[int, ...]] = [() for _ in range(len(rows))]
        self._chosen: list[int] = []  # by the group that was judged last
        self._is_done = False
        self._last: tuple[torch.Tensor, torch.Tensor] | None = None  # tokens and parents looked at last
        self._final: MutableMapping[str, Any] | None = None
        self._ends_apart = rows.hides_padding or finish.asks_alone  # no prompt's search waits for another's
        self._reasons: dict[int, Sequence[str | None]] = {}  # of prompts that were over before others
        self._returned: list[list[tuple[list[int], str]]] = []  # of each prompt, once it is over

    def is_done(self) -> bool:
        """Whether the beam scorer, or every row's stop, has ended the search."""
        return self._is_done

    def choose(self) -> Moves:
        """What every row goes on with."""
        raise NotImplementedError

    def _enter(self, parents: Sequence[int], tokens: Sequence[int], totals: Sequence[float]) -> None:
        """Note what every row goes on from, its next token and its log-probability."""
        self._written = [(*self._written[parent], token) for parent, token in zip(parents, tokens, strict=True)]
        self._totals = list(totals)
        if self.reports is not None:
            self.reports.note(self._scorer.logits, self._offered, parents, tokens)
            self._offered = []

    def _read_ids(self) -> torch.Tensor:
        """The rows' sequences on the host: prompts, and what is written."""
        if self._prompts_on_host is None:
            self._prompts_on_host = fetch(self._prompts).read()
        return torch.cat((self._prompts_on_host, torch.tensor(self._written, dtype=torch.int64)), dim=1)

    def follow(self) -> None:
        """See whether that was the end, and let the beam scorer settle if it was."""
        self._num_tokens += 1
        rows, newest = self._rows, [written[-1] for written in self._written]
        if rows.device.type != "cpu" and self._running is None:
            rows.expect_last(fetch(torch.tensor(newest)))  # they are on the host: nobody has to fetch them
        reasons = self._finish.explain_rows(rows, [[token] for token in newest], self._scorer.record.scores)
        if self._ends_apart and self._num_prompts > 1:
            self._end_some(reasons)
        self._is_done = bool(self._judge.is_done) or all(reason is not None for reason in reasons)
        if self._is_done:
            self._settle(reasons)

    def _end_some(self, reasons: Sequence[str | None]) -> None:
        """Let the search of a prompt whose rows are all to end be over, as it would be alone."""
        size = self._settings.num_beams
        for prompt in range(self._num_prompts):
            own = reasons[prompt * size : (prompt + 1) * size]
            if all(reason is not None for reason in own) and not self._is_over(prompt):
                running = RunningBeams(self._read_ids(), self._totals, self._list_origins(), self._num_tokens)
                self._judge.end_row(prompt, running)
                self._reasons[prompt] = own
        over = [prompt for prompt in range(self._num_prompts) if self._is_over(prompt)]
        self._rows.padded = [prompt * size + beam for prompt in over for beam in range(size)]

    def _is_over(self, prompt: int) -> bool:
        return all(self._judge.is_over(prompt, group) for group in range(self._settings.num_groups))

    def _explain_end(self, num_tokens: int) -> str:
        """Why a hypothesis ended that has an end token as the last of so many new tokens."""
        return "length" if self._finish.cuts_at(self._width + num_tokens) else "eos"

    def _check_candidates(
        self, best: Sequence[Sequence[float]], beams: Sequence[Sequence[int]], group: int, places: Sequence[int]
    ) -> None:
        """Raise if a candidate of a group's rows, which stand at `places`, is no number, or if none is possible and
        nothing is finished. `best` are the log-probabilities, one list per prompt, of what continues `beams`."""
        for prompt, (totals, continued) in enumerate(zip(best, beams, strict=True)):
            numbers = zip(totals, continued, strict=True)
            spoilt = min((beam for total, beam in numbers if not total < math.inf), default=None)
            is_stuck = max(totals) <= NEVER / 2 and not self._judge.finished(prompt, group)
            if (spoilt is not None or is_stuck) and not self._judge.is_over(prompt, group):
                raise self._scorer.explain_no_token(self._rows, places[prompt * self._size + (spoilt or 0)])

    def _offer(self, tokens: torch.Tensor, beams: torch.Tensor, places: Sequence[int]) -> None:
        """Note a step's candidates, (prompts, candidates) each, if they may have to be reported: `beams` count from the
        first row of each prompt, of those that stand at `places`."""
        if self.reports is None:
            return
        for prompt, both in enumerate(zip(beams.tolist(), tokens.tolist(), strict=True)):
            first = prompt * self._size
            self._offered += [(places[first + beam], token) for beam, token in zip(*both, strict=True)]

    def _stay_home(self, place: int, source: int) -> int:
        """The row to go on from: the scorer sends rows of prompts that are done to row 0, where they have no place."""
        num_beams = self._settings.num_beams
        return source if source // num_beams == place // num_beams else place

    def _settle(self, reasons: Sequence[str | None]) -> None:
        """Let the beam scorer choose what is returned; `reasons` say why each row must end, if it does."""
        assert self._last is not None
        tokens, parents = self._last
        self._final = final = self._judge.finalize(
            self._read_ids(),
            torch.tensor(self._totals),
            tokens,
            parents,
            max_length=self._max_length,
            pad_token_id=self._rows.pad_token_id,
            eos_token_id=self._eos,
            beam_indices=self._list_origins(),
            decoder_prompt_len=self._width,
        )
        row, longest, sequences = 0, self._width, final["sequences"]
        for prompt in range(self._num_prompts):
            returned = []
            for group, hypothesis in self._pick_returned(prompt):
                ending = self._judge.find_ending(hypothesis)
                was_running = ending.beam is not None
                first = prompt * self._settings.num_beams + group * self._size
                reason = self._explain_end(ending.step)
                if ending.beam is not None:
                    early = self._reasons.get(prompt)
                    given = reasons[first + ending.beam] if early is None else early[group * self._size + ending.beam]
                    reason = given or "length"
                length = len(hypothesis.tokens) + (not was_running)  # its end token is not among its tokens
                sequences[row, length:] = self._rows.pad_token_id  # a stop other than an end token is closed with none
                returned.append((sequences[row, self._width : length].tolist(), reason))
                row, longest = row + 1, max(longest, length)
                if self._notes is not None:
                    self._notes.note_returned(prompt, group, ending, reason)
            self._returned.append(returned)
        final["sequences"] = sequences[:, :longest]

    def _pick_returned(self, prompt: int) -> list[tuple[int, Hypothesis]]:
        """The hypotheses of a prompt that are returned, best first, each with its group."""
        groups = range(self._settings.num_groups)
        found = [(group, one) for group in groups for one in self._judge.finished(prompt, group)]
        best = pick_best([one for _, one in found], self._settings.num_returned)
        return [next(pair for pair in found if pair[1] is one) for one in best]

    def _list_origins(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self._origins)

    # --- what is returned ----------------------------------------------------------------------------
    def list_live(self, prompt: int) -> list[list[int]]:
        """New tokens of the running beams and of the finished hypotheses."""
        return [beam.tokens for beam in self.list_table(prompt)]

    def list_returned(self, prompt: int) -> list[tuple[list[int], str]] | None:
        """New tokens and reasons of what the beam scorer settled on."""
        return self._returned[prompt] if self._is_done else None

    def list_table(self, prompt: int) -> list[LiveBeam]:
        """The running beams by their log-probabilities, then the finished hypotheses by their scores."""
        if self._is_done:
            return []
        settings = self._settings
        own = slice(prompt * settings.num_beams, (prompt + 1) * settings.num_beams)
        running = zip(self._written[own], self._totals[own], strict=True)
        beams = [LiveBeam(list(tokens), score, None) for tokens, score in running]
        for group in range(settings.num_groups):
            for (score, tokens, _), _, _, _, end_token in self._judge.list_endings(prompt, group):
                ended = [*tokens[self._width :].tolist(), *([] if end_token is None else [end_token])]
                beams.append(LiveBeam(ended, score, self._explain_end(len(ended))))
        return beams

    def result(self) -> Result:
        """The scores and origins of the sequences returned; the reference returns neither without scores."""
        fields: dict[str, Any] = {"sequences_scores": None, "beam_indices": None, "beam_trace": self._trace}
        if self._final is None:
            return Result(fields)
        if self._settings.returns_scores:
            fields["sequences_scores"] = self._final["sequence_scores"]
            fields["beam_indices"] = self._final["beam_indices"]
        return Result(fields, sequences=self._final["sequences"].to(self._rows.device))


class GroupBeams(ScoredBeams):
    """Diverse beam search: groups choose one after the other, and avoid what those before them chose.

    Vijayakumar et al., 2016: https://arxiv.org/abs/1610.02424
    """

    _judge: BeamSearchScorer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        size, num_beams = self._size, self._settings.num_beams
        self._groups = [
            [prompt * num_beams + beam for prompt in range(self._num_prompts) for beam in range(first, first + size)]
            for first in range(0, num_beams, size)
        ]
        # One prompt's groups are parts of its rows.
        self._parts = [slice(group[0], group[0] + size) if self._num_prompts == 1 else group for group in self._groups]
        self._places = [send(group, self._rows.device) for group in self._groups]
        self._ends = send(self._settings.eos_token_ids, self._rows.device)
        self._end_ids = frozenset(self._settings.eos_token_ids)
        is_watched = self._notes is not None or self.reports is not None
        self._penalty = None if is_watched else self._scorer.diversity  # if it can be left to the choice

    def choose(self) -> Moves:
        """What all groups go on with: decided at once where nothing but the penalty tells them apart."""
        groups = range(len(self._groups))
        goes_on = not any(self._judge.is_over(row, group) for row in range(self._num_prompts) for group in groups)
        if self._penalty is not None and goes_on and self._scorer.leaves_diversity(self._rows):
            return self._choose_at_once(self._penalty)
        return self._choose_in_turn(goes_on)

    def _choose_at_once(self, penalty: float) -> Moves:
        rows, settings = self._rows, self._settings
        running = send(self._totals, rows.device, torch.float32) if self._running is None else self._running
        scores, forbidden = self._scorer.next_undivided(rows)
        selection = select_groups(
            scores,
            running,
            self._ends,
            settings,
            penalty,
            is_normalised=forbidden is None,
            forbidden=forbidden or (),
        )
        listed = fetch_once(selection.packed).read(read_groups)
        parents, tokens_of, totals = list(range(len(rows))), [0] * len(rows), list(self._totals)
        before = list(self._origins)
        for number, (group, (tokens, beams, best)) in enumerate(zip(self._groups, listed, strict=True)):
            self._check_candidates(best, beams, number, group)
            offers = BeamOffers(
                find_ids=partial(self._read_group, group),
                length=self._width + self._num_tokens + 1,
                candidates=list_offers(tokens, best, beams, self._size),
                end_ids=self._end_ids,
                pad_id=rows.pad_token_id,
                ancestry=self._list_origins(),
                prompt_length=self._width,
            )
            for place, (token, total, source) in zip(group, self._judge.decide(offers, number), strict=True):
                parents[place] = group[source]
                self._origins[place] = (*before[group[source]], source)
                tokens_of[place], totals[place] = token, total
        self._enter(parents, tokens_of, totals)
        self._running, self._last = selection.running, (selection.tokens, selection.parents)
        return Moves(parents, selection.tokens, selection.parents)

    def _read_group(self, group: list[int]) -> torch.Tensor:
        return self._read_ids()[group]

    def _choose_in_turn(self, goes_on: bool) -> Moves:
        """Every group's choice in turn; `goes_on` says that none is over."""
        rows = self._rows
        self._running = None
        current = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
        running = send(self._totals, rows.device, torch.float32)
        parents, tokens_of, totals = list(range(len(rows))), [0] * len(rows), list(self._totals)
        history = rows.read_history()
        before = list(self._origins)
        for number, (best, tokens, beams) in enumerate(self._read_groups(current, running, goes_on)):
            group = self._groups[number]
            self._check_candidates(best.tolist(), beams.tolist(), number, group)
            self._offer(tokens, beams, group)
            if self._notes is not None:
                self._notes.look(number)
            offers = read_offers(
                history[self._parts[number]],
                best,
                tokens,
                beams,
                batch_size=self._num_prompts,
                group_size=self._size,
                pad_token_id=rows.pad_token_id,
                eos_token_id=self._eos,
                beam_indices=self._list_origins(),  # with what earlier groups chose, as in the reference
                decoder_prompt_len=self._width,
            )
            chosen = self._judge.decide(offers, number)
            self._chosen = [offer.token for offer in chosen]
            for place, (token, total, source) in zip(group, chosen, strict=True):
                parents[place] = self._stay_home(place, group[source])
                self._origins[place] = (*before[group[source]], source)
                tokens_of[place], totals[place] = token, total
            if self._notes is not None:
                verdict = pack_offers(chosen, (best, tokens, beams), best.device)
                self._notes.note(self._num_tokens + 1, number, (best, tokens, beams), verdict)
            self._last = (tokens, beams)
        self._enter(parents, tokens_of, totals)
        return Moves(parents, send(tokens_of, rows.device))

    def _read_groups(
        self, current: torch.Tensor, running: torch.Tensor, goes_on: bool
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Each group's candidates: log-probabilities, tokens, and beams that they continue. Once they are judged, what
        was `_chosen` stands in `current` (rows,) for the next group.

        A device knows what will be chosen of a group that is not over: it goes on with all groups, and is waited for
        once.
        """
        size, num_candidates = self._size, self._settings.count_candidates(self._size)
        ahead: list[Best] = []
        scored = self._scorer.next_groups(self._rows, self._groups, self._places, current)
        for number, scores in enumerate(scored):
            group, places = self._groups[number], self._places[number]
            own = take_rows(running, group, places)
            found = find_best(scores, own, self._ends, size, num_candidates) if goes_on else None
            if found is not None:
                ahead.append(found)
                current.index_copy_(0, places, found.tokens)
                continue
            yield read_best(scores, own, size, num_candidates)
            if number + 1 < len(self._groups):
                current.index_copy_(0, places, send(self._chosen, self._rows.device))
        if ahead:
            ahead[-1].packed.read()  # the last: all are there with it
            yield from (found.read() for found in ahead)

    def _list_origins(self) -> tuple[tuple[int, ...], ...]:
        return tuple(self._origins[row] for group in self._groups for row in group)


class ConstrainedBeams(ScoredBeams):
    """Constrained beam search: beams are kept in banks by how much of the constraints they have fulfilled.

    Post and Vilar, 2018 (https://arxiv.org/abs/1804.06609), Hu et al., 2019.
    """

    def choose(self) -> Moves:
        """The beam scorer's choice among the likeliest candidates and those that advance a constraint."""
        rows = self._rows
        scores = self._scorer.next_logits(rows, normalise=True).scores
        running = send(self._totals, rows.device, torch.float32)
        num_beams = self._settings.num_beams
        best, tokens, beams = read_best(scores, running, num_beams, self._settings.num_candidates)
        self._check_candidates(best.tolist(), beams.tolist(), 0, range(len(rows)))
        self._offer(tokens, beams, range(len(rows)))
        if self._notes is not None:
            self._notes.look(0)
        verdict = self._judge.process(
            rows.read_history(),
            best,
            tokens,
            beams,
            scores_for_all_vocab=scores + running[:, None],
            pad_token_id=rows.pad_token_id,
            eos_token_id=self._eos,
            beam_indices=self._list_origins(),
            decoder_prompt_len=self._width,
        )
        self._last = (tokens, beams)
        sources = verdict["next_beam_indices"].tolist()
        if self._notes is not None:
            self._notes.note(self._num_tokens + 1, 0, (best, tokens, beams), verdict)
        self._origins = [(*self._origins[source], source) for source in sources]
        parents = [self._stay_home(place, source) for place, source in enumerate(sources)]
        tokens_of = verdict["next_beam_tokens"].tolist()
        self._enter(parents, tokens_of, verdict["next_beam_scores"].tolist())
        return Moves(parents, send(tokens_of, rows.device))

"""Beam search and beam sampling: the likeliest (or drawn) continuations of every prompt go on."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace

import torch

from unspool.decoding.alone import Shown
from unspool.decoding.beams.moves import Moves
from unspool.decoding.beams.reports import make_reports
from unspool.decoding.beams.selection import Drawing, Listed, find_candidates
from unspool.decoding.beams.settings import NEVER, BeamSettings
from unspool.decoding.beams.trace import BeamTrace, Candidate
from unspool.decoding.finish import Finish
from unspool.decoding.loop import LiveBeam, Result
from unspool.decoding.randomness import Positions
from unspool.decoding.rows import Rows
from unspool.decoding.scorer import Scorer
from unspool.errors import NoTokenLeftError
from unspool.kernels.sending import fetch, send


@dataclass(slots=True)
class Beam:
    """A sequence of a prompt's search: its new tokens, where each came from, and its log-probability."""

    tokens: list[int]
    parents: list[int]  # the row each token was chosen from, as the reference numbers them
    sum_logprobs: float
    score: float = NEVER
    reason: str = ""
    place: int = -1  # of the last token among its step's candidates, once finished

    def grow(self, token: int, parent: int, sum_logprobs: float) -> Beam:
        """This beam and one token more."""
        return Beam([*self.tokens, token], [*self.parents, parent], sum_logprobs)

    def cross_out(self) -> Beam:
        """What stands in the place of a beam that has ended, if too few others go on."""
        return Beam([*self.tokens], [*self.parents], self.sum_logprobs + NEVER)


@dataclass(slots=True)
class Search:
    """One prompt's search: the beams that run, and the best that are finished."""

    running: list[Beam]
    settings: BeamSettings
    finished: list[Beam] = field(default_factory=list)
    is_done: bool = False
    num_tokens: int = 0  # that every beam has got

    def keep_best(self, found: Sequence[Beam]) -> None:
        """Put finished beams among the best; with early stopping a full list stays as it is."""
        settings = self.settings
        if settings.early_stopping is True and len(self.finished) == settings.num_beams:
            return
        self.finished = sorted([*self.finished, *found], key=lambda one: -one.score)[: settings.num_beams]

    def fill(self) -> None:
        """Repeat the finished beams where more are returned than there are: no other sequence is possible.

        The copies' scores are those of beams that do not exist, as the reference's are.
        """
        num_found, settings = len(self.finished), self.settings
        for place in range(settings.num_returned - num_found):
            one = self.finished[place % num_found]
            score = settings.score(one.sum_logprobs + NEVER, len(one.tokens))
            self.finished.append(replace(one, sum_logprobs=one.sum_logprobs + NEVER, score=score))

    def can_improve(self) -> bool:
        """Whether a running beam might still beat the worst of the finished ones."""
        settings = self.settings
        if len(self.finished) < settings.num_beams:
            return True
        if settings.early_stopping is True:
            return False
        never_stops = settings.early_stopping == "never" and settings.length_penalty > 0.0
        longest = settings.max_new_tokens if never_stops else self.num_tokens
        return settings.score(self.running[0].sum_logprobs, longest) > self.finished[-1].score


class PlainBeams:
    """Keeps the `num_beams` likeliest continuations of every prompt (or draws them), step by step."""

    def __init__(
        self,
        scorer: Scorer,
        rows: Rows,
        finish: Finish,
        settings: BeamSettings,
        *,
        trace: BeamTrace | None = None,
        rows_may_leave: bool = False,
    ) -> None:
        self._scorer, self._rows, self.finish, self._settings = scorer, rows, finish, settings
        self._trace = trace
        start = [0.0] + [NEVER] * (settings.num_beams - 1)  # the beams of a prompt must not all start alike
        num_prompts = len(rows) // settings.num_beams
        self._searches = {  # by the number of the prompt
            prompt: Search([Beam([], [], score) for score in start], settings) for prompt in range(num_prompts)
        }
        self.reports = make_reports(scorer, settings, num_prompts)
        self._active = list(range(num_prompts))  # prompts that have rows: all, or those whose search goes on
        self._rows_may_leave = rows_may_leave
        self._is_shared = False  # what has ended is known to those who asked for it, and forgotten here
        self._seeds: tuple[torch.Tensor, torch.Tensor] | None = None  # the rows', and of each prompt its first row's
        self._positions = Positions()

    def is_done(self) -> bool:
        """Whether every prompt's search has ended."""
        return all(search.is_done for search in self._searches.values())

    def choose(self) -> Moves:
        """Score every beam's next token, and keep the best continuations of each prompt."""
        rows, scorer, settings = self._rows, self._scorer, self._settings
        # If nobody else looks at log-probabilities and processors only forbid, those of the candidates are enough.
        is_free = scorer.can_choose and not settings.do_sample
        forbidden = scorer.find_forbidden(rows) if is_free else None
        if forbidden is None:
            scores = scorer.next_logits(rows, normalise=True).scores  # (prompts * beams, vocab)
        else:
            scores = scorer.next_unprocessed(rows)
        tokens, beams, best = find_candidates(
            scores,
            self.list_running(),
            settings,
            self.find_drawing(),
            is_normalised=forbidden is None,
            forbidden=forbidden or (),
        )
        fetched = [fetch(part) for part in (tokens, beams, best)]  # begun together: the device is waited for once
        found, continued, totals = (part.read().tolist() for part in fetched)
        listed: Listed = (found, continued, totals)
        parents = self._advance_all(listed, self._explain_ends(listed[0], listed[1]), self._explain_no_token)
        chosen = [beam.tokens[-1] for search in self._list_active() for beam in search.running]
        if self.reports is not None:
            first_rows = range(0, len(rows), settings.num_beams)
            offered = zip(first_rows, continued, found, strict=True)
            pairs = [(first + beam, token) for first, *both in offered for beam, token in zip(*both, strict=True)]
            self.reports.note(scorer.logits, pairs, parents, chosen)
        return Moves(parents, send(chosen, rows.device))

    def advance(self, listed: Listed, width: int, explain: Callable[[int], NoTokenLeftError]) -> list[int]:
        """Take a step whose candidates were found on a device: `width` columns are taken since. Returns the row that
        each row goes on from.

        `explain` says why the row at a place got no token.
        """
        return self._advance_all(listed, self._explain_tokens(listed[0], width), explain)

    def _explain_tokens(self, tokens: Sequence[Sequence[int]], width: int) -> list[str | None]:
        """Why each prompt's candidates end, or None, one after the other, if no history is needed."""
        flat = [token for row in tokens for token in row]
        return self.finish.explain_tokens(flat, width, self._list_numbers(tokens))

    def _list_numbers(self, tokens: Sequence[Sequence[int]]) -> list[int]:
        """The number of the first row of each candidate's prompt."""
        firsts = self._rows.numbers[:: self._settings.num_beams]
        return [number for number, row in zip(firsts, tokens, strict=True) for _ in row]

    def list_running(self) -> torch.Tensor:
        """The log-probabilities of the running beams, one per row, where the rows are."""
        running = [beam.sum_logprobs for search in self._list_active() for beam in search.running]
        return send(running, self._rows.device, torch.float32)

    def find_drawing(self) -> Drawing | None:
        """What the next candidates are drawn with; None if the likeliest are taken."""
        rows, num_beams = self._rows, self._settings.num_beams
        if not self._settings.do_sample:
            return None
        if self._seeds is None or self._seeds[0] is not rows.seeds:
            self._seeds = rows.seeds, rows.seeds[::num_beams]
        return Drawing(self._seeds[1], self._positions.take(rows.lengths[::num_beams], rows.device))

    def _advance_all(
        self, listed: Listed, reasons: Sequence[str | None], explain: Callable[[int], NoTokenLeftError]
    ) -> list[int]:
        """Enter the candidates of a step; the row that each row goes on from."""
        parents: list[int] = []
        is_ranked = self._trace is None and not self._settings.do_sample  # drawn ones are in the order of the draw
        first = 0
        for number, (prompt, tokens, beams, best) in enumerate(zip(self._active, *listed, strict=True)):
            own = reasons[first : first + len(tokens)]
            first += len(tokens)
            search = self._searches[prompt]
            search.num_tokens += 1
            is_going = not search.is_done and not any(own) and NEVER / 2 < best[0] < math.inf
            if is_ranked and is_going:
                parents += self._go_on(number, prompt, tokens, beams, best)
                continue
            found = zip(tokens, beams, best, own, strict=True)
            parents += self._advance(number, prompt, [Candidate(*one) for one in found], explain)
        return parents

    def _go_on(
        self, number: int, prompt: int, tokens: Sequence[int], beams: Sequence[int], best: Sequence[float]
    ) -> list[int]:
        """`_advance` with candidates of which none ends, as most steps' do: the first go on."""
        search, count = self._searches[prompt], self._settings.num_beams
        first_row, first, running = prompt * count, number * count, search.running
        search.running = [
            running[beam].grow(token, first_row + beam, total)
            for token, beam, total in zip(tokens[:count], beams, best, strict=False)
        ]
        search.is_done = not search.can_improve()
        if search.is_done:
            search.fill()
        return [first + beam for beam in beams[:count]]

    def follow(self) -> None:
        """Let the rows of searches that are over leave; what has ended is known from the candidates."""
        going = [place for place, search in enumerate(self._list_active()) if not search.is_done]
        self._stay(going)

    def _stay(self, going: Sequence[int]) -> None:
        """Let the rows of the searches that are not at these places leave, if they may."""
        if not self._rows_may_leave and len(going) < len(self._active):
            over = set(range(len(self._active))) - set(going)
            count = self._settings.num_beams
            self._rows.padded = [place * count + beam for place in over for beam in range(count)]
        if not self._rows_may_leave or not going or len(going) == len(self._active):
            return
        num_beams = self._settings.num_beams
        staying = [place * num_beams + beam for place in going for beam in range(num_beams)]
        left = set(self._rows.numbers) - {self._rows.numbers[place] for place in staying}
        self.finish.forget(left)
        self._rows.select(staying)
        self._scorer.keep_rows(staying)
        if self.reports is not None:
            self.reports.keep_rows(staying)
        self._active = [self._active[place] for place in going]

    # --- prompts of several runs -----------------------------------------------------------------------
    @property
    def num_beams(self) -> int:
        """Beams of each prompt."""
        return self._settings.num_beams

    def share(self) -> None:
        """Prompts of other runs may come from now on."""
        if self._trace is not None or self.reports is not None:
            raise ValueError("beams of which a trace is kept, or log-probabilities, are stepped by their own call")
        self._is_shared = self._rows_may_leave = True

    def admit(self, others: Sequence[PlainBeams], firsts: Sequence[int], finish: Finish) -> None:
        """Take in other prompts, of which the first ones have these numbers from now on; `finish` has the stops of all.

        Rows and scorer have them already.
        """
        alike = replace(self._settings, max_new_tokens=0)
        for other, first in zip(others, firsts, strict=True):
            if replace(other._settings, max_new_tokens=0) != alike:
                raise ValueError("beams that are ranked in different ways are stepped by their own calls")
            self._searches |= {first + prompt: search for prompt, search in other._searches.items()}
            self._active += [first + prompt for prompt in other._active]
        self.finish = finish

    def drop(self, prompts: Collection[int]) -> None:
        """Let prompts go before their searches have ended; not all that there are."""
        self._stay([place for place, prompt in enumerate(self._active) if prompt not in prompts])
        self.forget(prompts)

    def forget(self, prompts: Collection[int]) -> None:
        """Keep nothing of prompts whose sequences were handed out, if it is nobody's."""
        if self._is_shared:
            for prompt in prompts:
                self._searches.pop(prompt, None)

    def _list_active(self) -> list[Search]:
        """The searches that have rows, in the order of those."""
        return [self._searches[prompt] for prompt in self._active]

    def _explain_ends(self, tokens: list[list[int]], parents: list[list[int]]) -> list[str | None]:
        """Why each prompt's candidates end, or None, one after the other."""
        flat = [token for row in tokens for token in row]
        if not self.finish.needs_history:
            width = max(self._rows.ends) + 1
            return self._explain_tokens(tokens, width)
        first_rows = range(0, len(self._rows), self._settings.num_beams)
        sources = [first + parent for first, row in zip(first_rows, parents, strict=True) for parent in row]
        history = self._rows.history()
        extended = torch.cat((history[sources], send(flat, history.device)[:, None]), dim=1)
        return self.finish.explain(extended, self._scorer.record.scores, Shown.of(self._rows, sources))

    def _explain_no_token(self, place: int) -> NoTokenLeftError:
        return self._scorer.explain_no_token(self._rows, place)

    def _advance(
        self, number: int, prompt: int, candidates: list[Candidate], explain: Callable[[int], NoTokenLeftError]
    ) -> list[int]:
        """Split the candidates of a prompt, the `number`-th that has rows, into finished and running ones; the rows
        that the running ones come from."""
        settings, search = self._settings, self._searches[prompt]
        first_row, first = prompt * settings.num_beams, number * settings.num_beams  # of all rows; of those left
        if search.is_done:
            for beam in search.running:
                beam.tokens.append(self._rows.pad_token_id)
            return list(range(first, first + settings.num_beams))

        spoilt = min((one.parent for one in candidates if not one.sum_logprobs < math.inf), default=None)
        if spoilt is not None:
            raise explain(first + spoilt)  # it is ranked first: what others could go on with may not be here

        def grow(one: Candidate) -> Beam:
            return search.running[one.parent].grow(one.token, first_row + one.parent, one.sum_logprobs)

        found = []
        for place, one in enumerate(candidates[: settings.num_beams]):
            if one.reason is not None and one.sum_logprobs > NEVER / 2:
                beam = grow(one)
                beam.score = settings.score(one.sum_logprobs, search.num_tokens)
                beam.reason, beam.place = one.reason, place
                found.append(beam)
        search.keep_best(found)
        kept = sorted(range(len(candidates)), key=lambda place: -_rank(candidates[place]))[: settings.num_beams]
        if self._trace is not None:
            finished = {one.place: one.score for one in search.finished if len(one.tokens) == search.num_tokens}
            self._trace.note(prompt, search.num_tokens, candidates, kept, finished=finished)
        is_stuck = not any(one.sum_logprobs > NEVER / 2 for one in candidates)
        if is_stuck and not search.finished:
            raise explain(first)
        going = [candidates[place] for place in kept]
        search.running = [grow(one) if one.reason is None else grow(one).cross_out() for one in going]
        has_next = not is_stuck and any(one.reason is None for one in candidates)
        search.is_done = not has_next or not search.can_improve()
        if search.is_done and self._trace is not None:
            for best in search.finished[: settings.num_returned]:
                self._trace.note_returned(prompt, len(best.tokens), best.place, best.score, best.reason)
        if search.is_done:
            search.fill()
        return [first + one.parent for one in going]

    # --- what is returned ----------------------------------------------------------------------------
    def list_live(self, prompt: int) -> list[list[int]]:
        """New tokens of the running and of the finished beams."""
        search = self._searches[prompt]
        return [beam.tokens for beam in search.running] + [one.tokens for one in search.finished]

    def list_returned(self, prompt: int) -> list[tuple[list[int], str]] | None:
        """New tokens and reasons of a prompt's best, once its search is over."""
        search = self._searches[prompt]
        if not search.is_done:
            return None
        return [(one.tokens, one.reason) for one in search.finished[: self._settings.num_returned]]

    def list_table(self, prompt: int) -> list[LiveBeam]:
        """The running beams by their log-probabilities, then the finished ones by their scores."""
        search = self._searches[prompt]
        running = [LiveBeam(beam.tokens, beam.sum_logprobs, None) for beam in search.running]
        return running + [LiveBeam(one.tokens, one.score, one.reason) for one in search.finished]

    def result(self) -> Result:
        """The scores and origins of the sequences returned, best first for each prompt; the trace."""
        best = [one for search in self._searches.values() for one in search.finished[: self._settings.num_returned]]
        longest = max((len(one.parents) for one in best), default=0)
        scores = torch.tensor([one.score for one in best]) if self._settings.returns_scores else None
        origins = torch.tensor([one.parents + [-1] * (longest - len(one.parents)) for one in best])
        return Result({"sequences_scores": scores, "beam_indices": origins, "beam_trace": self._trace})


def _rank(candidate: Candidate) -> float:
    """What candidates go on by: the log-probability, lowered if it ends here."""
    return candidate.sum_logprobs + (NEVER if candidate.reason else 0.0)

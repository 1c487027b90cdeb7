"""Constrained beam search that ends with what was asked, or says why it can't."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from unspool.beams.constrained import ConstrainedBeamSearchScorer, History
from unspool.beams.offers import BeamOffers, Offer
from unspool.constraints import ConstraintListState
from unspool.constraints.distance import can_complete, describe_constraint, holds, list_missing, list_phrases
from unspool.errors import UnfulfilledError

Proposal: TypeAlias = tuple[Offer, ConstraintListState]
REAL = -5e8  # below it lie beams that are not in use (-1e9) and tokens that a processor forbade (-inf)


class PunctualScorer(ConstrainedBeamSearchScorer):
    """The scorer of `generate`: as long as the room lasts, there are beams that can still write all that is missing.

    A beam that can't is replaced where too few others can. One must get there, and with `is_strict` as many as are
    returned, by their new tokens alone: what stands in the prompt does not count.
    """

    def __init__(
        self, *, is_strict: bool, prompt_width: int, last_place: int, end_ids: Sequence[int], **settings: Any
    ) -> None:
        super().__init__(**settings)
        self._is_strict = is_strict
        self._num_needed = self.num_beam_hyps_to_keep if is_strict else 1
        self._prompt_width = prompt_width
        self._last_place = last_place  # columns that a constraint's tokens may stand in
        self._end_ids = frozenset(end_ids)
        self._forbidden: set[int] = set()  # tokens that were needed and could not be written

    def _state_after(self, history: History) -> ConstraintListState:
        if not self._is_strict:
            return super()._state_after(history)
        state = self._progress.get(history)
        if state is None:
            state = self.make_constraint_states(1)[0]
            state.reset(history[self._prompt_width :])
        return state

    def _may_end(self, step: BeamOffers, candidate: Offer) -> bool:
        return candidate.score > REAL and super()._may_end(step, candidate)

    def _propose(self, state: ConstraintListState, scores: torch.Tensor, push_progress: bool) -> list[int]:
        """As the reference does, but never an end token: a sequence would go on behind its end."""
        proposed = super()._propose(state, scores, push_progress)
        return [token for token in proposed if token not in self._end_ids]

    def _share_out(
        self,
        row: int,
        histories: list[History],
        vocab_scores: torch.Tensor,
        likeliest: list[Offer],
        push_progress: bool = False,
    ) -> list[Proposal]:
        shared = super()._share_out(row, histories, vocab_scores, likeliest, push_progress)
        room = self._last_place - len(histories[0]) - 1
        num_missing = max(0, self._num_needed - len(self._beam_hyps[row]))  # those that have ended are complete
        demands: list[tuple[Callable[[Proposal], bool], int]] = [
            (_is_complete, min(num_missing, self._count_complete(row, histories, vocab_scores))),
            (lambda one: _is_on_time(one, room), num_missing),
            (lambda one: one[0].score > -torch.inf, len(shared)),  # a beam with a forbidden token gets nowhere
        ]
        if all(sum(map(fits, shared)) >= count for fits, count in demands):
            return shared
        chosen = {(candidate.beam, candidate.token) for candidate, _ in shared}
        spare = [
            one
            for one in self._propose_further(row, histories, vocab_scores, likeliest)
            if (one[0].beam, one[0].token) not in chosen and _is_on_time(one, room)
        ]
        spare.sort(key=lambda one: one[0].score, reverse=True)
        for fits, count in demands:
            _exchange(shared, spare, fits, count)
        return shared

    def _count_complete(self, row: int, histories: list[History], vocab_scores: torch.Tensor) -> int:
        """Beams that have all they must: a strict search does not lose them again, for later ones may be forbidden."""
        if not self._is_strict:
            return 0
        beams = range(row * self.num_beams, (row + 1) * self.num_beams)
        complete = [beam for beam in beams if self._state_after(histories[beam]).completed]
        return sum(bool((vocab_scores[beam] > REAL).any()) for beam in complete)

    def _propose_further(
        self, row: int, histories: list[History], vocab_scores: torch.Tensor, likeliest: list[Offer]
    ) -> list[Proposal]:
        """All that a row's beams could go on with: each one's likeliest tokens, and every step of a constraint."""
        offered = {(candidate.beam, candidate.token): candidate for candidate in likeliest}
        first, width = row * self.num_beams, self.num_beams + len(self._end_ids)
        own = vocab_scores[first : first + self.num_beams].topk(min(width, vocab_scores.shape[-1])).indices.tolist()
        for beam, tokens in enumerate(own, first):
            for token in [*tokens, *(self._state_after(histories[beam]).advance() or [])]:
                if token in self._end_ids or (beam, token) in offered:
                    continue
                score = float(vocab_scores[beam, token])
                offered[beam, token] = Offer(token, score, beam)
                if score == -torch.inf and bool((vocab_scores[beam] > REAL).any()):
                    self._forbidden.add(token)
        proposals: list[Proposal] = []
        for candidate in offered.values():
            state = self._state_after(histories[candidate.beam]).copy()
            state.add(candidate.token)
            proposals.append((candidate, state))
        return proposals

    def _close_row(
        self, row: int, sequences: list[History], live: list[tuple[int, float]], add: Callable[[int], None]
    ) -> None:
        states = {beam: self._state_after(sequences[beam]) for beam, score in live if score > REAL}
        complete = [beam for beam, state in states.items() if state.completed]
        num_missing = self._num_needed - len(self._beam_hyps[row])
        if len(complete) < num_missing:  # a phrase may have been written in the middle of another one
            complete = [beam for beam, state in states.items() if self._is_written(sequences[beam], state)]
            if len(complete) < num_missing:
                raise self._explain_row(row, len(sequences[0]), list(states.values()), len(complete))
        elif not self._is_strict:
            super()._close_row(row, sequences, live, add)
            return
        for beam in complete:
            add(beam)
        if len(self._beam_hyps[row]) < self.num_beam_hyps_to_keep:  # not strict: fill up, as the reference does
            for beam in (beam for beam, _ in live if beam not in complete):
                add(beam)

    def _is_written(self, sequence: History, state: ConstraintListState) -> bool:
        """Whether what the progress counts as missing stands in the sequence all the same."""
        tokens = sequence[self._prompt_width if self._is_strict else 0 :]
        return all(
            any(holds(tokens, phrase) for phrase in list_phrases(constraint) or ())
            for constraint in list_missing(state)
        )

    def _explain_row(
        self, row: int, length: int, states: list[ConstraintListState], num_complete: int
    ) -> UnfulfilledError:
        """What no sequence of the row contains, and what may help."""
        num_found = len(self._beam_hyps[row]) + num_complete
        missing = min((list_missing(state) for state in states if not state.completed), key=len, default=[])
        lacks = "; the nearest lacks " + " and ".join(map(describe_constraint, missing)) if missing else ""
        asked = "a sequence" if self._num_needed == 1 else f"{self._num_needed} sequences"
        found = "none was found" if num_found == 0 else f"{num_found} were found"
        hint = "raise max_new_tokens or num_beams, or force less"
        if length < self._last_place:
            hint = "the search was ended early by a stop (max_time, stop_strings, a criterion); give it more"
        elif self._forbidden:
            hint = f"processors forbade the tokens {sorted(self._forbidden)!r:.100}, which are needed; {hint}"
        elif num_found:
            hint = f"ask for fewer sequences (num_return_sequences), {hint}"
        return UnfulfilledError(
            f"prompt {row} was to be continued in {asked} with everything that is forced, and {found} "
            f"in {length - self._prompt_width} new tokens{lacks}; {hint}"
        )


def _is_complete(proposal: Proposal) -> bool:
    candidate, state = proposal
    return candidate.score > REAL and state.completed


def _is_on_time(proposal: Proposal, room: int) -> bool:
    candidate, state = proposal
    return candidate.score > REAL and can_complete(state, room)


def _exchange(shared: list[Proposal], spare: list[Proposal], fits: Callable[[Proposal], bool], count: int) -> None:
    """Let spare proposals that fit take the places of the last ones that don't, until `count` fit."""
    num_missing = count - sum(map(fits, shared))
    misfits = [place for place, one in enumerate(shared) if not fits(one)]
    for place, one in zip(reversed(misfits), [one for one in spare if fits(one)][: max(0, num_missing)], strict=False):
        shared[place] = one
        spare.remove(one)

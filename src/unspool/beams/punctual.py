"""Constrained beam search that ends with what was asked, or says why it can't."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from unspool.beams.constrained import ConstrainedBeamSearchScorer, History
from unspool.beams.step import BeamStep, Candidate
from unspool.constraints import ConstraintListState
from unspool.constraints.distance import can_complete, describe_constraint, list_missing
from unspool.errors import UnfulfilledError

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

    def _may_end(self, step: BeamStep, candidate: Candidate) -> bool:
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
        likeliest: list[Candidate],
        push_progress: bool = False,
    ) -> list[tuple[Candidate, ConstraintListState]]:
        shared = super()._share_out(row, histories, vocab_scores, likeliest, push_progress)
        room = self._last_place - len(histories[0]) - 1
        num_missing = self._num_needed - len(self._beam_hyps[row])  # those that have ended are complete
        late = [place for place, one in enumerate(shared) if num_missing > 0 and not _is_on_time(*one, room)]
        num_missing -= len(shared) - len(late)
        if num_missing <= 0 or not late:
            return shared
        chosen = {(candidate.beam, candidate.token) for candidate, _ in shared}
        spare = [
            (candidate, state)
            for candidate, state in self._propose_further(row, histories, vocab_scores, likeliest)
            if (candidate.beam, candidate.token) not in chosen and _is_on_time(candidate, state, room)
        ]
        spare.sort(key=lambda one: one[0].score, reverse=True)
        # The last places are those of the weakest banks and scores.
        for place, one in zip(reversed(late), spare[:num_missing], strict=False):
            shared[place] = one
        return shared

    def _propose_further(
        self, row: int, histories: list[History], vocab_scores: torch.Tensor, likeliest: list[Candidate]
    ) -> list[tuple[Candidate, ConstraintListState]]:
        """All that a row's beams could go on with: each one's likeliest tokens, and every step of a constraint."""
        offered = {(candidate.beam, candidate.token): candidate for candidate in likeliest}
        first, width = row * self.num_beams, self.num_beams + len(self._end_ids)
        own = vocab_scores[first : first + self.num_beams].topk(min(width, vocab_scores.shape[-1])).indices.tolist()
        for beam, tokens in enumerate(own, first):
            for token in [*tokens, *(self._state_after(histories[beam]).advance() or [])]:
                if token in self._end_ids or (beam, token) in offered:
                    continue
                score = float(vocab_scores[beam, token])
                offered[beam, token] = Candidate(token, score, beam)
                if score == -torch.inf and bool((vocab_scores[beam] > REAL).any()):
                    self._forbidden.add(token)
        proposals = []
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
        if len(self._beam_hyps[row]) + len(complete) < self._num_needed:
            raise self._explain_row(row, len(sequences[0]), list(states.values()), len(complete))
        if not self._is_strict:
            super()._close_row(row, sequences, live, add)
            return
        for beam in complete:
            add(beam)

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


def _is_on_time(candidate: Candidate, state: ConstraintListState, room: int) -> bool:
    return candidate.score > REAL and can_complete(state, room)

"""Beam search that must write given phrases."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from unspool.beams.offers import Ancestry, BeamOffers, Ids, Offer, pack_offers, read_offers
from unspool.beams.scorer import HypothesisScorer, RunningBeams
from unspool.constraints import Constraint, ConstraintListState
from unspool.errors import SettingError, UnsupportedError

History: TypeAlias = tuple[int, ...]
BANK_WEIGHT = 100  # a step of progress outweighs this much log-probability


class ConstrainedBeamSearchScorer(HypothesisScorer):
    """Beam search in which every sequence fulfils the constraints, as far as that can be.

    Candidates that advance a constraint are put beside the likeliest ones, and the beams are shared out between the
    banks: hypotheses with the same progress (Post and Vilar, 2018, https://arxiv.org/abs/1804.06609).
    """

    def __init__(
        self,
        batch_size: int,
        num_beams: int,
        constraints: Sequence[Constraint],
        device: torch.device | str,
        length_penalty: float = 1.0,
        do_early_stopping: bool | str = False,
        num_beam_hyps_to_keep: int = 1,
        num_beam_groups: int = 1,
        max_length: int | None = None,
    ) -> None:
        super().__init__(
            batch_size,
            num_beams,
            device,
            length_penalty,
            do_early_stopping,
            num_beam_hyps_to_keep,
            num_beam_groups,
            max_length,
        )
        if num_beam_groups > 1:
            raise UnsupportedError(
                f"`num_beam_groups` ({num_beam_groups}) and `constraints` don't go together: the banks of the "
                "constraints share out all beams of a row. Use one of them."
            )
        if not constraints:
            raise SettingError("`constraints` must name at least one Constraint. Use BeamSearchScorer without any.")
        self.constraints = constraints
        # The progress of the sequences that the last step ended with, so that the next need not read them all again.
        self._progress: dict[History, ConstraintListState] = {}

    def make_constraint_states(self, n: int) -> list[ConstraintListState]:
        """States without progress."""
        return [ConstraintListState([constraint.copy() for constraint in self.constraints]) for _ in range(n)]

    def check_completes_constraints(self, sequence: Iterable[int]) -> bool:
        """Whether a sequence fulfils all constraints."""
        return self._state_after(tuple(sequence)).completed

    def process(  # type: ignore[override]  # the base leaves open what else a scorer reads
        self,
        input_ids: torch.Tensor,
        next_scores: torch.Tensor,
        next_tokens: torch.Tensor,
        next_indices: torch.Tensor,
        scores_for_all_vocab: torch.Tensor,
        pad_token_id: int | torch.Tensor | None = None,
        eos_token_id: Ids | None = None,
        beam_indices: Ancestry | None = None,
        decoder_prompt_len: int = 0,
    ) -> UserDict[str, torch.Tensor]:
        """Out of the best candidates, and of those that advance a constraint, the beams of the next step.

        `scores_for_all_vocab` is what the candidates were taken from: (batch * num_beams, vocab).
        """
        step = read_offers(
            input_ids,
            next_scores,
            next_tokens,
            next_indices,
            batch_size=self.batch_size,
            group_size=self.num_beams,
            pad_token_id=pad_token_id,
            eos_token_id=eos_token_id,
            beam_indices=beam_indices,
            decoder_prompt_len=decoder_prompt_len,
        )
        is_done = self._done.tolist()
        progress: dict[History, ConstraintListState] = {}
        chosen: list[Offer] = []
        for row in range(self.batch_size):
            if is_done[row]:
                chosen += step.make_padding(self.num_beams)
                continue
            going_on = self._separate(step, row, row)
            for candidate, state in self._share_out(row, step.histories, scores_for_all_vocab, going_on):
                chosen.append(candidate)
                progress[(*step.histories[candidate.beam], candidate.token)] = state
        self._progress = progress
        return pack_offers(chosen, (next_scores, next_tokens, next_indices), input_ids.device)

    def step_sentence_constraint(
        self,
        batch_idx: int,
        input_ids: torch.Tensor,
        vocab_scores: torch.Tensor,
        sent_beam_scores: torch.Tensor,
        sent_beam_tokens: torch.Tensor,
        sent_beam_indices: torch.Tensor,
        push_progress: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Scores, tokens and beams of one row's next step, out of the likeliest ones (of the whole `input_ids`).

        With `push_progress` a beam that has completed its constraints is put forward with its likeliest token.
        """
        given = zip(sent_beam_tokens.tolist(), sent_beam_scores.tolist(), sent_beam_indices.tolist(), strict=True)
        candidates = [Offer(*one) for one in given]
        histories = [tuple(sequence) for sequence in input_ids.tolist()]
        shared_out = self._share_out(batch_idx, histories, vocab_scores, candidates, push_progress)
        tokens, scores, beams = zip(*(candidate for candidate, _ in shared_out), strict=True)
        return (
            torch.tensor(scores, dtype=sent_beam_scores.dtype, device=sent_beam_scores.device),  # (beams,)
            torch.tensor(tokens, dtype=sent_beam_tokens.dtype, device=sent_beam_tokens.device),
            torch.tensor(beams, dtype=sent_beam_indices.dtype, device=sent_beam_indices.device),
        )

    def finalize(  # type: ignore[override]  # as above
        self,
        input_ids: torch.Tensor,
        final_beam_scores: torch.Tensor,
        final_beam_tokens: torch.Tensor,  # noqa: ARG002 - the reference's arguments
        final_beam_indices: torch.Tensor,  # noqa: ARG002 - likewise
        max_length: int | None,
        pad_token_id: int | torch.Tensor | None = None,
        eos_token_id: Ids | None = None,
        beam_indices: Ancestry | None = None,
        decoder_prompt_len: int = 0,
    ) -> UserDict[str, Any]:
        """The best `num_beam_hyps_to_keep` sequences of every row, with their scores and the beams they came by.

        Sequences that don't fulfil the constraints are taken only where too few of a row do;
        `check_completes_constraints` says which they are.
        """
        running = RunningBeams(
            input_ids, final_beam_scores.tolist(), beam_indices, input_ids.shape[-1] - decoder_prompt_len
        )
        for row, is_done in enumerate(self._done.tolist()):
            if not is_done:
                self._finish_running(row, running)
        return self._assemble(input_ids, max_length, pad_token_id, eos_token_id)

    def _finish_running(self, place: int, running: RunningBeams) -> None:
        beams = range(place * self.num_beams, (place + 1) * self.num_beams)
        sequences = [tuple(sequence) for sequence in running.input_ids.tolist()]
        live = [(beam, running.scores[beam]) for beam in beams]
        self._close_row(place, sequences, live, partial(self._finish_beam, place, running=running))

    def _close_row(
        self, row: int, sequences: list[History], live: list[tuple[int, float]], add: Callable[[int], None]
    ) -> None:
        """Finish the row's beams that fulfil the constraints, and the others only where too few do."""
        fulfils = {beam: self.check_completes_constraints(sequences[beam]) for beam, _ in live}
        for beam in (beam for beam, is_complete in fulfils.items() if is_complete):
            add(beam)
        if len(self._beam_hyps[row]) < self.num_beam_hyps_to_keep:
            for beam in (beam for beam, is_complete in fulfils.items() if not is_complete):
                add(beam)

    def _may_end(self, step: BeamOffers, candidate: Offer) -> bool:
        return self._state_after(step.histories[candidate.beam]).completed

    def _state_after(self, history: History) -> ConstraintListState:
        """The progress of a sequence; not to be changed."""
        state = self._progress.get(history)
        if state is None:
            state = self.make_constraint_states(1)[0]
            state.reset(history)
        return state

    def _share_out(
        self,
        row: int,
        histories: list[History],
        vocab_scores: torch.Tensor,
        likeliest: list[Offer],
        push_progress: bool = False,
    ) -> list[tuple[Offer, ConstraintListState]]:
        """The row's beams of the next step, each with its progress: in turns the best of every bank."""
        beams = range(row * len(likeliest), (row + 1) * len(likeliest))
        needed = {histories[beam] for beam in beams} | {histories[candidate.beam] for candidate in likeliest}
        states = {history: self._state_after(history) for history in needed}

        seen = {(histories[candidate.beam], candidate.token) for candidate in likeliest}
        forced: list[tuple[int, int]] = []
        for beam in beams:
            history = histories[beam]
            for token in self._propose(states[history], vocab_scores[beam], push_progress):
                if (history, token) not in seen:  # at first all beams are the same
                    seen.add((history, token))
                    forced.append((beam, token))

        candidates = likeliest + _score_forced(forced, vocab_scores)
        proposals = []
        for candidate in candidates:
            state = states[histories[candidate.beam]].copy()
            state.add(candidate.token)
            proposals.append((candidate, state))
        if not forced:
            return proposals
        banks = [state.get_bank() for _, state in proposals]
        order = _take_turns(banks, [candidate.score for candidate in candidates], vocab_scores.dtype)
        return [proposals[place] for place in order[: len(likeliest)]]

    def _propose(self, state: ConstraintListState, scores: torch.Tensor, push_progress: bool) -> list[int]:
        """The tokens to put forward for a beam, whether they are likely or not."""
        if not state.completed:
            return state.advance() or []
        return [int(scores.argmax())] if push_progress else []


def _score_forced(forced: list[tuple[int, int]], vocab_scores: torch.Tensor) -> list[Offer]:
    """The forced (beam, token) pairs with their scores, read from the device at once."""
    if not forced:
        return []
    beams, tokens = zip(*forced, strict=True)
    vocabulary = vocab_scores.shape[-1]
    if not 0 <= min(tokens) <= max(tokens) < vocabulary:
        outside = sorted({token for token in tokens if not 0 <= token < vocabulary})
        raise SettingError(
            f"The constraints ask for the tokens {outside!r:.200}, and the model's vocabulary has {vocabulary}."
        )
    scores = vocab_scores[list(beams), list(tokens)].tolist()
    return [Offer(token, score, beam) for token, score, beam in zip(tokens, scores, beams, strict=True)]


def _take_turns(banks: list[int], scores: list[float], dtype: torch.dtype) -> list[int]:
    """The order in which candidates are taken: the best of every bank, then the second best of every bank…

    The sum is made in the precision of the scores, in which -1e9 (a beam that is not in use) swallows a bank.
    """
    weighted = (torch.tensor(banks) * BANK_WEIGHT + torch.tensor(scores, dtype=dtype)).tolist()
    by_progress = sorted(range(len(banks)), key=weighted.__getitem__, reverse=True)
    turns: dict[int, int] = {}
    previous, turn = None, 0
    for place in by_progress:
        turn = turn + 1 if banks[place] == previous else 0
        previous = banks[place]
        turns[place] = turn
    return sorted(by_progress, key=turns.__getitem__)

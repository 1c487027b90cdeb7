"""Beam scorers: what goes on, what is finished, what comes back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import UserDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from unspool.beams.hypotheses import BeamHypotheses, Ending, Hypothesis
from unspool.beams.offers import Ancestry, BeamOffers, Ids, Offer, pack_offers, read_offers
from unspool.beams.result import assemble_result
from unspool.errors import InputError, SettingError


class BeamScorer(ABC):
    """Decides after every step which beams live on, and at the end which sequences are returned."""

    @abstractmethod
    def process(
        self,
        input_ids: torch.Tensor,
        next_scores: torch.Tensor,
        next_tokens: torch.Tensor,
        next_indices: torch.Tensor,
        **kwargs: Any,
    ) -> UserDict[str, torch.Tensor]:
        """Out of the best candidates of a step, the beams of the next one."""

    @abstractmethod
    def finalize(
        self,
        input_ids: torch.Tensor,
        final_beam_scores: torch.Tensor,
        final_beam_tokens: torch.Tensor,
        final_beam_indices: torch.Tensor,
        max_length: int | None,
        **kwargs: Any,
    ) -> UserDict[str, Any]:
        """The best sequences, with those that were still being written counted in."""


class RunningBeams(NamedTuple):
    """The beams that are still being written."""

    input_ids: torch.Tensor  # (beams, length)
    scores: Sequence[float]  # their log-probabilities
    ancestry: Ancestry | None
    length: int  # of what is written


class HypothesisScorer(BeamScorer):
    """What the scorers here have in common: the finished hypotheses of every row and group, and who is done."""

    def __init__(
        self,
        batch_size: int,
        num_beams: int,
        device: torch.device | str,
        length_penalty: float = 1.0,
        do_early_stopping: bool | str = False,
        num_beam_hyps_to_keep: int = 1,
        num_beam_groups: int = 1,
        max_length: int | None = None,
    ) -> None:
        _check_counts(batch_size, num_beams, num_beam_hyps_to_keep, num_beam_groups)
        self.num_beams = num_beams
        self.device = device
        self.length_penalty = length_penalty
        self.do_early_stopping = do_early_stopping
        self.num_beam_hyps_to_keep = num_beam_hyps_to_keep
        self.num_beam_groups = num_beam_groups
        self.group_size = num_beams // num_beam_groups
        # Group j of row i has the place i * num_beam_groups + j.
        self._beam_hyps = [
            BeamHypotheses(self.group_size, length_penalty, do_early_stopping, max_length)
            for _ in range(batch_size * num_beam_groups)
        ]
        self._endings: list[list[Ending]] = [[] for _ in self._beam_hyps]
        self._done = np.zeros(batch_size * num_beam_groups, dtype=np.bool_)  # read at every step

    @property
    def batch_size(self) -> int:
        """How many rows are searched."""
        return len(self._beam_hyps) // self.num_beam_groups

    @property
    def is_done(self) -> bool:
        """Whether every row, in all its groups, is done."""
        return bool(self._done.all())

    def is_over(self, row: int, group: int = 0) -> bool:
        """Whether a group of a row is done."""
        return bool(self._done[row * self.num_beam_groups + group])

    def finished(self, row: int, group: int = 0) -> list[Hypothesis]:
        """The finished hypotheses of a group of a row that are kept so far."""
        return list(self._beam_hyps[row * self.num_beam_groups + group].beams)

    def list_endings(self, row: int, group: int = 0) -> list[Ending]:
        """Where the finished hypotheses of a group of a row came from."""
        return list(self._endings[row * self.num_beam_groups + group])

    def find_ending(self, hypothesis: Hypothesis) -> Ending:
        """Where one of the finished hypotheses came from."""
        return next(one for endings in self._endings for one in endings if one.hypothesis is hypothesis)

    def end_row(self, row: int, running: RunningBeams) -> None:
        """End the search of a row now, with its running beams counted in."""
        for place in range(row * self.num_beam_groups, (row + 1) * self.num_beam_groups):
            if not self._done[place]:
                self._finish_running(place, running)
                self._done[place] = True

    def _finish_running(self, place: int, running: RunningBeams) -> None:
        """Put the running beams of a group of a row among the finished ones."""
        first = place * self.group_size
        for beam in range(first, first + self.group_size):
            self._finish_beam(place, beam, running)

    def _finish_beam(self, place: int, beam: int, running: RunningBeams) -> None:
        ancestry = None if running.ancestry is None else running.ancestry[beam]
        own = beam - place * self.group_size
        self._finish(place, running.input_ids[beam], running.scores[beam], ancestry, running.length, beam=own)

    def _finish(
        self,
        pool: int,
        tokens: torch.Tensor,
        score: float,
        ancestry: Sequence[int] | None,
        step: int,
        *,
        place: int | None = None,
        beam: int | None = None,
        end_token: int | None = None,
    ) -> None:
        """Put a hypothesis among the finished ones of a pool, if it is one of the best."""
        kept = self._beam_hyps[pool]
        added = kept.add(tokens, score, beam_indices=ancestry, generated_len=step)
        if added is not None:
            endings = [*self._endings[pool], Ending(added, step, place, beam, end_token)]
            self._endings[pool] = [one for one in endings if any(one.hypothesis is held for held in kept.beams)]

    def _separate(self, step: BeamOffers, row: int, place: int) -> list[Offer]:
        """The candidates that a row's beams go on with; those that end in an end token are finished here."""
        candidates = step.candidates[row]
        going_on: list[Offer] = []
        for rank, candidate in enumerate(candidates):
            if candidate.token not in step.end_ids:
                going_on.append(candidate)
                if len(going_on) == self.group_size:
                    break
            # An end among the spare candidates is behind as many beams as there may be: it is none of the best.
            elif rank < self.group_size and self._may_end(step, candidate):
                self._finish(
                    place,
                    step.input_ids[candidate.beam].clone(),
                    candidate.score,
                    step.trace_ancestry(candidate.beam),
                    step.written_length,
                    place=rank,
                    end_token=candidate.token,
                )
        if len(going_on) < self.group_size:
            raise InputError(
                f"{self.group_size} beams must go on, but only {len(going_on)} of the {len(candidates)} candidates of "
                f"row {row} are no end token. Pass (1 + the number of end tokens) * {self.group_size} candidates."
            )
        best_score = max(candidate.score for candidate in candidates)
        if self._beam_hyps[place].is_done(best_score, step.length, step.prompt_length):
            self._done[place] = True
        return going_on

    def _may_end(self, step: BeamOffers, candidate: Offer) -> bool:  # noqa: ARG002 - for those who restrict it
        """Whether a beam may be finished by this end token."""
        return True

    def _assemble(
        self,
        input_ids: torch.Tensor,
        max_length: int | None,
        pad_token_id: int | torch.Tensor | None,
        eos_token_id: Ids | None,
    ) -> UserDict[str, Any]:
        """The best hypotheses of every row, over all its groups."""
        groups = self.num_beam_groups
        rows = [
            [hypothesis for pool in self._beam_hyps[first : first + groups] for hypothesis in pool.beams]
            for first in range(0, len(self._beam_hyps), groups)
        ]
        end_tokens = {id(one.hypothesis): one.token for endings in self._endings for one in endings}
        return assemble_result(
            rows,
            self.num_beam_hyps_to_keep,
            end_tokens=end_tokens,
            like=input_ids,
            scores_on=self.device,
            max_length=max_length,
            pad_token_id=pad_token_id,
            eos_token_id=eos_token_id,
        )


class BeamSearchScorer(HypothesisScorer):
    """Beam search, and with groups diverse beam search (Vijayakumar et al., 2016, https://arxiv.org/abs/1610.02424)."""

    def process(  # type: ignore[override]  # the base leaves open what else a scorer reads
        self,
        input_ids: torch.Tensor,
        next_scores: torch.Tensor,
        next_tokens: torch.Tensor,
        next_indices: torch.Tensor,
        pad_token_id: int | torch.Tensor | None = None,
        eos_token_id: Ids | None = None,
        beam_indices: Ancestry | None = None,
        group_index: int = 0,
        decoder_prompt_len: int = 0,
    ) -> UserDict[str, torch.Tensor]:
        """Out of the best candidates of one group, its beams of the next step.

        `input_ids`, `next_indices` and `beam_indices` hold and count the beams of this group only.
        """
        if not 0 <= group_index < self.num_beam_groups:
            raise InputError(f"`group_index` is {group_index}, and there are {self.num_beam_groups} groups from 0 on.")
        step = read_offers(
            input_ids,
            next_scores,
            next_tokens,
            next_indices,
            batch_size=self.batch_size,
            group_size=self.group_size,
            pad_token_id=pad_token_id,
            eos_token_id=eos_token_id,
            beam_indices=beam_indices,
            decoder_prompt_len=decoder_prompt_len,
        )
        return pack_offers(self.decide(step, group_index), (next_scores, next_tokens, next_indices), input_ids.device)

    def decide(self, step: BeamOffers, group: int) -> list[Offer]:
        """What the beams of a group go on with, out of what they are offered."""
        is_done = self._done.tolist()
        chosen: list[Offer] = []
        for row in range(self.batch_size):
            place = row * self.num_beam_groups + group
            if is_done[place]:
                chosen += step.make_padding(self.group_size)
            else:
                chosen += self._separate(step, row, place)
        return chosen

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
        """The best `num_beam_hyps_to_keep` sequences of every row, with their scores and the beams they came by."""
        running = RunningBeams(
            input_ids, final_beam_scores.tolist(), beam_indices, input_ids.shape[-1] - decoder_prompt_len
        )
        for place, is_done in enumerate(self._done.tolist()):
            if not is_done:
                self._finish_running(place, running)
        return self._assemble(input_ids, max_length, pad_token_id, eos_token_id)


def _check_counts(batch_size: int, num_beams: int, num_to_keep: int, num_groups: int) -> None:
    if not isinstance(batch_size, int) or batch_size < 1:
        raise SettingError(f"`batch_size` must be at least 1, but is {batch_size!r:.200}.")
    if not isinstance(num_beams, int) or num_beams < 2:
        raise SettingError(
            f"`num_beams` must be an integer of at least 2, but is {num_beams!r:.200}. With one beam there is nothing "
            "to search: decode greedily."
        )
    if not isinstance(num_groups, int) or num_groups < 1 or num_beams % num_groups:
        raise SettingError(
            f"`num_beam_groups` must be an integer that divides `num_beams` ({num_beams}), but is {num_groups!r:.200}."
        )
    if not isinstance(num_to_keep, int) or not 1 <= num_to_keep <= num_beams:
        raise SettingError(
            f"`num_beam_hyps_to_keep` must be between 1 and `num_beams` ({num_beams}), but is {num_to_keep!r:.200}."
        )

"""What a call keeps of its steps, in the reference's form: left-padded, one entry per step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from unspool.decoding.observer import Observer
from unspool.decoding.taken import TakenStates
from unspool.kernels.presence import runs_kernels
from unspool.kernels.sending import FetchedOnce, fetch_once
from unspool.outputs import StepLayers, StepTensors, TokenLogprob
from unspool.protocols import Forward


class Record:
    """Scores, logits, hidden states and attentions of every step, if they were asked for."""

    def __init__(
        self,
        *,
        scores: bool,
        logits: bool,
        hidden_states: bool,
        attentions: bool,
        logprobs: int | None,
        observer: Observer | None = None,
        order: torch.Tensor | None = None,
    ) -> None:
        self._order = order  # (prompts, width): the given columns in the order that they were read in, if that differs
        self._scores: list[torch.Tensor] | None = [] if scores else None
        self._logits: list[torch.Tensor] | None = [] if logits else None
        self._hidden: list[StepTensors] | None = [] if hidden_states else None
        self._attentions: list[StepTensors] | None = [] if attentions else None
        self._cross: list[StepTensors] = []
        self._taken: TakenStates | None = None  # states of drafts that several rows took, behind the prompt's
        self._rows: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # logits and scores, one per position
        self.num_top = logprobs
        self.observer = observer  # sees every step, so that nothing of one may be skipped

    def keep_forward(self, forward: Forward, pads: Sequence[int], starts: Sequence[int], counts: Sequence[int]) -> None:
        """Keep what the model returned for each row's `counts` positions from `starts` on.

        `pads` are the columns of padding before each row's first position.
        """
        if forward.is_laid_out:
            self._keep_as_it_is(forward)
            return
        # All rows end in the same column, and a reading from the first position on has the padding's columns too.
        is_prompt = not any(starts)
        num_columns = max(counts) + (min(pads) if is_prompt else 0)
        if self._hidden is not None and forward.hidden_states is not None:
            states = tuple(_align(state, counts, num_columns, 1) for state in forward.hidden_states)
            self._hidden.append(tuple(self._put_back(state, 1) for state in states) if is_prompt else states)
        if self._attentions is not None and forward.attentions is not None:
            width = forward.attentions[0].shape[-1] + min(pads)
            weights = tuple(_pad_keys(_align(w, counts, num_columns, 2), pads, width) for w in forward.attentions)
            if is_prompt:
                weights = tuple(self._put_back(one, 2) for one in weights)
            self._attentions.append(tuple(self._put_back(one, 3) for one in weights))
            if forward.cross_attentions is not None:
                self._cross.append(forward.cross_attentions)

    def keep_taken(
        self, forward: Forward, pads: Sequence[int], starts: Sequence[int], num_taken: Sequence[int]
    ) -> None:
        """Keep what the model returned for the first positions of each row that were taken of a draft."""
        self._taken = self._taken or TakenStates.of(len(num_taken))
        self._taken.keep(forward, pads, starts, num_taken)

    def _put_back(self, values: torch.Tensor, dim: int) -> torch.Tensor:
        """The prompt's columns along `dim` where the caller had them; columns behind the prompt stay."""
        if self._order is None:
            return values
        copies, width = values.shape[0] // len(self._order), self._order.shape[1]
        shape = [1] * values.dim()
        shape[0], shape[dim] = values.shape[0], width
        index = self._order.to(values.device).repeat_interleave(copies, dim=0).reshape(shape)
        prompt = values.narrow(dim, 0, width)
        return values.clone().scatter_(dim, index.expand_as(prompt), prompt)

    def _keep_as_it_is(self, forward: Forward) -> None:
        if self._hidden is not None and forward.hidden_states is not None:
            self._hidden.append(forward.hidden_states)
        if self._attentions is not None and forward.attentions is not None:
            self._attentions.append(forward.attentions)
            if forward.cross_attentions is not None:
                self._cross.append(forward.cross_attentions)

    @property
    def keeps_states(self) -> bool:
        """Whether hidden states or attentions are asked for."""
        return self._hidden is not None or self._attentions is not None

    @property
    def keeps_any(self) -> bool:
        """Whether anything of the steps is asked for, or somebody observes them."""
        kept = (self._scores, self._logits, self._hidden, self._attentions, self.num_top, self.observer)
        return any(one is not None for one in kept)

    @property
    def is_seen(self) -> bool:
        """Whether the states of steps are asked for, or somebody observes them, so that nothing can be done late."""
        return any(one is not None for one in (self._hidden, self._attentions, self.observer))

    def forget(self, num_steps: int) -> None:
        """Drop the scores and logits of the last steps, which nobody took."""
        for kept in (self._scores, self._logits):
            if kept is not None and num_steps:
                del kept[-num_steps:]

    @property
    def keeps_scores(self) -> bool:
        """Whether the processed scores of the whole vocabulary are asked for, or somebody observes them."""
        return self._scores is not None or self.observer is not None

    def keep_scores(self, logits: torch.Tensor, scores: torch.Tensor) -> None:
        """Keep a step's logits as they came, and its scores as they were chosen from: (rows, vocab) each."""
        if self._logits is not None:
            self._logits.append(logits)
        if self._scores is not None:
            self._scores.append(scores)

    @property
    def keeps_steps(self) -> bool:
        """Whether any position's logits or scores are asked for, or somebody observes them."""
        return self._scores is not None or self._logits is not None or self.observer is not None

    def keep_row(self, row: int, logits: torch.Tensor, scores: torch.Tensor) -> None:
        """Keep one position of one row (vocab,), if rows take different numbers of positions per step."""
        if self._scores is not None or self._logits is not None:
            self._rows.setdefault(row, []).append((logits.clone(), scores.clone()))

    @property
    def scores(self) -> StepTensors | None:
        """The processed scores so far."""
        return None if self._scores is None else tuple(self._scores) or self._stack_rows(1)

    @property
    def logits(self) -> StepTensors | None:
        """The model's logits so far."""
        return None if self._logits is None else tuple(self._logits) or self._stack_rows(0)

    def _stack_rows(self, which: int) -> StepTensors:
        """What was kept row by row as one entry per position (rows, vocab); zeros if a row has ended."""
        if not self._rows:
            return ()
        kept = [[pair[which] for pair in self._rows[row]] for row in sorted(self._rows)]
        nothing = torch.zeros_like(kept[0][0])
        longest = max(map(len, kept))
        return tuple(torch.stack([row[i] if i < len(row) else nothing for row in kept]) for i in range(longest))

    @property
    def hidden_states(self) -> StepLayers | None:
        """Hidden states: one tuple per step, of one tensor per layer."""
        if self._hidden is None or self._taken is None:
            return None if self._hidden is None else tuple(self._hidden)
        return (*self._hidden, *self._taken.stack_states())

    @property
    def attentions(self) -> StepLayers | None:
        """Attention weights: one tuple per step, of one tensor per layer."""
        if self._attentions is None or self._taken is None:
            return None if self._attentions is None else tuple(self._attentions)
        return (*self._attentions, *self._taken.stack_attentions(lambda weights: self._put_back(weights, 3)))

    @property
    def cross_attentions(self) -> StepLayers | None:
        """Attention weights on the encoder's states: one tuple per step, of one tensor per layer."""
        if self._attentions is None or not self._cross:
            return None
        return tuple(self._cross) if self._taken is None else (*self._cross, *self._taken.stack_cross())


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Log-probabilities on their way to the host."""

    _values: FetchedOnce  # (n, 2 + 2 * top), float64: tokens, their own, the likeliest tokens, theirs

    def read(self) -> list[TokenLogprob]:
        """The log-probabilities, once they are there."""
        return self._values.read(lambda values: list_logprobs(values.numpy()))

    def read_numbers(self) -> np.ndarray:
        """The numbers themselves, once they are there: `list_logprobs` says what they are, whenever somebody asks."""
        return self._values.read(lambda values: values.numpy().copy())


Reported = tuple[np.ndarray, int]
"""Numbers of a step's rows, as `PendingLogprobs.read_numbers` gives them, and which of the rows is meant."""


def list_logprobs(values: np.ndarray) -> list[TokenLogprob]:
    """Log-probabilities of numbers (n, 2 + 2 * top)."""
    half = (values.shape[1] - 2) // 2
    ids = values[:, : 2 + half].astype(np.int64).tolist()
    return [
        TokenLogprob(own[0], row[1], tuple(zip(own[2:], row[2 + half :], strict=True)))
        for own, row in zip(ids, values.tolist(), strict=True)
    ]


def list_reported(reported: Sequence[Reported]) -> list[TokenLogprob]:
    """The same of one row in steps after each other."""
    return list_logprobs(np.stack([values[at] for values, at in reported])) if reported else []


def fetch_logprobs(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> PendingLogprobs:
    """Begin to copy what `read_logprobs` returns; 0 stands for a token that could not be chosen."""
    if num_top and runs_kernels(logits.device):
        from unspool.kernels.gpu.sampling.beams import MOST_CANDIDATES, report_logprobs  # Triton, where a GPU is used

        if num_top <= min(MOST_CANDIDATES, logits.shape[-1]):
            return PendingLogprobs(fetch_once(report_logprobs(logits.float(), tokens, num_top)))
    tokens = tokens.clamp(min=0)
    logprobs = torch.log_softmax(logits.float(), dim=-1)
    parts = [tokens[:, None], logprobs.gather(1, tokens[:, None])]
    if num_top:
        top = logprobs.topk(min(num_top, logprobs.shape[-1]), dim=-1)
        parts += [top.indices, top.values]
    return PendingLogprobs(fetch_once(torch.cat([part.double() for part in parts], dim=1)))  # exact, in one copy


def read_logprobs(logits: torch.Tensor, tokens: torch.Tensor, num_top: int) -> list[TokenLogprob]:
    """Log-probabilities of the given tokens (n,) and of the likeliest ones under logits (n, vocab)."""
    return fetch_logprobs(logits, tokens, num_top).read()


def _align(values: torch.Tensor, counts: Sequence[int], size: int, dim: int) -> torch.Tensor:
    """Move each right-filled row's entries along `dim` to the end of `size` columns, zeros before them."""
    if values.shape[dim] == size and min(counts) == size:
        return values
    shape = list(values.shape)
    shape[dim] = size
    moved = values.new_zeros(shape)
    for row, count in enumerate(counts):
        moved[row].narrow(dim - 1, size - count, count).copy_(values[row].narrow(dim - 1, 0, count))
    return moved


def _pad_keys(weights: torch.Tensor, pads: Sequence[int], width: int) -> torch.Tensor:
    """Put the keys' columns where a left-padded row has them: (rows, heads, new, keys) → (…, width)."""
    if not any(pads):
        return weights
    padded = weights.new_zeros((*weights.shape[:-1], width))
    for row, pad in enumerate(pads):
        held = min(weights.shape[-1], width - pad)
        padded[row, ..., pad : pad + held] = weights[row, ..., :held]
    return padded

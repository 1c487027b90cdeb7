"""States of checked drafts: rows take different numbers of positions of a pass, and the output has one entry each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from unspool.decoding.forwards import find_rows
from unspool.outputs import StepLayers, StepTensors
from unspool.protocols import Forward


class TakenPosition(NamedTuple):
    """What every layer returned for one position of one row."""

    states: tuple[torch.Tensor, ...] | None  # (1, 1, hidden), or four dimensions as the layer has them
    attentions: tuple[torch.Tensor, ...] | None  # (1, heads, 1, columns), padding included
    cross: tuple[torch.Tensor, ...] | None  # (1, heads, 1, source)


@dataclass(frozen=True, slots=True)
class TakenStates:
    """Every row's taken positions, in order."""

    rows: list[list[TakenPosition]]

    @classmethod
    def of(cls, num_rows: int) -> TakenStates:
        """Of rows that have taken none."""
        return cls([[] for _ in range(num_rows)])

    def keep(self, forward: Forward, pads: Sequence[int], starts: Sequence[int], num_taken: Sequence[int]) -> None:
        """Keep the first positions that a pass returned of each row, which stand behind `starts` others."""
        for row, (pad, start, count) in enumerate(zip(pads, starts, num_taken, strict=True)):
            self.rows[row] += [_take(forward, row, place, pad, start + place + 1) for place in range(count)]

    def stack_states(self) -> StepLayers:
        """Hidden states, an entry per position; zeros of rows that have ended."""
        return self._stack(lambda one: one.states)

    def stack_attentions(self, put_back: Callable[[torch.Tensor], torch.Tensor]) -> StepLayers:
        """Attention weights, in the columns that the caller gave."""
        return tuple(tuple(map(put_back, layers)) for layers in self._stack(lambda one: one.attentions))

    def stack_cross(self) -> StepLayers:
        """Attention weights on the encoder's states."""
        return self._stack(lambda one: one.cross)

    def _stack(self, pick: Callable[[TakenPosition], StepTensors | None]) -> StepLayers:
        made = []
        for place in range(max(map(len, self.rows))):
            kept = [pick(row[place]) if place < len(row) else None for row in self.rows]
            some = next((layers for layers in kept if layers is not None), None)
            if some is None:
                return ()
            nothing = tuple(map(torch.zeros_like, some))
            layers = zip(*(layers or nothing for layers in kept), strict=True)
            made.append(tuple(torch.cat(layer) for layer in layers))
        return tuple(made)


def _take(forward: Forward, row: int, place: int, pad: int, num_keys: int) -> TakenPosition:
    def take_state(state: torch.Tensor) -> torch.Tensor:
        dim = find_rows(forward, state)
        return state.narrow(dim, row, 1).narrow(dim + 1, place, 1).clone()

    def take_weights(weights: torch.Tensor) -> torch.Tensor:
        own = weights[row : row + 1, :, place : place + 1]
        held = own[..., : min(num_keys, own.shape[-1])]
        return torch.nn.functional.pad(held, (pad, num_keys - held.shape[-1]))

    states, attentions, cross = forward.hidden_states, forward.attentions, forward.cross_attentions
    return TakenPosition(
        None if states is None else tuple(map(take_state, states)),
        None if attentions is None else tuple(map(take_weights, attentions)),
        None if cross is None else tuple(w[row : row + 1, :, place : place + 1].clone() for w in cross),
    )

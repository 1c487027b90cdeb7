"""What a beam scorer is offered in one step, and what it returns."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeAlias

import torch

from unspool.errors import InputError
from unspool.kernels.sending import fetch, send

Ids: TypeAlias = int | Sequence[int] | torch.Tensor
Ancestry: TypeAlias = Sequence[Sequence[int]]


class Offer(NamedTuple):
    """A token that a beam could go on with, and the score of the two together."""

    token: int
    score: float
    beam: int  # counted over the whole batch


@dataclass(frozen=True)
class BeamOffers:
    """The candidates of every row, the best first; read from the device once."""

    find_ids: Callable[[], torch.Tensor]  # the sequences (batch * group, length - 1), asked for if one ends
    length: int  # of a sequence with the token of this step
    candidates: list[list[Offer]]
    end_ids: frozenset[int]
    pad_id: int | None
    ancestry: Ancestry | None
    prompt_length: int

    @cached_property
    def input_ids(self) -> torch.Tensor:
        """The sequences (batch * group, length - 1)."""
        return self.find_ids()

    @property
    def written_length(self) -> int:
        """How many tokens are written after the prompt, with the one of this step."""
        return self.length - self.prompt_length

    @cached_property
    def histories(self) -> list[tuple[int, ...]]:
        """The sequences, read from the device once and only if someone asks."""
        return [tuple(sequence) for sequence in self.input_ids.tolist()]

    def trace_ancestry(self, beam: int) -> tuple[int, ...] | None:
        """The beams that a hypothesis ending in this step came by."""
        return None if self.ancestry is None else (*self.ancestry[beam], beam)

    def make_padding(self, count: int) -> list[Offer]:
        """What the beams of a row that is done go on with."""
        if not self.end_ids or self.pad_id is None:
            raise InputError(
                "A row of the batch is done while others are not, and is filled up with padding. "
                "Pass `eos_token_id` and `pad_token_id`."
            )
        return [Offer(self.pad_id, 0.0, 0)] * count


def pack_offers(
    chosen: list[Offer], like: tuple[torch.Tensor, torch.Tensor, torch.Tensor], device: torch.device
) -> UserDict[str, torch.Tensor]:
    """The chosen candidates of all rows as tensors, which look like the scores, tokens and indices that came in."""
    tokens, scores, beams = zip(*chosen, strict=True)
    return UserDict(
        {
            f"next_beam_{name}": send(values, device, one.dtype)  # (batch * group,)
            for name, values, one in zip(("scores", "tokens", "indices"), (scores, tokens, beams), like, strict=True)
        }
    )


def list_offers(
    tokens: Sequence[Sequence[int]], scores: Sequence[Sequence[float]], beams: Sequence[Sequence[int]], group_size: int
) -> list[list[Offer]]:
    """The candidates of every row, whose beams are counted from the row's first."""
    return [
        [Offer(token, score, row * group_size + beam) for token, score, beam in zip(*each, strict=True)]
        for row, each in enumerate(zip(tokens, scores, beams, strict=True))
    ]


def read_offers(
    input_ids: torch.Tensor,
    next_scores: torch.Tensor,
    next_tokens: torch.Tensor,
    next_indices: torch.Tensor,
    *,
    batch_size: int,
    group_size: int,
    pad_token_id: int | torch.Tensor | None,
    eos_token_id: Ids | None,
    beam_indices: Ancestry | None,
    decoder_prompt_len: int,
) -> BeamOffers:
    """Check the shapes, and bring the candidates over from the device."""
    if input_ids.ndim != 2 or input_ids.shape[0] != batch_size * group_size:
        raise InputError(
            f"`input_ids` has the shape {tuple(input_ids.shape)}, and this scorer keeps {group_size} beams for each "
            f"of {batch_size} rows. Pass {batch_size * group_size} sequences."
        )
    shapes = {tuple(tensor.shape) for tensor in (next_scores, next_tokens, next_indices)}
    if len(shapes) > 1 or next_scores.ndim != 2 or next_scores.shape[0] != batch_size:
        raise InputError(
            f"`next_scores`, `next_tokens` and `next_indices` must be of one shape ({batch_size}, candidates), "
            f"but are of {sorted(shapes)}."
        )
    # Begun together, so that the device is waited for once.
    fetched = [fetch(part) for part in (next_tokens, next_scores, next_indices)]
    tokens, scores, beams = (part.read().tolist() for part in fetched)
    for named in beams:
        if named and not 0 <= min(named) <= max(named) < group_size:
            raise InputError(f"`next_indices` names beams outside of the {group_size} of a row: {named!r:.200}.")
    return BeamOffers(
        find_ids=lambda: input_ids,
        length=input_ids.shape[-1] + 1,
        candidates=list_offers(tokens, scores, beams, group_size),
        end_ids=frozenset(read_ids(eos_token_id)),
        pad_id=None if pad_token_id is None else int(pad_token_id),
        ancestry=beam_indices,
        prompt_length=decoder_prompt_len,
    )


def read_ids(ids: Ids | None) -> list[int]:
    """One id, several or none, as a list."""
    if ids is None:
        return []
    if isinstance(ids, torch.Tensor):
        return [int(one) for one in ids.reshape(-1).tolist()]
    return [ids] if isinstance(ids, int) else [int(one) for one in ids]

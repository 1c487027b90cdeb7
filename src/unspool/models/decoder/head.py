"""The end of a decoder's pass, whichever path runs it: logits of final and earlier states."""

from __future__ import annotations

from collections.abc import Callable

import torch

from unspool.errors import InputError
from unspool.models.decoder.layers import DecoderWeights
from unspool.models.decoder.spec import DecoderSpec
from unspool.protocols import Forward


def cap_logits(spec: DecoderSpec, logits: torch.Tensor) -> torch.Tensor:
    """Logits with the family's soft cap, if it has one."""
    cap = spec.logit_softcap
    return logits if cap is None else torch.tanh(logits / cap) * cap


def unscale_states(spec: DecoderSpec, hidden: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """States of all layers as the family defines them: ours may be kept scaled."""
    if spec.state_scale == 1.0 and spec.logit_scale == 1.0:
        return hidden
    *before, last = hidden
    return (*(states * spec.state_scale for states in before), last / spec.logit_scale)


def read_out(
    spec: DecoderSpec,
    weights: DecoderWeights,
    states: torch.Tensor,
    early: list[torch.Tensor],
    head: Callable[[torch.Tensor], torch.Tensor],
) -> Forward:
    """The logits of final states and, by the same product, those of earlier layers' states (rows, hidden).

    Earlier states are read as they are: no final norm, no cap. DoLa is defined so.
    """
    if not early:
        return Forward(cap_logits(spec, head(states)))
    earlier = torch.cat(early)  # (layers * rows, hidden)
    if weights.project_out is not None:
        earlier = weights.project_out(earlier)
    logits = head(torch.cat((states, earlier)))  # ((1 + layers) * rows, vocab): the head is read once
    final, *rest = torch.split(logits, states.shape[0])
    return Forward(cap_logits(spec, final), early_logits=tuple(rest))


def check_positions(spec: DecoderSpec, weights: DecoderWeights, longest: int) -> None:
    """Raise if a row would get more positions than the model learned."""
    if weights.positions is None:
        return
    limit = weights.positions.shape[0] - spec.position_offset
    if longest > limit:
        raise InputError(f"position {longest - 1} was asked for and {spec.family} learned positions up to {limit - 1}")

"""What forward passes returned: chunks of one reading joined, and rows of a pass picked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from unspool.protocols import Forward


def join_chunks(before: Forward, after: Forward, real: Sequence[int]) -> Forward:
    """Two chunks of one reading: a row keeps its earlier logits where the later chunk has none of its tokens."""
    if all(real):
        return after
    is_read = torch.tensor([count > 0 for count in real], device=after.logits.device)[:, None]
    early = None
    if before.early_logits is not None and after.early_logits is not None:
        pairs = zip(after.early_logits, before.early_logits, strict=True)
        early = tuple(torch.where(is_read, later, earlier) for later, earlier in pairs)
    logits = torch.where(is_read, after.logits, before.logits)
    return replace(after, logits=logits, early_logits=early, likeliest=None, epilogue=None)


def take_first_rows(forward: Forward, starts: Sequence[int], counts: Sequence[int]) -> Forward:
    """What the first rows of a pass returned, without keys that only others hold."""
    rows, num_keys = len(counts), max(start + count for start, count in zip(starts, counts, strict=True))

    def pick(tensors: tuple[torch.Tensor, ...] | None) -> tuple[torch.Tensor, ...] | None:
        return None if tensors is None else tuple(tensor[:rows] for tensor in tensors)

    states = forward.hidden_states
    if states is not None:
        states = tuple(state.narrow(find_rows(forward, state), 0, rows) for state in states)
    return replace(
        forward,
        hidden_states=states,
        attentions=None if forward.attentions is None else tuple(w[:rows, ..., :num_keys] for w in forward.attentions),
        cross_attentions=pick(forward.cross_attentions),
    )


def take_position(forward: Forward, place: int, num_new: int) -> Forward:
    """The states and weights of one of `num_new` positions of a pass, as a pass over that position returns them."""

    def pick_states(tensors: tuple[torch.Tensor, ...] | None) -> tuple[torch.Tensor, ...] | None:
        if tensors is None:
            return None
        return tuple(tensor.narrow(find_rows(forward, tensor) + 1, place, 1) for tensor in tensors)

    def pick_weights(tensors: tuple[torch.Tensor, ...] | None, num_later: int) -> tuple[torch.Tensor, ...] | None:
        if tensors is None:
            return None
        return tuple(weights[:, :, place : place + 1, : weights.shape[-1] - num_later] for weights in tensors)

    return replace(
        forward,
        hidden_states=pick_states(forward.hidden_states),
        attentions=pick_weights(forward.attentions, num_new - 1 - place),
        cross_attentions=pick_weights(forward.cross_attentions, 0),
    )


def select_rows(forward: Forward, index: torch.Tensor) -> Forward:
    """What a pass returned for the rows at `index`."""

    def pick(tensors: Any) -> Any:
        if isinstance(tensors, tuple | list):  # a layer with two streams has a tuple of its own
            return type(tensors)(map(pick, tensors))
        return None if tensors is None else tensors.index_select(0, index)

    def pick_states(tensors: Any) -> Any:
        if isinstance(tensors, tuple | list):
            return type(tensors)(map(pick_states, tensors))
        return None if tensors is None else tensors.index_select(find_rows(forward, tensors), index)

    def pick_one(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.index_select(0, index)

    return replace(
        forward,
        logits=forward.logits.index_select(0, index),
        hidden_states=pick_states(forward.hidden_states),
        attentions=pick(forward.attentions),
        cross_attentions=pick(forward.cross_attentions),
        early_logits=pick(forward.early_logits),
        last_states=pick_one(forward.last_states),
        likeliest=pick_one(forward.likeliest) if forward.epilogue is None else None,
        epilogue=None,  # rows may come twice in the logits and once in it: the readout does it again in torch
    )


def join_rows(passes: Sequence[Forward]) -> Forward:
    """What passes returned for the next tokens of their rows, as one pass over all of them."""
    first = passes[0]
    early = [one.early_logits for one in passes if one.early_logits is not None]
    # After an epilogue they are by its scores.
    likeliest = [one.likeliest for one in passes if one.likeliest is not None and one.epilogue is None]
    return Forward(
        torch.cat([one.logits for one in passes]),
        early_logits=tuple(map(torch.cat, zip(*early, strict=True))) if len(early) == len(passes) else None,
        likeliest=torch.cat(likeliest) if len(likeliest) == len(passes) else None,
        path=first.path,
        path_reason=first.path_reason,
    )


def find_rows(forward: Forward, state: torch.Tensor) -> int:
    """The dimension of the rows in a layer's hidden state; columns are the next one."""
    return forward.state_rows if state.dim() == 4 else 0

"""A pass over some of the rows at a time, so that what lies between the layers takes less memory."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import torch

from unspool.protocols import Answer, Ask, Forward


def ask_in_parts(answer: Answer, ask: Ask, num_parts: int) -> Forward:
    """Ask for `num_parts` passes, each over every `num_parts`-th row: one beam of every prompt."""
    given = ask.tokens if ask.tokens is not None else ask.embeds
    assert given is not None
    parts = ask.cache.divide(num_parts, given.shape[1])
    want = replace(ask.want, epilogue=None)  # it may need rows of several parts
    answers = [
        answer(
            Ask(
                ask.model,
                part,
                None if ask.tokens is None else ask.tokens[first::num_parts],
                None if ask.counts is None else ask.counts[first::num_parts],
                want,
                None if ask.embeds is None else ask.embeds[first::num_parts],
            )
        )
        for first, part in enumerate(parts)
    ]
    ask.cache.rejoin(parts)
    return Forward(**{one.name: _weave([getattr(answer, one.name) for answer in answers]) for one in fields(Forward)})


def _weave(values: list[Any]) -> Any:
    """The parts' tensors as one, rows in their old order; tuples of tensors one by one, other things as they are."""
    first = values[0]
    if any(value is None for value in values):  # what only some passes found on their way
        return None
    if isinstance(first, str | int):
        return first
    if isinstance(first, tuple):
        return tuple(_weave(list(column)) for column in zip(*values, strict=True))
    return torch.stack(values, dim=1).flatten(0, 1)  # (rows / parts, parts, …) -> (rows, …)

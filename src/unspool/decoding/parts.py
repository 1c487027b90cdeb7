"""A forward pass over some of the rows at a time, so that what lies between the layers takes less memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from unspool.cache import Cache
from unspool.protocols import Forward, Model, Want


def run_in_parts(
    model: Model,
    tokens: torch.Tensor | None,
    cache: Cache,
    *,
    num_parts: int,
    counts: Sequence[int] | None,
    want: Want,
    embeds: torch.Tensor | None,
) -> Forward:
    """One pass over all rows, or `num_parts` passes, each over every `num_parts`-th row: one beam of every prompt."""
    if num_parts == 1:
        return model.forward(tokens, cache, counts=counts, want=want, embeds=embeds)
    given = tokens if tokens is not None else embeds
    assert given is not None
    parts = cache.divide(num_parts, given.shape[1])
    want = replace(want, reading=None)  # it may need rows of several parts
    answers = [
        model.forward(
            None if tokens is None else tokens[first::num_parts],
            part,
            counts=None if counts is None else counts[first::num_parts],
            want=want,
            embeds=None if embeds is None else embeds[first::num_parts],
        )
        for first, part in enumerate(parts)
    ]
    cache.rejoin(parts)
    return Forward(**{one.name: _weave([getattr(answer, one.name) for answer in answers]) for one in fields(Forward)})


def _weave(values: list[Any]) -> Any:
    """The parts' tensors as one, rows in their old order; tuples of tensors one by one, other things as they are."""
    first = values[0]
    if first is None or isinstance(first, str):
        return first
    if isinstance(first, tuple):
        return tuple(_weave(list(column)) for column in zip(*values, strict=True))
    return torch.stack(values, dim=1).flatten(0, 1)  # (rows / parts, parts, …) -> (rows, …)

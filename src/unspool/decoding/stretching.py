"""Several steps in one call of a model, over what a reader holds."""

from __future__ import annotations

from typing import cast

import torch

from unspool.decoding.reader import Reader, answer_at_once
from unspool.decoding.rows import Rows
from unspool.kernels.token_choice import TokenChoice
from unspool.protocols import LAST, Choose, Stretch, Stretching


def takes_stretches(reader: Reader) -> bool:
    """Whether the model can take steps several at a time, and nothing else is asked of them."""
    return (
        "stretches" in reader.model.info.can
        and reader.answer is answer_at_once
        and reader.keeps_cache
        and reader.num_parts == 1
        and reader.want == LAST
    )


def take_steps(
    reader: Reader,
    rows: Rows,
    num_steps: int,
    ends: tuple[int, ...],
    choose: Choose | None = None,
    forbidden: tuple[int, ...] = (),
) -> Stretch | None:
    """What up to `num_steps` steps choose, greedily without forbidden tokens or by `choose`, as far as every row has a
    token to choose; the last is the first in which a row gets one of the `ends`.

    A step counts once `accept_step` is called: until then the cache holds what it held, with keys past it.
    None if steps must be taken one by one.
    """
    num_steps = _fit_steps(reader, rows, num_steps)
    if num_steps < 1:
        return None
    model = cast(Stretching, reader.model)
    stretch = model.take_steps(rows.last_tokens(), reader.cache, num_steps, ends, choose, forbidden)
    if stretch is not None and min(stretch.steps[-1]) < 0:
        stretch.steps.pop()  # taken again alone, it says why there is none
    return stretch


def accept_step(reader: Reader, rows: Rows, path: str) -> None:
    """Count one of the steps that were taken at once."""
    reader.cache.advance(len(rows))
    reader.num_passes += 1
    reader.path, reader.path_reason = path, ""


def launch_steps(reader: Reader, rows: Rows, num_steps: int, choice: TokenChoice | None = None) -> torch.Tensor | None:
    """What up to `num_steps` steps on a device choose (steps, rows), greedily or by `choice`, all launched and none
    waited for.

    None if steps must be taken one by one.
    """
    num_steps = _fit_steps(reader, rows, num_steps)
    if num_steps < 1:
        return None
    tokens = rows.unread(reader.cache.lengths)[0]
    chosen = cast(Stretching, reader.model).launch_steps(tokens, reader.cache, num_steps, choice)
    if chosen is not None:
        reader.num_passes += len(chosen)
    return chosen


def _fit_steps(reader: Reader, rows: Rows, num_steps: int) -> int:
    """How many of the steps the cache has room for; none if a row has not exactly one token that is unread."""
    held, room = reader.cache.lengths, reader.cache.room
    if any(length != n + 1 for length, n in zip(rows.lengths, held, strict=True)):
        return 0
    return num_steps if room is None else min(num_steps, room - max(held))

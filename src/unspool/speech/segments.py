"""Cutting what was written for a window into segments at its timestamps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SECONDS_PER_STEP = 0.02  # of timestamps
SECONDS_PER_FRAME = 0.01


@dataclass(frozen=True)
class Slice:
    """A segment of a window: its tokens' places, and when it begins and ends in the whole sound."""

    first: int
    stop: int
    start: float
    end: float


def cut_window(
    tokens: Sequence[int], first_timestamp: int, seek: int, num_frames: int, stride: int
) -> tuple[list[Slice], int]:
    """The segments of a window at frame `seek`, and how many frames to go on.

    Two timestamps side by side end a segment and begin the next. What follows the last such pair is unfinished, and
    the next window begins there; a single timestamp at the end says that nothing follows.
    """
    offset = seek * SECONDS_PER_STEP / stride
    is_stamp = [token >= first_timestamp for token in tokens]
    stops = [place + 1 for place in range(len(tokens) - 1) if is_stamp[place] and is_stamp[place + 1]]
    if not stops:
        return [_cut_whole(tokens, is_stamp, first_timestamp, offset, num_frames)], num_frames
    ends_alone = is_stamp[-2:] == [False, True]
    if ends_alone:
        stops.append(len(tokens))
    else:
        stops[-1] += 1  # the timestamp that begins what is unfinished is kept: it shows that there was more
    found, first = [], 0
    for stop in stops:
        last = stop - 1 if stop != stops[-1] or ends_alone else stop - 2
        start, end = (tokens[place] - first_timestamp for place in (first, last))
        found.append(Slice(first, stop, offset + start * SECONDS_PER_STEP, offset + end * SECONDS_PER_STEP))
        first = stop
    if ends_alone:
        return found, num_frames
    reached = (tokens[stops[-1] - 2] - first_timestamp) * stride
    # A window must lead on, whatever a model writes.
    return found, reached if reached > 0 else num_frames


def _cut_whole(
    tokens: Sequence[int], is_stamp: Sequence[bool], first_timestamp: int, offset: float, num_frames: int
) -> Slice:
    """All of a window as one segment, which ends at its last timestamp or with the window."""
    steps = int(num_frames * SECONDS_PER_FRAME / SECONDS_PER_STEP)
    stamps = [token for token, is_one in zip(tokens, is_stamp, strict=True) if is_one]
    if stamps and stamps[-1] != first_timestamp:
        steps = stamps[-1] - first_timestamp
    return Slice(0, len(tokens), offset, offset + steps * SECONDS_PER_STEP)

"""Stopping where a text only repeats itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Final

import torch

from unspool.errors import SettingError
from unspool.stopping.base import StoppingCriteria

FEWEST_REPEATS: Final = 3  # of a period, in the tokens that are looked at
LONGEST: Final = 4_096


class RepeatCriteria(StoppingCriteria):
    """Stops the rows whose last tokens, `stop_on_repeats` of them, are the same few over and over, three times or more.

    The prompt's tokens count as a row's own.
    """

    known_ends: ClassVar[Mapping[int, bool]] = MappingProxyType({})  # any token may be the last of a loop

    def __init__(self, stop_on_repeats: int) -> None:
        is_count = isinstance(stop_on_repeats, int) and not isinstance(stop_on_repeats, bool)
        if not is_count or not 2 * FEWEST_REPEATS <= stop_on_repeats <= LONGEST:
            raise SettingError(
                f"`stop_on_repeats` must be a number of tokens from {2 * FEWEST_REPEATS} to {LONGEST}, but is "
                f"{stop_on_repeats!r:.40}."
            )
        self.stop_on_repeats = stop_on_repeats

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """The rows that repeat themselves."""
        flags = [self.match(tail) is not None for tail in input_ids[:, -self.reach :].tolist()]
        return torch.tensor(flags, dtype=torch.bool, device=input_ids.device)  # (rows,)

    @property
    def reach(self) -> int:
        """How many of a row's last tokens are looked at."""
        return self.stop_on_repeats

    def match(self, ids: Sequence[int]) -> str | None:
        """What is repeated, in words, if the last of `ids`, one row's tokens, ends a loop."""
        count, length = self.stop_on_repeats, len(ids)
        if length < count:
            return None
        longest, last = count // FEWEST_REPEATS, ids[-1]
        recent = ids[-2 : -longest - 2 : -1]
        period, tail = 0, None
        while True:  # only as far back as the last token stands again can it be repeated
            try:
                period = recent.index(last, period) + 1
            except ValueError:
                return None
            if ids[-1 - 2 * period] != last:
                continue
            tail = ids[-count:] if tail is None else tail
            if tail[period:] == tail[:-period]:
                return f"{period} tokens"

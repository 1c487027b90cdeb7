"""Which processors a call's settings switch on, and in which order. The order is the reference's."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from unspool.config import GenerationConfig
from unspool.logits.base import LogitsProcessor, LogitsProcessorList
from unspool.logits.temperature import TemperatureLogitsWarper
from unspool.logits.truncation import TopKLogitsWarper, TopPLogitsWarper

PerRow = Callable[[str], Any]
"""A setting's value by name: one number, or a list with one for each of the call's rows."""


@dataclass(frozen=True)
class Entry:
    """One line of the order: the setting, when it is on, and the processor it makes."""

    setting: str
    is_on: Callable[[Any], bool]
    make: Callable[[PerRow], LogitsProcessor]


SAMPLING_ORDER: tuple[Entry, ...] = (
    Entry(
        "temperature",
        lambda value: value is not None and value != 1.0,
        lambda get: TemperatureLogitsWarper(get("temperature")),
    ),
    Entry("top_k", lambda value: value is not None and value != 0, lambda get: TopKLogitsWarper(get("top_k"))),
    Entry(
        "top_p",
        lambda value: isinstance(value, (list, tuple)) or (value is not None and value < 1.0),
        lambda get: TopPLogitsWarper(get("top_p")),
    ),
)
"""Applied when sampling, after the caller's own processors."""


def build_processors(
    settings: GenerationConfig, custom: Iterable[LogitsProcessor], per_row: PerRow
) -> LogitsProcessorList:
    """The caller's own processors, and after them those that shape the distribution for sampling."""
    processors = LogitsProcessorList(custom)
    if settings.do_sample:
        for entry in SAMPLING_ORDER:
            if entry.is_on(getattr(settings, entry.setting)):
                processors.append(entry.make(per_row))
    return processors

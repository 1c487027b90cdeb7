"""Processors: pure functions that change the scores of the next token."""

from __future__ import annotations

from unspool.logits.base import LogitsProcessor, LogitsProcessorList
from unspool.logits.temperature import TemperatureLogitsWarper
from unspool.logits.truncation import TopKLogitsWarper, TopPLogitsWarper

__all__ = [
    "LogitsProcessor",
    "LogitsProcessorList",
    "TemperatureLogitsWarper",
    "TopKLogitsWarper",
    "TopPLogitsWarper",
]

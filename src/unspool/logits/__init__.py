"""Processors: pure functions that change the scores of the next token.

Those that settings switch on are listed in `order`; the rest of the names are these.
"""

from __future__ import annotations

from unspool.lazy import find_lazily
from unspool.logits.order import PROCESSORS
from unspool.registry import find_home, find_name

PUBLIC = HOMES = {
    **{find_name(entry.processor): find_home(entry.processor) for entry in PROCESSORS.built_in},
    "AlternatingCodebooksLogitsProcessor": "unspool.logits.audio",
    "ClassifierFreeGuidanceLogitsProcessor": "unspool.logits.guidance",
    "LogitsProcessor": "unspool.logits.base",
    "LogitsProcessorList": "unspool.logits.base",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "unspool.logits.guidance",
    "WhisperTimeStampLogitsProcessor": "unspool.logits.whisper",
}
"""Where each name is; `__init__.pyi` says the same to type checkers (`python tools/make_stubs.py`)."""

__all__ = sorted(HOMES)
__getattr__ = find_lazily(__name__, HOMES)

"""From a watermark's settings to its processor."""

from __future__ import annotations

from typing import Any

from unspool.config import (
    BaseWatermarkingConfig,
    GumbelWatermarkingConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)
from unspool.errors import UnsupportedError
from unspool.logits.watermark import WatermarkProcessor
from unspool.watermark.green_list import WatermarkLogitsProcessor
from unspool.watermark.gumbel import GumbelWatermarkLogitsProcessor
from unspool.watermark.synthid import SynthIDTextWatermarkLogitsProcessor


def make_processor(config: BaseWatermarkingConfig, vocab_size: int, device: Any = None) -> WatermarkProcessor:
    """The processor that writes a watermark."""
    config.validate()
    if isinstance(config, WatermarkingConfig):
        return WatermarkLogitsProcessor(vocab_size, device, **config.to_dict())
    if isinstance(config, SynthIDTextWatermarkingConfig):
        return SynthIDTextWatermarkLogitsProcessor(**config.to_dict(), device=device)
    if isinstance(config, GumbelWatermarkingConfig):
        return GumbelWatermarkLogitsProcessor(vocab_size, device, config.hashing_key, config.context_width)
    raise UnsupportedError(f"this version has no watermark of {type(config).__name__}; make its processor yourself")

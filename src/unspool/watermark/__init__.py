"""Watermarks: processors that write them, detectors that find them, and the training of SynthID-Text's."""

from __future__ import annotations

from unspool.watermark.bayesian import (
    BayesianDetectorConfig,
    BayesianDetectorModel,
    BayesianWatermarkDetectorModelOutput,
    SynthIDTextWatermarkDetector,
)
from unspool.watermark.detector import WatermarkDetector, WatermarkDetectorOutput
from unspool.watermark.green_list import WatermarkLogitsProcessor
from unspool.watermark.gumbel import GumbelWatermarkLogitsProcessor
from unspool.watermark.making import make_processor
from unspool.watermark.synthid import SynthIDTextWatermarkLogitsProcessor

__all__ = [
    "BayesianDetectorConfig",
    "BayesianDetectorModel",
    "BayesianWatermarkDetectorModelOutput",
    "GumbelWatermarkLogitsProcessor",
    "SynthIDTextWatermarkDetector",
    "SynthIDTextWatermarkLogitsProcessor",
    "WatermarkDetector",
    "WatermarkDetectorOutput",
    "WatermarkLogitsProcessor",
    "make_processor",
]

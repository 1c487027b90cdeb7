"""The settings of a generation."""

from __future__ import annotations

from unspool.config.compiling import CompileConfig
from unspool.config.generation import GenerationConfig, keep_unknown
from unspool.config.modes import GenerationMode
from unspool.config.parameter import Parameter
from unspool.config.parameters import PARAMETERS
from unspool.config.rules import find_unused
from unspool.config.values import check_value
from unspool.config.watermarking import (
    BaseWatermarkingConfig,
    GumbelWatermarkingConfig,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

__all__ = [
    "PARAMETERS",
    "BaseWatermarkingConfig",
    "CompileConfig",
    "GenerationConfig",
    "GenerationMode",
    "GumbelWatermarkingConfig",
    "Parameter",
    "SynthIDTextWatermarkingConfig",
    "WatermarkingConfig",
    "check_value",
    "find_unused",
    "keep_unknown",
]

"""The plan of settings from one origin, on a model that is only described."""

from __future__ import annotations

from typing import Any

from unspool import GenerationConfig
from unspool.plan import Plan, PromptShape, merge, settle
from unspool.protocols import ModelInfo

INFO = ModelInfo("fake", 23, 4, 1, 1)
SHAPE = PromptShape(num_rows=2, width=5, longest=5)
SPOKEN = {
    "call": "in the call",
    "config": "in the generation_config given",
    "model": "by the model's generation_config.json",
}


def assign(**settings: Any) -> GenerationConfig:
    """A config with these settings, whatever they are together: what a model's file may hold."""
    config = GenerationConfig()
    for name, value in settings.items():
        setattr(config, name, value)
    return config


def plan_for(origin: str = "call", shape: PromptShape = SHAPE, info: ModelInfo = INFO, **settings: Any) -> Plan:
    """The plan of settings that all come from one origin."""
    layers = {"model": None, "config": None, "call": {}}
    layers[origin] = settings if origin == "call" else assign(**settings)
    return settle(*merge(layers["model"], layers["config"], layers["call"]), info, shape)

"""Settings of encoder-decoders, with sources of different lengths and rows that end at different times."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.fuzz import relations
from tests.fuzz.calls import Call, draw_call
from tests.fuzz.kinds import cache_settings, decoder_settings

NAME = "encoder_decoder_settings"
MODELS = [*["t5", "bart", "marian", "pegasus"] * 3, "adapted t5", "adapted bart"]
STRATEGIES = [name for name in decoder_settings.STRATEGIES if name != "dola"]
CACHES = ("kind", "none", "chunks")
SHORT = 8


def warm() -> None:
    """Load the models."""
    for model in dict.fromkeys(MODELS):
        relations.load(model)


def make(rng: random.Random) -> tuple[Call, str, Any]:
    """A call, the relation to check, and what it needs."""
    call = draw_call(rng, MODELS, STRATEGIES)
    if rng.random() < 0.3:
        return cache_settings.draw_relation(rng, call, CACHES)
    return decoder_settings.draw_relation(rng, call, decoder_settings.RELATIONS)


def run(given: tuple[Call, str, Any], folder: Path) -> None:
    """Make the call two ways, and compare."""
    (cache_settings if given[1] in CACHES else decoder_settings).run(given, folder)

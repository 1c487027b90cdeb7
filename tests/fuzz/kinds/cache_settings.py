"""Caches change nothing: exact kinds, no cache, prompts in pieces, and a prefix that was read before."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.fuzz import relations
from tests.fuzz.calls import Call, draw_call, draw_ids
from tests.fuzz.kinds.decoder_settings import MODELS, STRATEGIES

NAME = "cache_settings"
EXACT = (
    "static",
    "offloaded",
    "offloaded_static",
    "sliding_window",
    "hybrid",
    "offloaded_hybrid",
    "paged",
    "paged_hybrid",
)
RELATIONS = ("kind", "kind", "none", "chunks", "prefix")
SHORT = 8


def warm() -> None:
    """Load the models."""
    for model in MODELS:
        relations.load(model)


def make(rng: random.Random) -> tuple[Call, str, Any]:
    """A call, the relation to check, and what it needs."""
    return draw_relation(rng, draw_call(rng, MODELS, STRATEGIES), RELATIONS)


def draw_relation(rng: random.Random, call: Call, names: tuple[str, ...]) -> tuple[Call, str, Any]:
    """One of the relations, with the kind of cache or the size that it needs."""
    name = rng.choice(names)
    if name == "kind":
        return call, name, rng.choice(EXACT)
    if name == "prefix":
        beginning = draw_ids(rng, 12)
        return replace(call, rows=[beginning + row for row in call.rows]), name, len(beginning)
    return call, name, rng.randint(1, 5)


def run(given: tuple[Call, str, Any], folder: Path) -> None:
    """Make the call two ways, and compare."""
    call, name, how = given
    whole = relations.run(call)
    if name == "kind":
        other = relations.run(call.set(cache_implementation=how))
    elif name == "none":
        other = relations.run(call.set(use_cache=False))
    elif name == "chunks":
        other = relations.run(call.set(prefill_chunk_size=how))
    else:
        other = relations.run(call, relations.after_prefix(call, how))
    relations.check(call, whole, other, what=f"{name} {how}", alike=False)

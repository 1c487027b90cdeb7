"""Drafts change nothing: greedy search with every drafter, sampling with guesses that come without distributions."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.fuzz import relations
from tests.fuzz.calls import Call, draw_call
from tests.fuzz.kinds.decoder_settings import MODELS

NAME = "speculative_settings"
DRAFTERS = ("lookup", "early exit", "model")
SHORT = 12


def warm() -> None:
    """Load the models."""
    for model in [*MODELS, "t5", "llama_draft"]:
        relations.load(model)


def make(rng: random.Random) -> tuple[Call, str, dict[str, Any]]:
    """A call without drafts, the drafter, and its settings."""
    drafter = rng.choice(DRAFTERS)
    models = {"lookup": [*MODELS, "t5"], "early exit": MODELS, "model": ["llama"]}[drafter]
    call = draw_call(rng, models, ["greedy", "sampling"] if drafter == "lookup" else ["greedy"])
    call = call.set(max_new_tokens=rng.randint(1, 16))
    if rng.random() < 0.4:
        call = call.set(cache_implementation=rng.choice(["static", "paged", "hybrid", "sliding_window", "offloaded"]))
    if drafter == "lookup":
        size = rng.randint(1, 6)
        return call, drafter, {"prompt_lookup_num_tokens": size, "max_matching_ngram_size": rng.randint(1, 3)}
    told = {"num_assistant_tokens": rng.randint(1, 6)}
    told["assistant_confidence_threshold"] = rng.choice([0.0, 0.0, 0.3])
    told["num_assistant_tokens_schedule"] = rng.choice(["constant", "heuristic", "heuristic_transient"])
    return call, drafter, told | ({"assistant_early_exit": rng.randint(1, 3)} if drafter == "early exit" else {})


def run(given: tuple[Call, str, dict[str, Any]], folder: Path) -> None:
    """Make the call without drafts and with them, and compare."""
    call, drafter, told = given
    more = {"assistant_model": relations.load("llama_draft")} if drafter == "model" else {}
    plain = relations.run(call)
    drafted = relations.run(call.set(**told), lambda call: relations.generate(call, **more))
    relations.check(call, plain, drafted, what=f"{drafter} {told}", alike=False)

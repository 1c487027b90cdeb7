"""Settings of decoders: the same alone and in a batch, streamed, in another order, saved, with outputs."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tests.fuzz import relations
from tests.fuzz.calls import Call, draw_call

NAME = "decoder_settings"
MODELS = ["bloom", "gemma2", "gpt2", "gpt_neox", "llama", "mamba", "mistral", "opt", "phi", "qwen2", "qwen3"]
STRATEGIES = [
    *("greedy", "sampling", "sampling", "beams", "beam sampling", "groups", "forced words"),
    *("contrastive", "dola", "guidance", "lookup"),
]
RELATIONS = ("alone", "order", "stream", "file", "outputs", "again")
SHORT = 12


def warm() -> None:
    """Load the models."""
    for model in MODELS:
        relations.load(model)


def make(rng: random.Random) -> tuple[Call, str, Any]:
    """A call, the relation to check, and what it needs."""
    return draw_relation(rng, draw_call(rng, MODELS, STRATEGIES), RELATIONS)


def draw_relation(rng: random.Random, call: Call, names: tuple[str, ...]) -> tuple[Call, str, Any]:
    """One of the relations, with the rows it looks at."""
    rows = list(range(len(call.rows)))
    name = rng.choice(names)
    if name == "order":
        return call, name, rng.sample(rows, len(rows))
    return call, name, [rng.choice(rows)]


def run(given: tuple[Call, str, Any], folder: Path) -> None:
    """Make the call two ways, and compare."""
    call, name, rows = given
    whole = relations.run(call)
    if name in ("alone", "order"):
        found = relations.run(call.pick(rows))
        few, mine = call.pick(rows), relations.select(whole, rows, call.copies)
        # These two are held against the longest prompt of a call, so a batch may be refused where a row is not.
        alike = name == "order" or not {"min_length", "forced_bos_token_id"} & set(call.settings)
        relations.check(few, mine, found, what=f"{name} {rows}", alike=alike)
    elif name == "stream":
        relations.check(call, whole, relations.run(call, relations.stream), what=name)
    elif name == "file":
        relations.check(call, whole, relations.run(call, relations.from_file(folder)), what=name)
    elif name == "outputs":
        told = call.set(return_dict_in_generate=True, output_scores=True, output_logits=True)
        relations.check(call, whole, relations.run(told), what=name)
    else:
        relations.check(call, whole, relations.run(call), what=name)

"""model.safetensors.index.json: which shard holds which tensor, from anyone."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from safetensors.torch import load_file, save_file

from tests.fuzz.mutate import dump_json, hostile_string, mutate_bytes, mutate_json
from tests.fuzz.tiny import find_folder, use

NAME = "index_json"
SHARE = 2.0
SHORT = 60

_SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
_PATHS = (
    "../secret.safetensors",
    "/etc/passwd",
    "a/../../x.safetensors",
    "pipe.safetensors",
    "\\\\host\\x.safetensors",
)


@cache
def _read_names() -> tuple[str, ...]:
    return tuple(load_file(find_folder("llama_draft") / "model.safetensors"))


def make(rng: Random) -> bytes:
    names = _read_names()
    weights = {name: _SHARDS[place % 2] for place, name in enumerate(names)}
    index: dict[str, Any] = {"metadata": {"total_size": 12345}, "weight_map": weights}
    roll = rng.random()
    if roll < 0.3:
        weights[rng.choice(names)] = rng.choice((*_PATHS, hostile_string(rng), hostile_string(rng) + ".safetensors"))
    elif roll < 0.4:
        weights[hostile_string(rng)] = rng.choice(_SHARDS)
    if rng.random() < 0.6:
        index = mutate_json(rng, index, rng.choice((1, 3)))
    data = dump_json(index)
    return mutate_bytes(rng, data) if rng.random() < 0.15 else data


def run(given: bytes, folder: Path) -> None:
    source = find_folder("llama_draft")
    tensors = load_file(source / "model.safetensors")
    for place, shard in enumerate(_SHARDS):
        save_file({name: tensors[name] for name in list(tensors)[place::2]}, folder / shard)
    (folder / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text())))
    (folder / "model.safetensors.index.json").write_bytes(given)
    use(folder)

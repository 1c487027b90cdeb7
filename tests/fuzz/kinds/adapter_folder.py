"""config.json of folders that transformers builds a model by."""

from __future__ import annotations

import os
from pathlib import Path
from random import Random

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "critical")

from tests.fuzz.mutate import dump_json, hostile_number, hostile_value, mutate_bytes, mutate_json
from tests.fuzz.tiny import ADAPTED, MADE_ADAPTED, find_folder, read_config, use

NAME = "adapter_folder"
SHARE = 0.3  # each takes tenths of a second
SHORT = 6


def warm() -> None:
    for name in MADE_ADAPTED:
        use(find_folder(name), native=False)


def make(rng: Random) -> tuple[str, bytes, bytes | None]:
    name = rng.choice((*ADAPTED, *MADE_ADAPTED))
    config = read_config(name)
    for _ in range(rng.choice((0, 1, 1, 2))):
        numbers = [key for key, value in config.items() if type(value) in (int, float)]
        config[rng.choice(numbers)] = hostile_number(rng) if rng.random() < 0.7 else hostile_value(rng)
    if rng.random() < 0.4:
        config = mutate_json(rng, config, rng.choice((1, 2)))
    weights = None
    if rng.random() < 0.15:
        weights = mutate_bytes(rng, (find_folder(name) / "model.safetensors").read_bytes(), rng.choice((1, 3)))
    return name, dump_json(config), weights


def run(given: tuple[str, bytes, bytes | None], folder: Path) -> None:
    name, config, weights = given
    (folder / "config.json").write_bytes(config)
    if weights is None:
        (folder / "model.safetensors").symlink_to(find_folder(name) / "model.safetensors")
    else:
        (folder / "model.safetensors").write_bytes(weights)
    use(folder, native=False)

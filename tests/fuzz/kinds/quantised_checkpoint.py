"""Checkpoints of GPTQ, AWQ, compressed-tensors, FP8 and bitsandbytes with hostile settings, headers and bytes."""

from __future__ import annotations

import json
import struct
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.mutate import dump_json, mutate_bytes, mutate_json
from tests.fuzz.tiny import use

NAME = "quantised_checkpoint"
SHORT = 60
FOLDERS = Path(__file__).parents[2] / "loading" / "quantised"


@cache
def _read_parts(folder: Path) -> tuple[dict[str, Any], dict[str, Any], bytes]:
    data = (folder / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    config = json.loads((folder / "config.json").read_text())
    return config, json.loads(data[8 : 8 + length]), data[8 + length :]


def make(rng: Random) -> tuple[bytes, bytes]:
    folders = sorted(path.parent for path in FOLDERS.glob("*/*/config.json"))
    config, header, body = _read_parts(rng.choice(folders))
    if rng.random() < 0.6:
        method = mutate_json(rng, config["quantization_config"], rng.choice((1, 1, 3)))
        config = {**config, "quantization_config": method}
    if rng.random() < 0.4:
        kept = rng.choice(list(header))
        changed = mutate_json(rng, {kept: header[kept]}, rng.choice((1, 2)))
        header = {**{key: value for key, value in header.items() if key != kept}, **changed}
    if rng.random() < 0.4:
        body = mutate_bytes(rng, body, rng.choice((1, 4)))
    text = dump_json(header)
    return dump_json(config), struct.pack("<Q", len(text)) + text + body


def run(given: tuple[bytes, bytes], folder: Path) -> None:
    config, data = given
    (folder / "config.json").write_bytes(config)
    (folder / "model.safetensors").write_bytes(data)
    use(folder)

"""model.safetensors with a hostile header or damaged bytes, beside a sound config."""

from __future__ import annotations

import json
import struct
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.mutate import dump_json, mutate_bytes, mutate_json
from tests.fuzz.tiny import NATIVE, find_folder, use

NAME = "safetensors"
SHARE = 2.0
SHORT = 80


@cache
def _read_parts(name: str) -> tuple[dict[str, Any], bytes]:
    data = (find_folder(name) / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    return json.loads(data[8 : 8 + length]), data[8 + length :]


def make(rng: Random) -> tuple[str, bytes]:
    name = rng.choice(NATIVE)
    header, body = _read_parts(name)
    if rng.random() < 0.7:
        kept = rng.choice(list(header))
        changed = mutate_json(rng, {kept: header[kept]}, rng.choice((1, 2)))
        header = {**{key: value for key, value in header.items() if key != kept}, **changed}
        if rng.random() < 0.2:
            header = mutate_json(rng, header)
    text = dump_json(header)
    if rng.random() < 0.05:
        text = mutate_bytes(rng, text)
    length = rng.choice((len(text),) * 60 + (0, 1, len(text) - 1, len(text) + 1, 1 << 31, (1 << 64) - 1))
    if rng.random() < 0.25:
        body = mutate_bytes(rng, body, rng.choice((1, 4)))
    data = struct.pack("<Q", length) + text + body
    return name, mutate_bytes(rng, data) if rng.random() < 0.08 else data


def run(given: tuple[str, bytes], folder: Path) -> None:
    name, data = given
    (folder / "config.json").symlink_to(find_folder(name) / "config.json")
    (folder / "model.safetensors").write_bytes(data)
    use(folder)

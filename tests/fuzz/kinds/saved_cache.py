"""Files that Cache.save and Prefix.save write: loaded, and decoded from where that works."""

from __future__ import annotations

import json
import struct
import tempfile
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import unspool
from tests.fuzz.mutate import dump_json, hostile_value, mutate_bytes, mutate_json
from tests.fuzz.tiny import find_folder

NAME = "saved_cache"
SHARE = 2.0
SHORT = 60

# (model, kind of cache, its options)
_CASES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("llama", "dynamic", {}),
    ("llama", "quantized", {"backend": "quanto", "nbits": 4}),
    ("llama", "sink", {"window_length": 8, "num_sink_tokens": 2}),
    ("llama", "offloaded", {}),
    ("llama", "paged", {}),
    ("gemma2", "paged_hybrid", {"block_size": 16}),
    ("llama", "paged_quantized", {"nbits": 8, "q_group_size": 16, "residual_length": 8, "block_size": 16}),
    ("gemma2", "hybrid", {}),
    ("mistral", "sliding_window", {}),
    ("mamba", "mamba", {}),
)
_STATIC = (("llama", "static"), ("llama", "offloaded_static"), ("gemma2", "hybrid"))


@cache
def _load(name: str) -> Any:
    return unspool.load(find_folder(name), device="cpu")


@cache
def _make_files() -> tuple[tuple[str, bool, bytes], ...]:
    """A model, whether the file is a prefix's, and the file's bytes, of every kind that can be saved."""
    made: list[tuple[str, bool, bytes]] = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.safetensors"
        for name, kind, options in _CASES:
            lm = _load(name)
            try:
                lm.prefix([5, 6, 7, 8, 9], cache_implementation=kind, cache_config=options or None).save(path)
            except unspool.UnspoolError:
                continue  # that kind takes no prefix
            made.append((name, True, path.read_bytes()))
        for name, kind in _STATIC:
            lm = _load(name)
            held = lm.model.new_cache(kind, rows=2, capacity=16)
            held.save(path, model=lm.model)
            made.append((name, False, path.read_bytes()))
    assert len(made) >= 8, len(made)
    return tuple(made)


def warm() -> None:
    _make_files()


def make(rng: Random) -> tuple[str, bool, bytes]:
    name, is_prefix, data = rng.choice(_make_files())
    (length,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + length]), data[8 + length :]
    meta = header["__metadata__"]
    roll = rng.random()
    if roll < 0.55:
        key = rng.choice(("facts", "facts", "lengths", "notes"))
        meta[key] = dump_json(mutate_json(rng, [json.loads(meta[key])], rng.choice((1, 2)))[:1] or [None]).decode()
        meta[key] = meta[key].strip()[1:-1] or "null"
    elif roll < 0.65:
        meta[rng.choice(list(meta))] = str(hostile_value(rng))
    if 0.6 < roll < 0.8:
        tensors = [key for key in header if key != "__metadata__"]
        kept = rng.choice(tensors)
        changed = mutate_json(rng, {kept: header.pop(kept)})
        header = {**header, **changed}
    if roll > 0.9:
        body = mutate_bytes(rng, body, 3)
    text = dump_json(header)
    made = struct.pack("<Q", len(text)) + text + body
    return name, is_prefix, mutate_bytes(rng, made) if rng.random() < 0.15 else made


def run(given: tuple[str, bool, bytes], folder: Path) -> None:
    name, is_prefix, data = given
    path = folder / "saved.safetensors"
    path.write_bytes(data)
    lm = _load(name)
    if is_prefix:
        prefix = lm.load_prefix(path)
        lm.generate([11, 12], prefix=prefix, max_new_tokens=2)
    held = unspool.Cache.load(path, model=lm.model)
    held.clone()
    held.save(folder / "again.safetensors", model=lm.model)

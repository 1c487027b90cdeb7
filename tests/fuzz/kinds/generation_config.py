"""generation_config.json: read, checked, and saved and read again the same."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.findings import Difference
from tests.fuzz.mutate import dump_json, hostile_value, mutate_bytes, mutate_json
from unspool import GenerationConfig
from unspool.config.parameters import PARAMETERS

NAME = "generation_config"
SHARE = 4.0
SHORT = 150

_USUAL: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
    "pad_token_id": 0,
    "do_sample": True,
    "temperature": 0.7,
    "top_k": 20,
    "top_p": 0.9,
    "repetition_penalty": 1.1,
    "max_new_tokens": 12,
    "bad_words_ids": [[4, 5]],
    "sequence_bias": [[[4], -1.5]],
    "suppress_tokens": [9],
    "forced_decoder_ids": [[1, None], [2, 5]],
    "stop_strings": ["\n\n"],
    "exponential_decay_length_penalty": [5, 1.2],
    "watermarking_config": {"greenlist_ratio": 0.25, "bias": 2.0, "hashing_key": 5, "seeding_scheme": "lefthash"},
    "cache_implementation": "quantized",
    "cache_config": {"backend": "quanto", "nbits": 4},
    "transformers_version": "4.40.0",
}
_NAMES = sorted(PARAMETERS)


def make(rng: Random) -> bytes:
    settings = {name: value for name, value in _USUAL.items() if rng.random() < 0.4}
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        settings[rng.choice(_NAMES)] = hostile_value(rng)
    if settings and rng.random() < 0.7:
        settings = mutate_json(rng, settings, rng.choice((1, 2)))
    data = dump_json(settings)
    return mutate_bytes(rng, data, rng.choice((1, 3))) if rng.random() < 0.15 else data


def run(given: bytes, folder: Path) -> None:
    (folder / "generation_config.json").write_bytes(given)
    config = GenerationConfig.from_pretrained(folder)
    repr(config)
    config.save_pretrained(folder / "saved")
    again = GenerationConfig.from_pretrained(folder / "saved")
    is_of_this_machine = config.compile is not None or config.compile_config is not None  # which stays out of files
    if again != config and not is_of_this_machine:
        raise Difference(f"saved and read again it differs: {config} and {again}"[:2000])

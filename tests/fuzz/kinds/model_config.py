"""config.json and generation_config.json beside the sound weights of a tiny model of every native family."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

from tests.fuzz.mutate import dump_json, hostile_number, hostile_value, mutate_bytes, mutate_json
from tests.fuzz.tiny import MADE, NATIVE, find_folder, read_config, use
from unspool.models.bounds import INTEGERS, NUMBERS

NAME = "model_config"
SHARE = 3.0
SHORT = 120

_ROPES: tuple[dict[str, Any], ...] = (
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0, "mscale": 1.0},
    {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 500.0},
    {"full_attention": {"rope_type": "default"}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}},
)
_NAMES = sorted({*INTEGERS, *NUMBERS})
_OTHERS = (
    *("architectures", "model_type", "dtype", "torch_dtype", "layer_types", "rope_scaling", "rope_parameters"),
    *("hidden_act", "activation_function", "quantization_config", "decoder_start_token_id", "pad_token_id"),
    *("eos_token_id", "bos_token_id", "tie_word_embeddings", "auto_map", "head_dim", "use_sliding_window"),
)


def warm() -> None:
    for name in MADE:
        find_folder(name)


def make(rng: Random) -> tuple[str, bytes, bytes | None]:
    name = rng.choice((*NATIVE, *MADE))
    config = read_config(name)
    if rng.random() < 0.3:
        config[rng.choice(("rope_scaling", "rope_parameters"))] = dict(rng.choice(_ROPES))
    for _ in range(rng.choice((0, 1, 1, 2))):
        sizes = [key for key in config if key in INTEGERS or key in NUMBERS] or _NAMES
        key = rng.choice((rng.choice(sizes), rng.choice(sizes), rng.choice(_NAMES), rng.choice(_OTHERS)))
        config[key] = hostile_number(rng) if rng.random() < 0.6 else hostile_value(rng)
    if rng.random() < 0.5:
        config = mutate_json(rng, config, rng.choice((1, 1, 3)))
    data = dump_json(config)
    if rng.random() < 0.05:
        data = mutate_bytes(rng, data)
    settings = None
    if rng.random() < 0.3:
        settings = dump_json(mutate_json(rng, {"bos_token_id": 1, "eos_token_id": 2, "num_beams": 2, "top_k": 5}))
    return name, data, settings


def run(given: tuple[str, bytes, bytes | None], folder: Path) -> None:
    name, config, settings = given
    (folder / "model.safetensors").symlink_to(find_folder(name) / "model.safetensors")
    (folder / "config.json").write_bytes(config)
    if settings is not None:
        (folder / "generation_config.json").write_bytes(settings)
    use(folder)

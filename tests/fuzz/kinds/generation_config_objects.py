"""GenerationConfig as an object: set, changed, copied, written and read again, it is and does the same."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from random import Random
from typing import Any

from tests.copies import copy_by_pickle
from tests.fuzz.findings import Difference
from tests.fuzz.mutate import hostile_value
from unspool import GenerationConfig
from unspool.config.parameters import PARAMETERS
from unspool.plan.origins import merge

NAME = "generation_config_objects"
SHORT = 80

_STAY_OUT = ("compile", "compile_config")  # of files: they are about a machine
_NAMES = sorted(set(PARAMETERS) - set(_STAY_OUT))
_MODEL = {"eos_token_id": 9, "num_beams": 4, "top_k": 5, "stop_strings": ["b"], "pad_token_id": 1}


def make(rng: Random) -> list[dict[str, Any]]:
    """What the constructor is given, then what is changed."""
    return [{rng.choice(_NAMES): _pick(rng) for _ in range(rng.choice((0, 1, 2, 5)))} for _ in range(2)]


def _pick(rng: Random) -> Any:
    roll = rng.random()
    if roll < 0.3:
        return None
    if roll < 0.6:
        return PARAMETERS[rng.choice(_NAMES)].default
    return rng.choice((1, 2, 3, 0.5, True, False)) if roll < 0.8 else hostile_value(rng)


def run(given: list[dict[str, Any]], folder: Path) -> None:
    config = GenerationConfig(**given[0])
    config.update(**given[1])
    twins = {
        "to_dict": GenerationConfig.from_dict(config.to_dict()),
        "to_diff_dict": GenerationConfig.from_dict(config.to_diff_dict()),
        "to_json_string": GenerationConfig.from_dict(json.loads(config.to_json_string())),
        "copy": copy.copy(config),
        "deepcopy": copy.deepcopy(config),
        "pickle": copy_by_pickle(config),
    }
    config.to_json_file(folder / "generation_config.json")
    twins["file"] = GenerationConfig.from_pretrained(folder)
    expected = _behave(config)
    for way, twin in twins.items():
        if twin.explicit != config.explicit:
            raise Difference(f"{way}: {sorted(twin.explicit)} were set, and {sorted(config.explicit)} before"[:2000])
        if twin != config or hash(twin) != hash(config):
            raise Difference(f"{way}: {twin} is not {config}"[:2000])
        if _behave(twin) != expected:
            raise Difference(f"{way}: merged with a model's settings, {twin} is another than {config}"[:2000])


def _behave(config: GenerationConfig) -> Any:
    merged, origins = merge(GenerationConfig(**_MODEL), config, {})
    return merged.to_json_string(use_diff=False, ignore_metadata=True), origins

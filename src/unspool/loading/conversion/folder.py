"""Writing a converted model as a folder in the hub's layout."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from unspool.errors import LoadError
from unspool.small_files import write_text


def write_model(
    target: Path, tensors: Mapping[str, np.ndarray], config: dict[str, Any], generation_config: dict[str, Any]
) -> None:
    """Write weights and settings. Settings of the generation begin with the special tokens of the config."""
    for name, values in tensors.items():
        if not np.isfinite(values).all():
            raise LoadError(f"the weights {name[:80]!r} have a number that is not finite")
    named = {name: np.ascontiguousarray(values) for name, values in tensors.items()}
    save_file(named, target / "model.safetensors", metadata={"format": "pt"})
    ids = {name: value for name, value in config.items() if name.endswith("_token_id")}
    write_text(target / "config.json", json.dumps(config, indent=1))
    write_text(target / "generation_config.json", json.dumps({**ids, **generation_config}, indent=1))


def halve(values: np.ndarray) -> np.ndarray:
    """Weights that had 8 bits, in float16, which holds them to 11 bits."""
    return values.astype(np.float16)

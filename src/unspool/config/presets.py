"""Presets: several generation settings in one folder, each a JSON file with a name."""

from __future__ import annotations

import json
from pathlib import Path

from unspool.config.generation import METADATA, GenerationConfig
from unspool.config.parameters import PARAMETERS
from unspool.errors import ModelNotFoundError, SettingError, excerpt
from unspool.small_files import read_json_object
from unspool.wording import suggest

_ENDINGS = ("", ".json", "_generation_config.json")
_MOST_FILES = 200


def find_preset(name: str, folder: Path) -> Path:
    """The file of a preset: a path, or a name in a folder, with or without its ending."""
    if not name or "\0" in name:
        raise SettingError("a preset is named by a file; the name given is empty")
    places = [Path(name)] if "/" in name or name.endswith(".json") else []
    places += [folder / f"{name}{ending}" for ending in _ENDINGS]
    for place in places:
        if place.is_file():
            return place
    known = list_presets(folder)
    has = (
        f"it has {', '.join(known)}" if known else "it has none: GenerationConfig.save_pretrained(folder, 'name.json')"
    )
    raise ModelNotFoundError(f"there is no preset {excerpt(name)} in {folder}{suggest(name, known)} ({has})")


def list_presets(folder: Path) -> list[str]:
    """The names of a folder's presets: JSON files that hold generation settings and nothing else."""
    found = []
    for path in sorted(folder.glob("*.json"))[:_MOST_FILES]:
        try:
            values = read_json_object(path, 1 << 20, is_strict=False)
        except (OSError, ValueError):
            continue
        if values and set(values) <= {*PARAMETERS, *METADATA} and path.name != "generation_config.json":
            found.append(path.stem.removesuffix("_generation_config"))
    return found


def read_preset(name: str, folder: Path) -> GenerationConfig:
    """The settings of a preset; a key that is no setting is refused, and what it was probably meant to be is said."""
    path = find_preset(name, folder)
    values = read_json_object(path, is_strict=False)
    unknown = [key for key in values if key not in PARAMETERS and key not in METADATA]
    if unknown:
        hints = [suggest(key, PARAMETERS).removeprefix("; ") for key in unknown[:8]]
        shown = [
            f"{json.dumps(key)[:60]} ({hint})" if hint else json.dumps(key)[:60]
            for key, hint in zip(unknown, hints, strict=False)
        ]
        raise SettingError(f"{path} has keys that are no generation settings: {', '.join(shown)}")
    return GenerationConfig.from_dict(values)

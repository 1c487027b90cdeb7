"""A watermark's settings and its key, from files and the environment: the key is a secret and is never shown."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from unspool.config import BaseWatermarkingConfig
from unspool.config.watermarking import MOST_KEYS, read_watermarking_config
from unspool.errors import LoadError, SettingError
from unspool.small_files import read_json_object, read_text

VARIABLE = "UNSPOOL_WATERMARK_KEY"
MOST_BYTES = 1 << 16


def load_watermark(path: str | Path, key_file: str | Path | None = None) -> BaseWatermarkingConfig:
    """A watermark's settings from a JSON file; its key from that file, a key file, or the environment.

    A key is a whole number, or a list of them for SynthID-Text. A key file wins over the variable
    UNSPOOL_WATERMARK_KEY, and either over what the settings say.
    """
    settings = read_json_object(Path(path).expanduser(), MOST_BYTES)
    key = _read_key(key_file)
    name = "keys" if "ngram_len" in settings or "keys" in settings else "hashing_key"
    if key is not None:
        settings[name] = key
    if name not in settings:
        raise SettingError(
            f"{path} has no `{name}`: put it into a file (--key-file) or the variable {VARIABLE}. A default key is "
            "known to everyone, so a mark made with it proves nothing"
        )
    config = read_watermarking_config(settings)
    config.validate()
    return config


def _read_key(key_file: str | Path | None) -> Any:
    if key_file is not None:
        text, where = read_text(Path(key_file).expanduser(), MOST_BYTES), f"the key file {key_file}"
    elif VARIABLE in os.environ:
        text, where = os.environ[VARIABLE], f"the variable {VARIABLE}"
    else:
        return None
    try:
        key = json.loads(text)
    except (ValueError, RecursionError):
        raise LoadError(
            f"{where} holds no key: write a whole number, or [a, list, of, them] for SynthID-Text"
        ) from None
    numbers = key if isinstance(key, list) else [key]
    if not 0 < len(numbers) <= MOST_KEYS or any(type(number) is not int for number in numbers):
        raise LoadError(f"{where} holds no key: write a whole number, or [a, list, of, them] for SynthID-Text")
    return key

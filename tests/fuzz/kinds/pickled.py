"""pytorch_model.bin with damaged bytes, or pickles of other things, beside a sound config."""

from __future__ import annotations

import io
import pickle
import zipfile
from functools import cache
from pathlib import Path
from random import Random

from tests.fuzz.mutate import mutate_bytes
from tests.fuzz.tiny import find_folder, use

NAME = "pickled"
SHARE = 0.2  # a process that imports torch for each
SHORT = 1
_MODELS = ("llama", "gpt2", "t5")


@cache
def _write(name: str, *, is_zip: bool) -> bytes:
    import torch
    from safetensors.torch import load_file

    held = io.BytesIO()
    tensors = load_file(find_folder(name) / "model.safetensors")
    torch.save(tensors, held, _use_new_zipfile_serialization=is_zip)
    return held.getvalue()


def _mutate_member(rng: Random, data: bytes) -> bytes:
    """A checkpoint whose pickle was changed, in a sound archive."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(made, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            new.writestr(zipfile.ZipInfo(name), mutate_bytes(rng, content, 2) if name.endswith("data.pkl") else content)
    return made.getvalue()


def make(rng: Random) -> tuple[str, bytes]:
    name = rng.choice(_MODELS)
    data = _write(name, is_zip=rng.random() < 0.7)
    if data[:2] == b"PK" and rng.random() < 0.6:
        return name, _mutate_member(rng, data)
    if rng.random() < 0.1:
        return name, pickle.dumps({"a": [rng.random()] * rng.randrange(5)}, protocol=rng.randrange(5))
    return name, mutate_bytes(rng, data, rng.choice((1, 3)))


def run(given: tuple[str, bytes], folder: Path) -> None:
    name, data = given
    (folder / "config.json").symlink_to(find_folder(name) / "config.json")
    (folder / "pytorch_model.bin").write_bytes(data)
    use(folder)

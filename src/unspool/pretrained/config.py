"""`AutoConfig`: a model's config without its weights."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

import torch

from unspool.errors import LoadError, SettingError
from unspool.loading.gguf import GGUFFile
from unspool.loading.source import find_source
from unspool.models.families.base import DecoderFamily
from unspool.models.native import ModelConfig
from unspool.models.paths.captured_ahead import META
from unspool.models.registry import describe_gguf, find_family
from unspool.models.settings import Settings
from unspool.models.sharing import without_numbers
from unspool.pretrained.auto import Auto
from unspool.pretrained.keywords import CONFIG_KEYWORDS, take_applied
from unspool.pretrained.locations import ModelLocation, read_location
from unspool.small_files import read_json_object
from unspool.wording import suggest


class AutoConfig(Auto):
    """Configs of models, read without weights; of a native model's the attributes of `model.config`."""

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | PathLike[str], **kwargs: Any) -> ModelConfig:
        """The config of a folder, a GGUF file, a hub id or a short name; further keywords replace values of it."""
        caller = f"{cls.__name__}.from_pretrained()"
        shared = {name: kwargs.pop(name) for name in CONFIG_KEYWORDS if name in kwargs}
        location = read_location(pretrained_model_name_or_path, take_applied(shared, CONFIG_KEYWORDS, caller))
        config, is_gguf = read_description(location)
        found = _build_gguf(location) if is_gguf else ModelConfig(**{**config, **_name_values(config)})
        for name, value in kwargs.items():
            if not hasattr(found, name):
                raise SettingError(f"{caller} does not know {name!r:.80}{suggest(name, (*CONFIG_KEYWORDS, *config))}")
            setattr(found, name, value)
        return found


def read_description(location: ModelLocation) -> tuple[dict[str, Any], bool]:
    """A model's config.json, or the header of its GGUF file; and whether it is one. Weights are not fetched."""
    path = find_source(
        location.name, revision=location.revision, offline=location.offline, hub=location.hub, has_weights=False
    )
    if path.is_dir() and not (path / "config.json").is_file() and len(found := sorted(path.glob("*.gguf"))) == 1:
        path = found[0]
    if path.suffix == ".gguf" and path.is_file():
        return dict(GGUFFile(path).metadata), True
    if not (path / "config.json").is_file():
        raise LoadError(f"{path} has no config.json, which says what model it is")
    return read_json_object(path / "config.json"), False


def _name_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values of a decoder under the names that most configs use."""
    family = find_family(config)
    return family.read_config(Settings(config)).name_values() if isinstance(family, DecoderFamily) else {}


def _build_gguf(location: ModelLocation) -> ModelConfig:
    """The config of a GGUF file: what its header says depends on its tensors' sizes too."""
    path = find_source(location.name)
    file = GGUFFile(path if path.is_file() else next(path.glob("*.gguf")))
    header = dict(file.metadata)
    family, dtype = describe_gguf(header), torch.float32
    return family.build(header, without_numbers(file, dtype), is_gguf=True, device=META, dtype=dtype).config

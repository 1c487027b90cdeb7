"""Settings of a cache as an object: what `cache_config` takes beside a plain dict."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from unspool.errors import SettingError
from unspool.small_files import write_text


@dataclass(repr=False)
class CacheConfig:
    """The settings of one kind of cache."""

    cache_implementation: str | None

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **kwargs: Any) -> Self:
        """A config out of a dict; keyword arguments that it knows win over the dict."""
        try:
            config = cls(**config_dict)
        except TypeError as error:
            raise SettingError(f"a {cls.__name__} can't be made of {sorted(map(str, config_dict))}: {error}") from error
        config.update(**kwargs)
        return config

    def to_dict(self) -> dict[str, Any]:
        """All values by name."""
        return copy.deepcopy(self.__dict__)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return iter(self.to_dict().items())

    def to_json_string(self) -> str:
        """The values as JSON."""
        return json.dumps(self.to_dict(), indent=2, default=str) + "\n"

    def to_json_file(self, json_file_path: str | os.PathLike[str]) -> None:
        """Write the values to a file."""
        text = json.dumps(self.to_dict(), indent=2, sort_keys=True, default=str) + "\n"
        write_text(Path(json_file_path), text)

    def __repr__(self) -> str:
        return f"{type(self).__name__} {self.to_json_string()}"

    def update(self, **kwargs: Any) -> dict[str, Any]:
        """Set the values that this config has; return the others."""
        for name in kwargs.keys() & self.__dict__.keys():
            setattr(self, name, kwargs[name])
        return {name: value for name, value in kwargs.items() if name not in self.__dict__}


class StaticCacheConfig(CacheConfig):
    """The settings of a static cache: how many rows it has, and how many positions each."""

    def __init__(
        self,
        batch_size: int | None = None,
        max_cache_len: int | None = None,
        device: str | torch.device | None = None,
    ) -> None:
        super().__init__("static")
        self.batch_size = batch_size
        self.max_cache_len = max_cache_len
        self.device = device
        self.validate()

    def validate(self) -> None:
        """Raise the error that names the first value that can't be."""
        for name in ("batch_size", "max_cache_len"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise SettingError(f"`{name}` of a static cache must be a whole number above 0, not {value!r}")

"""The settings of the watermarks."""

from __future__ import annotations

import copy
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any, Self

from unspool.errors import SettingError
from unspool.numeric import is_number, to_plain
from unspool.registry import resolve
from unspool.small_files import write_text
from unspool.wording import about

LARGEST_TABLE = 2**24
LARGEST_KEY = 2**63 - 1
MOST_KEYS = 1024
LARGEST_HISTORY = 2**20
LONGEST_CONTEXT = 1024
SECRETS = ("hashing_key", "keys")
HIDDEN = "(hidden)"


@dataclass
class BaseWatermarkingConfig(ABC):
    """What the watermarking settings share: dict and JSON forms."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, to_plain(value))

    @classmethod
    def from_dict(cls, config_dict: Mapping[str, Any], **kwargs: Any) -> Self:
        """Build the settings from a dict; keyword arguments win over it."""
        values = {
            **config_dict,
            **{name: kwargs[name] for name in kwargs if name in cls.__dataclass_fields__},
        }
        unknown = sorted(set(config_dict) - set(cls.__dataclass_fields__))
        if unknown:
            known = ", ".join(cls.__dataclass_fields__)
            raise SettingError(f"{cls.__name__} has no setting {', '.join(unknown)}. It has: {known}.")
        try:
            return cls(**values)
        except TypeError as error:
            raise SettingError(f"{cls.__name__} can't be built from {sorted(values)}: {error}") from error

    def to_dict(self) -> dict[str, Any]:
        """The settings as a dict."""
        return copy.deepcopy(self.__dict__)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        yield from self.to_dict().items()

    def __repr__(self) -> str:
        """The settings without the key: a repr ends up in logs and error messages."""
        return f"{type(self).__name__} {json.dumps(self.without_key(), indent=2)}"

    def without_key(self) -> dict[str, Any]:
        """The settings as a dict without the key."""
        return {name: HIDDEN if name in SECRETS else value for name, value in self.to_dict().items()}

    def to_json_string(self) -> str:
        """The settings as JSON."""
        return json.dumps(self.__dict__, indent=2) + "\n"

    def to_json_file(self, json_file_path: str | PathLike[str]) -> None:
        """Write the settings to a JSON file."""
        write_text(Path(json_file_path), json.dumps(self.__dict__, indent=2, sort_keys=True) + "\n")

    def update(self, **kwargs: Any) -> None:
        """Set the settings that exist; other names are left alone."""
        for name, value in kwargs.items():
            if name in self.__dataclass_fields__:
                setattr(self, name, value)

    @abstractmethod
    def validate(self) -> None:
        """Raise a SettingError for an invalid value."""

    def construct_processor(self, vocab_size: int, device: Any) -> Any:
        """The processor that puts the watermark in."""
        # By name: settings stand below everything that is made from them.
        return resolve("unspool.watermark:make_processor")(self, vocab_size, device)


def _check_integer(name: str, value: Any, at_least: int, at_most: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not at_least <= value <= at_most:
        found = "is not" if name in SECRETS else f"is {value!r}"
        raise _refuse(f"`{name}` should be an integer from {at_least} to {at_most}, but {found}.")


def _check_number(name: str, value: Any, at_least: float, at_most: float) -> None:
    if not is_number(value) or not at_least <= value <= at_most:
        raise _refuse(f"`{name}` should be a number from {at_least} to {at_most}, but is {value!r}.")


def _refuse(reason: str) -> SettingError:
    return SettingError(about("watermarking_config", f"is wrong: {reason}"))


@dataclass(repr=False)
class WatermarkingConfig(BaseWatermarkingConfig):
    """The green-list watermark's settings ("On the Reliability of Watermarks", arXiv 2306.04634)."""

    greenlist_ratio: float = 0.25
    bias: float = 2.0
    hashing_key: int = 15485863
    seeding_scheme: str = "lefthash"
    context_width: int = 1

    def validate(self) -> None:
        """Raise a SettingError for an invalid value."""
        if self.seeding_scheme not in ("lefthash", "selfhash"):
            raise _refuse(
                "`seeding_scheme` should be 'lefthash' or 'selfhash' (or 'gumbel', of "
                f"a GumbelWatermarkingConfig), but is {self.seeding_scheme!r}."
            )
        _check_number("greenlist_ratio", self.greenlist_ratio, 0.0, 1.0)
        if self.greenlist_ratio in (0.0, 1.0):
            raise _refuse(
                "`greenlist_ratio` should lie between 0 and 1, without either: an "
                "empty list, or one of all tokens, marks nothing."
            )
        _check_number("bias", self.bias, -1e6, 1e6)
        _check_integer("hashing_key", self.hashing_key, -LARGEST_KEY, LARGEST_KEY)
        _check_integer("context_width", self.context_width, 1, LONGEST_CONTEXT)


@dataclass(repr=False)
class SynthIDTextWatermarkingConfig(BaseWatermarkingConfig):
    """SynthID-Text's settings ("Scalable watermarking for identifying LLM outputs", Nature 634, 2024)."""

    ngram_len: int
    keys: list[int]
    context_history_size: int = 1024
    sampling_table_seed: int = 0
    sampling_table_size: int = 2**16
    skip_first_ngram_calls: bool = False
    debug_mode: bool = False

    def validate(self) -> None:
        """Raise a SettingError for an invalid value."""
        _check_integer("ngram_len", self.ngram_len, 2, LONGEST_CONTEXT)
        if not isinstance(self.keys, (list, tuple)) or not 0 < len(self.keys) <= MOST_KEYS:
            raise _refuse(f"`keys` should be a list of 1 to {MOST_KEYS} integers.")
        for key in self.keys:
            _check_integer("keys", key, -LARGEST_KEY, LARGEST_KEY)
        _check_integer("context_history_size", self.context_history_size, 1, LARGEST_HISTORY)
        _check_integer("sampling_table_seed", self.sampling_table_seed, -LARGEST_KEY, LARGEST_KEY)
        _check_integer("sampling_table_size", self.sampling_table_size, 1, LARGEST_TABLE)


@dataclass(repr=False)
class GumbelWatermarkingConfig(BaseWatermarkingConfig):
    """The distortion-free watermark's settings: sampling by keyed Gumbel noise (Aaronson, 2022)."""

    hashing_key: int = 15485863
    context_width: int = 4
    seeding_scheme: str = "gumbel"

    def validate(self) -> None:
        """Raise a SettingError for an invalid value."""
        if self.seeding_scheme != "gumbel":
            raise _refuse(
                "a GumbelWatermarkingConfig's `seeding_scheme` is 'gumbel', not "
                f"{self.seeding_scheme!r}; use a WatermarkingConfig for green lists."
            )
        _check_integer("hashing_key", self.hashing_key, -LARGEST_KEY, LARGEST_KEY)
        _check_integer("context_width", self.context_width, 1, LONGEST_CONTEXT)


def read_watermarking_config(settings: Mapping[str, Any]) -> BaseWatermarkingConfig:
    """The watermark's settings from a dict: SynthID-Text's have `ngram_len` and `keys`, others a `seeding_scheme`."""
    if "ngram_len" in settings or "keys" in settings:
        return SynthIDTextWatermarkingConfig.from_dict(settings)
    if settings.get("seeding_scheme") == "gumbel":
        return GumbelWatermarkingConfig.from_dict(settings)
    return WatermarkingConfig.from_dict(settings)

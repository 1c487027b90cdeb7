"""Records (JSON objects) as tagged contexts, a pair each, and back."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from unspool.compression.llmlingua.checks import MOST_CONTEXTS, check_number
from unspool.errors import InputError, MissingExtraError, SettingError, excerpt
from unspool.small_files import read_text

_KEPT: Final = "<llmlingua, compress=False>"
_END: Final = "</llmlingua>"
_PAIR_END: Final = f", {_END}"
_TEXTS: Final = ("str", "string")
_NUMBERS: Final = ("int", "integer", "float", "number")
_SWITCHES: Final = ("bool", "boolean")
_LISTS: Final = ("list", "List", "tuple")
_DICTS: Final = ("dict", "dictionary")
_TYPES: Final = (*_TEXTS, *_NUMBERS, *_SWITCHES, *_LISTS, *_DICTS)
_TRUE: Final = (True, "True", "true", "TRUE")
_FALSE: Final = (False, "False", "false", "FALSE")
_FIELDS: Final = ("rate", "compress", "pair_remove", "value_type")
_MOST_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class TaggedRecord:
    """A record's contexts: a brace, its pairs, a brace; and the places of those that must stay."""

    contexts: list[str]
    forced: list[int]


@dataclass(frozen=True, slots=True)
class _Field:
    """What the configuration says of a key."""

    rate: float
    may_go: bool
    kind: str


def tag_record(data: Any, config: Any) -> TaggedRecord:
    """The contexts of a record, each pair one."""
    if not isinstance(data, Mapping) or not data or len(data) > MOST_CONTEXTS:
        raise InputError(f"`json_data` is a mapping of 1 to {MOST_CONTEXTS} keys, not {excerpt(data)}")
    fields = _read_config(config)
    if set(data) != set(fields):
        odd = set(data) ^ set(fields)
        raise SettingError(f"`json_data` and `json_config` must have the same keys; {excerpt(odd)} are in one alone")
    contexts, forced = [f"{_KEPT}{{{_END}"], [0]
    for place, (key, value) in enumerate(data.items(), start=1):
        if not fields[key].may_go:
            forced.append(place)
        contexts.append(_tag_pair(key, value, fields[key]))
    contexts[-1] = contexts[-1].removesuffix(_PAIR_END) + _END
    return TaggedRecord([*contexts, f"{_KEPT}}}{_END}"], [*forced, len(contexts)])


def read_record(text: str) -> Any:
    """The record of a compressed text; commas that stand together, or before white space, become one."""
    tidy = re.sub(r",+", ",", re.sub(r",\s*", ",", text))
    try:
        return json.loads(tidy)
    except json.JSONDecodeError as error:
        raise InputError(
            f"what is left of the record is no JSON ({error.msg}); compress fewer of its values, or let fewer pairs go"
        ) from error


def _tag_pair(key: str, value: Any, field: _Field) -> str:
    if field.rate == 1 or field.kind in _NUMBERS:
        return f"{_KEPT}{_dump(key, _as_number(value, field))[1:-1]}{_PAIR_END}"
    if field.kind in _TEXTS:
        return f"{_KEPT}{_dump(key, _open(field.rate, str(value)))[1:-1]}{_PAIR_END}"
    if field.kind in _SWITCHES:
        return f"{_KEPT}{_dump(key, _open(field.rate, _spell_switch(value)))[1:-1]}{_PAIR_END}"
    items = [f"{name}: {one}" for name, one in value.items()] if field.kind in _DICTS else [str(one) for one in value]
    opened = '", "'.join(_open(field.rate, _escape(item)) for item in items)
    return f'{_KEPT}{json.dumps(key)}: ["{opened}"]{_PAIR_END}'


def _escape(text: str) -> str:
    """An item as it stands between quotation marks. Those that it has become apostrophes: half of an escaped one would
    be another character."""
    return json.dumps(text.replace('"', "'"), ensure_ascii=False)[1:-1]


def _dump(key: str, value: Any) -> str:
    return json.dumps({key: value})


def _open(rate: float, text: str) -> str:
    """Text that may be compressed, between words that may not."""
    return f"{_END}<llmlingua, rate={rate}>{text}{_END}{_KEPT}"


def _as_number(value: Any, field: _Field) -> Any:
    """Numbers stay: a number without some of its digits is another number."""
    if field.rate == 1 or field.kind not in _NUMBERS:
        return value
    try:
        return int(value) if field.kind in ("int", "integer") else float(value)
    except (TypeError, ValueError) as error:
        raise InputError(f"{excerpt(value)} is no {field.kind}; give another `value_type`") from error


def _spell_switch(value: Any) -> str:
    if value in _TRUE:
        return "true"
    if value in _FALSE:
        return "false"
    raise InputError(f"{excerpt(value)} is neither true nor false; give another `value_type`")


def _read_config(config: Any) -> dict[str, _Field]:
    given = _read_file(Path(config)) if isinstance(config, str | Path) else config
    if not isinstance(given, Mapping) or len(given) > MOST_CONTEXTS:
        raise SettingError(
            f"`json_config` is a mapping of each key to its {', '.join(_FIELDS)}, or the path of a YAML or JSON file "
            f"with one; got {excerpt(config)}"
        )
    return {key: _read_field(key, said) for key, said in given.items()}


def _read_field(key: Any, said: Any) -> _Field:
    if not isinstance(key, str) or not isinstance(said, Mapping) or not set(_FIELDS) <= set(said):
        raise SettingError(f"`json_config` must say of {excerpt(key)} its {', '.join(_FIELDS)}; got {excerpt(said)}")
    kind = said["value_type"]
    if kind not in _TYPES:
        raise SettingError(f"`value_type`={excerpt(kind)} of {excerpt(key)} is not one of {', '.join(_TYPES)}")
    rate = check_number(f"rate of {key[:40]}", said["rate"], 0, 1)
    return _Field(said["rate"] if said["compress"] and rate != 1 else 1, bool(said["pair_remove"]), kind)


def _read_file(path: Path) -> Any:
    text = read_text(path, _MOST_BYTES)
    if path.suffix == ".json":
        try:
            return json.loads(text)
        except json.JSONDecodeError as error:
            raise SettingError(f"{path} is no JSON: {error}") from error
    try:
        import yaml
    except ImportError as error:
        raise MissingExtraError("pyyaml", "compress", "reading a YAML file") from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise SettingError(f"{path} is no YAML: {str(error)[:200]}") from error

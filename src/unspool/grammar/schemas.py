"""Bounds on a JSON schema before it is compiled, and where in it an error lies."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, Final

from unspool.errors import SettingError
from unspool.wording import about

MOST_PROPERTIES: Final = 1_024
MOST_MEMBERS: Final = 4_096  # of all enums together
MOST_SUBSCHEMAS: Final = 4_096
DEEPEST: Final = 64
LARGEST_COUNT: Final = 100_000  # of characters, items or properties
LARGEST_MULTIPLE: Final = 10_000  # the automaton of `multipleOf` has a state for each remainder

# The formats that are kept. By the standard a validator lets others pass, so they are left out.
FORMATS: Final = frozenset(
    ["date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri", "unknown"]
)
_MAPS: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS: Final = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE: Final = (
    *("items", "additionalProperties", "contains", "not", "if", "then", "else", "propertyNames"),
    *("unevaluatedItems", "unevaluatedProperties", "additionalItems"),
)
_COUNTS: Final = ("minLength", "maxLength", "minItems", "maxItems", "minProperties", "maxProperties")
_PLAIN: Final = frozenset(
    {
        *("type", "properties", "required", "additionalProperties", "items", "prefixItems", "enum", "const"),
        *("minItems", "maxItems", "minLength", "maxLength", "minimum", "maximum", "exclusiveMinimum"),
        *("exclusiveMaximum", "title", "description", "default", "examples", "$schema"),
    }
)
_LARGEST_PLAIN: Final = 128  # subschemas of a schema that is simple


def check_schema(schema: Any) -> bool:
    """Check a schema, and take out formats that no validator checks; whether compiling it can't take long."""
    num_properties = num_members = num_schemas = 0
    is_simple = True
    for path, one in walk(schema):
        num_schemas += 1
        if isinstance(one, bool):
            continue
        if isinstance(one.get("format"), str) and one["format"] not in FORMATS:
            del one["format"]
        is_simple = is_simple and set(one) <= _PLAIN
        num_properties += len(one.get("properties") or ()) + len(one.get("patternProperties") or ())
        num_members += len(one.get("enum") or ())
        _check_numbers(path, one)
        for most, number, what in (
            (MOST_SUBSCHEMAS, num_schemas, "subschemas"),
            (MOST_PROPERTIES, num_properties, "properties"),
            (MOST_MEMBERS, num_members, "enum members"),
        ):
            if number > most:
                raise SettingError(
                    about("json_schema", f"has more than {most} {what} (counted up to {path}); make it smaller")
                )
    return is_simple and num_schemas <= _LARGEST_PLAIN and num_members <= 256


def walk(schema: Any, path: str = "#", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Every subschema with its path."""
    if depth > DEEPEST:
        raise SettingError(about("json_schema", f"nests deeper than {DEEPEST} levels, at {path[:200]}"))
    if isinstance(schema, bool):
        yield path, schema
        return
    if not isinstance(schema, Mapping):
        raise SettingError(
            about("json_schema", f": what stands at {path[:200]} is no schema (an object, true or false)")
        )
    yield path, schema
    for name in _MAPS:
        held = schema.get(name)
        if held is None:
            continue
        if not isinstance(held, Mapping):
            raise SettingError(about("json_schema", f": {path}/{name} must be an object of schemas"))
        for key, one in held.items():
            yield from walk(one, f"{path}/{name}/{_escape(key)}", depth + 1)
    for name in _LISTS:
        held = schema.get(name)
        if held is None:
            continue
        if not isinstance(held, (list, tuple)) or not held:
            raise SettingError(about("json_schema", f": {path}/{name} must be a list of schemas that is not empty"))
        for place, one in enumerate(held):
            yield from walk(one, f"{path}/{name}/{place}", depth + 1)
    for name in _SINGLE:
        held = schema.get(name)
        if isinstance(held, (Mapping, bool)):
            yield from walk(held, f"{path}/{name}", depth + 1)


def find_path(schema: Any, message: str) -> str:
    """Where in a schema an error of the grammar library lies: the first subschema with a keyword that it names."""
    named = set(re.findall(r'"([^"\s]{1,60})"', message)) | set(re.findall(r"\b([a-zA-Z$]{3,40})\b", message))
    for path, one in walk(schema):
        if isinstance(one, Mapping):
            for name in one:
                if name in named and name not in ("type", "properties", "items"):
                    return f"{path}/{name}"
    return "#"


def _check_numbers(path: str, schema: Mapping[str, Any]) -> None:
    for name in _COUNTS:
        count = schema.get(name)
        if count is not None and (
            isinstance(count, bool) or not isinstance(count, (int, float)) or not 0 <= count <= LARGEST_COUNT
        ):
            raise SettingError(about("json_schema", f": {path}/{name} is {count!r:.40}; give 0 to {LARGEST_COUNT}"))
    step = schema.get("multipleOf")
    if step is None:
        return
    if isinstance(step, bool) or not isinstance(step, (int, float)) or not 0 < step < float("inf"):
        raise SettingError(about("json_schema", f": {path}/multipleOf must be a number above 0, but is {step!r:.40}"))
    digits = Decimal(repr(step)).normalize().as_tuple().digits
    if int("".join(map(str, digits))) > LARGEST_MULTIPLE:
        raise SettingError(
            about(
                "json_schema",
                f": {path}/multipleOf is {step!r}, which needs an automaton with as many states; numbers with "
                f"digits up to {LARGEST_MULTIPLE} are kept",
            )
        )


def _escape(key: Any) -> str:
    return str(key)[:60].replace("~", "~0").replace("/", "~1")

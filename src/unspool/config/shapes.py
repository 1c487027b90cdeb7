"""Python types as JSON schemas, and JSON values as them: dataclasses, typed dicts, pydantic and msgspec types."""

from __future__ import annotations

import dataclasses
import enum
import json
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from unspool.errors import SettingError, excerpt
from unspool.wording import about

_PLAIN: dict[Any, dict[str, Any]] = {
    str: {"type": "string"},
    bool: {"type": "boolean"},
    int: {"type": "integer"},
    float: {"type": "number"},
    type(None): {"type": "null"},
    Any: {},
}
_LONGEST_NESTING = 32


def is_shape(value: Any) -> bool:
    """Whether a value is a Python type (or a generic alias such as `list[int]`), and no schema."""
    return isinstance(value, (type, types.GenericAlias, types.UnionType)) or typing.get_origin(value) is not None


def make_schema(shape: Any) -> dict[str, Any]:
    """The JSON schema of a Python type."""
    if hasattr(shape, "model_json_schema"):  # pydantic
        schema: dict[str, Any] = _close(shape.model_json_schema())
        return schema
    if _is_msgspec(shape):
        import msgspec

        return dict(_close(msgspec.json.schema(shape)))
    return _describe(shape, 0)


def _close(schema: Any) -> Any:
    """The schema of a type whose objects have the type's fields and no others, unless it says otherwise."""
    if isinstance(schema, list):
        return [_close(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {name: one if name in ("enum", "const", "default") else _close(one) for name, one in schema.items()}
    if isinstance(closed.get("properties"), dict) and closed.get("type") == "object":
        closed.setdefault("additionalProperties", False)
    return closed


def read_value(shape: Any, text: str) -> Any:
    """The value that a JSON text stands for, as an object of a Python type."""
    if hasattr(shape, "model_validate_json"):
        return shape.model_validate_json(text)
    if _is_msgspec(shape):
        import msgspec

        return msgspec.json.decode(text, type=shape)
    return _build(shape, json.loads(text))


def _is_msgspec(shape: Any) -> bool:
    return isinstance(shape, type) and hasattr(shape, "__struct_fields__") and "msgspec" in sys.modules


def _describe(shape: Any, depth: int) -> dict[str, Any]:
    if depth > _LONGEST_NESTING:
        raise SettingError(
            about(
                "json_schema",
                f": the type nests deeper than {_LONGEST_NESTING} levels, or refers to itself; write its "
                "schema as a dict, with $defs and $ref",
            )
        )
    if shape in _PLAIN:
        return dict(_PLAIN[shape])
    if hasattr(shape, "model_json_schema"):
        return _without_references(shape)
    origin, arguments = typing.get_origin(shape), typing.get_args(shape)
    if origin is typing.Literal:
        return {"enum": list(arguments)}
    if origin is typing.Annotated:
        return _describe(arguments[0], depth)
    if origin in (typing.Union, types.UnionType):
        return {"anyOf": [_describe(one, depth + 1) for one in arguments]}
    if shape is list or origin in (list, Sequence):
        items = {"items": _describe(arguments[0], depth + 1)} if arguments else {}
        return {"type": "array", **items}
    if origin is tuple and arguments and arguments[-1] is not ...:
        each = [_describe(one, depth + 1) for one in arguments]
        return {"type": "array", "prefixItems": each, "items": False, "minItems": len(each), "maxItems": len(each)}
    if shape is tuple or origin is tuple:
        return {"type": "array", **({"items": _describe(arguments[0], depth + 1)} if arguments else {})}
    if shape is dict or origin in (dict, Mapping):
        if arguments and arguments[0] is not str:
            raise SettingError(
                about("json_schema", f": the keys of a JSON object are strings, not {arguments[0]!r:.80}")
            )
        return {"type": "object", **({"additionalProperties": _describe(arguments[1], depth + 1)} if arguments else {})}
    if isinstance(shape, type) and issubclass(shape, enum.Enum):
        return {"enum": [member.value for member in shape]}
    if dataclasses.is_dataclass(shape) and isinstance(shape, type):
        return _describe_dataclass(shape, depth)
    if typing.is_typeddict(shape):
        hints, required = typing.get_type_hints(shape), sorted(shape.__required_keys__)
        return _describe_object({name: _describe(kind, depth + 1) for name, kind in hints.items()}, required)
    raise SettingError(
        about(
            "json_schema",
            f": {excerpt(repr(shape))} has no JSON schema; use a dict, a dataclass, a TypedDict, a pydantic "
            "model or a msgspec.Struct",
        )
    )


def _describe_dataclass(shape: type, depth: int) -> dict[str, Any]:
    hints, properties, required = typing.get_type_hints(shape), {}, []
    for one in dataclasses.fields(shape):
        if not one.init:
            continue
        properties[one.name] = _describe(hints[one.name], depth + 1)
        if one.default is dataclasses.MISSING and one.default_factory is dataclasses.MISSING:
            required.append(one.name)
    return _describe_object(properties, required)


def _describe_object(properties: dict[str, Any], required: list[str]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def _without_references(shape: Any) -> dict[str, Any]:
    """A pydantic model inside another type: its own definitions can't stand there."""
    schema: dict[str, Any] = shape.model_json_schema()
    if "$defs" in schema:
        raise SettingError(
            about(
                "json_schema",
                f": {shape.__name__} has definitions of its own and stands inside another type; make the "
                "outer one a pydantic model too",
            )
        )
    return schema


def _build(shape: Any, value: Any) -> Any:
    """A JSON value, which fits the type's schema, as an object of the type."""
    origin, arguments = typing.get_origin(shape), typing.get_args(shape)
    if hasattr(shape, "model_validate"):
        return shape.model_validate(value)
    if origin is typing.Annotated:
        return _build(arguments[0], value)
    if origin in (typing.Union, types.UnionType):
        return _build(next((one for one in arguments if _fits(one, value)), arguments[0]), value)
    if origin in (list, Sequence):
        return [_build(arguments[0], one) for one in value]
    if shape is tuple or origin is tuple:
        kinds = arguments if arguments and arguments[-1] is not ... else arguments[:1] * len(value)
        return tuple(_build(kind, one) for kind, one in zip(kinds, value, strict=True)) if kinds else tuple(value)
    if origin in (dict, Mapping):
        return {key: _build(arguments[1], one) for key, one in value.items()}
    if isinstance(shape, type) and issubclass(shape, enum.Enum):
        return shape(value)
    if dataclasses.is_dataclass(shape) and isinstance(shape, type):
        hints = typing.get_type_hints(shape)
        return shape(**{name: _build(hints[name], one) for name, one in value.items()})
    if typing.is_typeddict(shape):
        hints = typing.get_type_hints(shape)
        return {name: _build(hints[name], one) for name, one in value.items()}
    return float(value) if shape is float else value


def _fits(shape: Any, value: Any) -> bool:
    """Whether a value could be of the type: enough to choose among the members of a union."""
    origin = typing.get_origin(shape) or shape
    if origin is typing.Literal:
        return value in typing.get_args(shape)
    if isinstance(value, dict):
        if dataclasses.is_dataclass(origin) or typing.is_typeddict(origin):
            hints = typing.get_type_hints(origin)
            required = _describe(origin, 0)["required"]
            return set(value) <= set(hints) and set(required) <= set(value)
        return origin in (dict, Mapping) or hasattr(origin, "model_validate")
    if isinstance(value, list):
        return origin in (list, tuple, Sequence)
    if isinstance(origin, type) and issubclass(origin, enum.Enum):
        return any(value == member.value for member in origin)
    if isinstance(value, bool) or value is None:
        return origin is type(value)
    if isinstance(value, int):
        return origin in (int, float)
    return isinstance(origin, type) and isinstance(value, origin)

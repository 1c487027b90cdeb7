"""What settings ask for, read within bounds."""

from __future__ import annotations

import dataclasses
import enum
import json
from typing import Any, Literal, TypedDict

import msgspec
import pydantic
import pytest

from tests.grammar.tiny import make_tokenizer
from unspool.config import GenerationConfig
from unspool.config.shapes import make_schema, read_value
from unspool.errors import SettingError
from unspool.grammar.compiling import compile_grammar
from unspool.grammar.sources import read_source
from unspool.grammar.vocabulary import find_vocabulary


class Colour(enum.Enum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass
class Point:
    x: int
    y: float = 0.0


@dataclasses.dataclass
class Shape:
    name: str
    colour: Colour
    points: list[Point]
    size: tuple[int, int]
    kind: Literal["a", "b"] = "a"
    note: str | None = None
    more: dict[str, int] = dataclasses.field(default_factory=dict)


class Movie(TypedDict):
    title: str
    year: int


class User(pydantic.BaseModel):
    name: str
    age: int = pydantic.Field(ge=0, le=150)


class Order(msgspec.Struct):
    item: str
    count: int = 1


VALUES: dict[str, tuple[Any, str, Any]] = {
    "dataclass": (
        Shape,
        '{"name": "s", "colour": "red", "points": [{"x": 1}, {"x": 2, "y": 3}], "size": [1, 2], "note": null}',
        Shape("s", Colour.RED, [Point(1), Point(2, 3.0)], (1, 2)),
    ),
    "typed dict": (Movie, '{"title": "t", "year": 1999}', {"title": "t", "year": 1999}),
    "pydantic": (User, '{"name": "n", "age": 3}', User(name="n", age=3)),
    "msgspec": (Order, '{"item": "i", "count": 2}', Order("i", 2)),
    "list": (list[int], "[1, 2]", [1, 2]),
    "union": (int | str, '"a"', "a"),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_types_schema_takes_its_documents_and_they_become_objects(name: str) -> None:
    import jsonschema

    shape, text, expected = VALUES[name]
    jsonschema.validate(json.loads(text), make_schema(shape))
    assert read_value(shape, text) == expected


def test_a_types_objects_have_its_fields_and_no_others() -> None:
    for shape in (User, Order, Point, Movie):
        assert make_schema(shape).get("additionalProperties") is False or "$defs" in make_schema(shape)


def test_a_type_without_a_schema_is_refused() -> None:
    with pytest.raises(SettingError, match="has no JSON schema"):
        make_schema(object)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no schema": ({"json_schema": 3}, "must be a JSON schema"),
    "no JSON": ({"json_schema": "{"}, "is no JSON text"),
    "false": ({"json_schema": False}, "no document keeps it"),
    "NaN": ({"json_schema": {"minimum": float("nan")}}, "no form for"),
    "unique": ({"json_schema": {"type": "array", "uniqueItems": True}}, "at #/uniqueItems"),
    "deep not": ({"json_schema": {"properties": {"a": {"items": {"not": {}}}}}}, "at #/properties/a/items/not"),
    "if": ({"json_schema": {"if": {"type": "object"}, "then": {"required": ["a"]}}}, "can't be kept"),
    "remote": ({"json_schema": {"$ref": "http://example.org/x"}}, "can't be kept"),
    "look-ahead": ({"regex": "(?=a)b"}, "look-around"),
    "open group": ({"regex": "(a"}, "unclosed group"),
    "empty choice": ({"choice": ["a", ""]}, "not empty"),
    "gbnf": ({"grammar": "root ::= foo"}, "can't be read"),
    "lark": ({"grammar": "start: foo"}, "can't be kept"),
    "tags": ({"structural_tag": {"triggers": ["<f"], "structures": [{"begin": "x", "end": ""}]}}, "no trigger"),
    "tag stop": (
        {"structural_tag": {"triggers": ["<"], "structures": [{"begin": "<f>", "end": ""}], "stop_after_first": 1}},
        "true or false",
    ),
    "tag keys": ({"structural_tag": {"trigger": []}}, "must be"),
    "large multiple": ({"json_schema": {"multipleOf": 1_000_003}}, "multipleOf"),
    "large count": ({"json_schema": {"type": "string", "maxLength": 2_000_000}}, "maxLength"),
    "properties": ({"json_schema": {"properties": {str(n): {} for n in range(5_000)}}}, "65536|properties"),
    "members": ({"json_schema": {"enum": list(range(5_000))}}, "enum members"),
    "long": ({"regex": "a" * 70_000}, "65536 characters"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_can_not_be_kept_is_refused_before_anything_is_read(name: str) -> None:
    settings, message = BAD[name]
    ((setting, value),) = settings.items()
    with pytest.raises(SettingError, match=message):
        GenerationConfig(**settings).validate()
        source = read_source(setting, value)
        assert source is not None
        compile_grammar(source, find_vocabulary(make_tokenizer(), 160))


def test_two_structures_are_refused() -> None:
    with pytest.raises(SettingError, match="set one of them"):
        GenerationConfig(regex="a", json_object=True).validate()


def test_unknown_formats_are_let_pass_as_the_standard_has_it() -> None:
    source = read_source("json_schema", {"type": "string", "format": "password"})
    assert source is not None
    assert "password" not in source.text
    kept = read_source("json_schema", {"type": "string", "format": "date"})
    assert kept is not None
    assert '"date"' in kept.text


def test_a_config_with_a_type_is_saved_as_its_schema() -> None:
    config = GenerationConfig(json_schema=User)
    assert json.loads(config.to_json_string())["json_schema"]["properties"]["age"]["maximum"] == 150

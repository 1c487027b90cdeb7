"""A hundred schemas: documents that programs exchange, and one feature of the standard each."""

from __future__ import annotations

from typing import Any


def _object(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


def _text(most: int = 24, **more: Any) -> dict[str, Any]:
    return {"type": "string", "maxLength": most, **more}


def _list(items: Any, most: int = 3, **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, "maxItems": most, **more}


def _whole(low: int = 0, high: int = 1000) -> dict[str, Any]:
    return {"type": "integer", "minimum": low, "maximum": high}


def _one_of(*values: Any) -> dict[str, Any]:
    return {"enum": list(values)}


FLAG: dict[str, Any] = {"type": "boolean"}
MONEY: dict[str, Any] = {"type": "number", "minimum": 0, "maximum": 10_000}
POINT = _object(
    lat={"type": "number", "minimum": -90, "maximum": 90}, lon={"type": "number", "minimum": -180, "maximum": 180}
)

DOCUMENTS: dict[str, Any] = {
    "person": _object(name=_text(), age=_whole(0, 150), email=_text(40, format="email")),
    "address": _object(
        street=_text(), city=_text(), zip=_text(pattern="^[0-9]{5}$"), country=_one_of("US", "DE", "JP")
    ),
    "movie": _object(
        title=_text(), year=_whole(1900, 2030), genres=_list(_one_of("drama", "comedy", "war"), minItems=1)
    ),
    "recipe": _object(name=_text(), minutes=_whole(1, 600), ingredients=_list(_object(item=_text(), grams=_whole()))),
    "invoice": _object(
        number=_text(pattern="^INV-[0-9]{4}$"), total=MONEY, lines=_list(_object(text=_text(), price=MONEY))
    ),
    "weather": _object(
        city=_text(), celsius={"type": "number", "minimum": -60, "maximum": 60}, sky=_one_of("clear", "rain")
    ),
    "event": _object(title=_text(), date=_text(format="date"), place=_object(name=_text(), at=POINT)),
    "task": _object(id=_whole(), title=_text(), done=FLAG, priority=_one_of("low", "medium", "high")),
    "review": _object(stars=_whole(1, 5), text=_text(60), verified=FLAG),
    "sentiment": _object(
        label=_one_of("positive", "negative", "neutral"), score={"type": "number", "minimum": 0, "maximum": 1}
    ),
    "entities": _list(_object(text=_text(), kind=_one_of("person", "place", "organisation")), 4),
    "translation": _object(source=_text(40), target=_text(40), language=_one_of("de", "fr", "es", "ja")),
    "summary": _object(title=_text(), points=_list(_text(40), 3, minItems=1)),
    "quiz": _object(question=_text(60), choices=_list(_text(), 4, minItems=2), answer=_whole(0, 3)),
    "flight": _object(code=_text(pattern="^[A-Z]{2}[0-9]{3}$"), origin=_text(3), seats=_whole(0, 300), delayed=FLAG),
    "book": _object(isbn=_text(pattern="^[0-9]{13}$"), title=_text(), authors=_list(_text(), 2, minItems=1)),
    "config": _object(host=_text(format="hostname"), port=_whole(1, 65535), tls=FLAG, retries=_whole(0, 9)),
    "log": _object(level=_one_of("debug", "info", "error"), time=_text(30, format="date-time"), message=_text(60)),
    "colour": _object(name=_text(), hex=_text(pattern="^#[0-9a-f]{6}$"), rgb=_list(_whole(0, 255), 3, minItems=3)),
    "account": _object(
        user=_text(pattern="^[a-z]{3,12}$"),
        role=_one_of("admin", "user"),
        active=FLAG,
        quota={"type": ["integer", "null"]},
    ),
    "coordinates": POINT,
    "route": _object(name=_text(), points=_list(POINT, 2, minItems=1)),
    "product": _object(sku=_text(8), name=_text(), price=MONEY, tags=_list(_text(10)), stock=_whole()),
    "order": _object(
        id=_text(36, format="uuid"), items=_list(_object(sku=_text(8), count=_whole(1, 9)), 2, minItems=1)
    ),
    "patient": _object(
        name=_text(), born=_text(format="date"), blood=_one_of("A", "B", "AB", "0"), allergies=_list(_text())
    ),
    "job": _object(title=_text(), salary=_object(low=_whole(), high=_whole()), remote=FLAG),
    "song": _object(title=_text(), artist=_text(), seconds=_whole(1, 900), lyrics=_list(_text(30), 2)),
    "chess": _object(move=_text(pattern="^[a-h][1-8][a-h][1-8]$"), check=FLAG),
    "git": _object(hash=_text(pattern="^[0-9a-f]{7}$"), author=_text(), files=_list(_text(), 2), insertions=_whole()),
    "http": _object(method=_one_of("GET", "POST"), path=_text(pattern="^/[a-z/]*$"), status=_whole(100, 599)),
    "dns": _object(name=_text(format="hostname"), type=_one_of("A", "MX"), ttl=_whole(), ip=_text(format="ipv4")),
    "plan": _object(
        steps=_list(_object(number=_whole(1, 9), action=_text(40), tool=_one_of("search", "code")), 2, minItems=1)
    ),
    "call": _object(name=_one_of("add", "search"), arguments=_object(a=_whole(), b=_whole())),
    "sql": _object(
        table=_text(pattern="^[a-z_]+$"), columns=_list(_text(pattern="^[a-z_]+$"), 3, minItems=1), limit=_whole()
    ),
    "team": _object(name=_text(), members=_list(_object(name=_text(), lead=FLAG), 2, minItems=1)),
    "exam": _object(
        subject=_text(), grade=_one_of("A", "B", "C", "D"), points={"type": "number", "minimum": 0, "maximum": 100}
    ),
    "nutrition": _object(kcal=_whole(), fat=MONEY, per=_one_of("100g", "portion")),
    "vehicle": _object(
        make=_text(), doors=_whole(2, 5), engine=_object(fuel=_one_of("petrol", "electric"), power=_whole())
    ),
    "thermostat": _object(room=_text(), target={"type": "number", "multipleOf": 0.5, "minimum": 5, "maximum": 30}),
    "survey": _object(
        answers=_list(_object(id=_whole(1, 20), value={"anyOf": [FLAG, _whole(1, 5), _text(20)]}), 3, minItems=1)
    ),
}
FEATURES: dict[str, Any] = {
    "true": True,
    "empty": _object(),
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "integer": _whole(-5, 5),
    "number": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
    "string": _text(10),
    "min length": {"type": "string", "minLength": 3, "maxLength": 6},
    "pattern": {"type": "string", "pattern": "^(ab|cd)+$", "maxLength": 12},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date-time": {"type": "string", "format": "date-time"},
    "duration": {"type": "string", "format": "duration"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "ipv6": {"type": "string", "format": "ipv6"},
    "uuid": {"type": "string", "format": "uuid"},
    "const text": {"const": "fixed"},
    "const object": {"const": {"a": [1, 2], "b": None}},
    "enum mixed": {"enum": [1, "two", None, True, [3]]},
    "array": _list(_whole(0, 9), 4),
    "min items": _list(_whole(0, 9), 4, minItems=2),
    "prefix items": {"type": "array", "prefixItems": [_whole(), _text(5)], "items": False, "minItems": 2},
    "prefix and rest": {"type": "array", "prefixItems": [FLAG], "items": _whole(0, 9), "maxItems": 3},
    "nested arrays": _list(_list(_whole(0, 9), 2), 2),
    "optional": _object(["a"], a=_whole(), b=_text(5), c=FLAG),
    "all optional": _object([], a=_whole(), b=_text(5)),
    "additional": {"type": "object", "additionalProperties": _whole(0, 9), "maxProperties": 2},
    "pattern properties": {"type": "object", "patternProperties": {"^x[0-9]$": FLAG}, "additionalProperties": False},
    "any of": {"anyOf": [_whole(), _text(5)]},
    "any of objects": {"anyOf": [_object(a=_whole()), _object(b=_text(5))]},
    "one of disjoint": {"oneOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "string", "maxLength": 4}]},
    "all of": {
        "allOf": [{"type": "object", "properties": {"a": _whole()}, "required": ["a"]}, _object(a={"type": "integer"})]
    },
    "types": {"type": ["integer", "null"], "minimum": 0, "maximum": 9},
    "ref": {"$defs": {"n": _whole(0, 9)}, "type": "array", "items": {"$ref": "#/$defs/n"}, "maxItems": 3},
    "tree": {
        "$defs": {"node": _object(["value"], value=_whole(0, 9), next={"$ref": "#/$defs/node"})},
        "$ref": "#/$defs/node",
    },
    "definitions": {
        "definitions": {"t": _text(4)},
        "type": "object",
        "properties": {"x": {"$ref": "#/definitions/t"}},
        "required": ["x"],
        "additionalProperties": False,
    },
    "multiple of": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "unicode keys": _object(naïve=FLAG, 日本=_whole(0, 9)),
    "quoted keys": _object(**{'a"b': FLAG, "c\\d": FLAG, "e/f": FLAG}),
    "long enum": {"enum": [f"item-{number}" for number in range(200)]},
    "deep": _object(a=_object(b=_object(c=_object(d=_object(e=_whole(0, 9)))))),
    "wide": _object(**{f"field_{number}": FLAG for number in range(12)}),
    "negative": _whole(-1000, -1),
    "large": {"type": "integer", "minimum": 10**12, "maximum": 10**12 + 5},
    "decimals": {"type": "number", "minimum": 0.25, "maximum": 0.75},
    "title": {"title": "A", "description": "B", "default": 1, "examples": [2], **_whole(0, 9)},
    "enum numbers": {"enum": [0, 1, 1.5, -2]},
    "string enum": {"type": "string", "enum": ["a", "ab", "abc"]},
    "nullable object": {"anyOf": [_object(a=FLAG), {"type": "null"}]},
    "array of any of": _list({"anyOf": [FLAG, {"type": "null"}, _whole(0, 9)]}, 4),
    "required unlisted": {
        "type": "object",
        "properties": {"a": FLAG},
        "required": ["a", "b"],
        "additionalProperties": _whole(0, 9),
        "maxProperties": 2,
    },
    "pattern anchored once": {"type": "string", "pattern": "^[a-z]{2}", "maxLength": 5},
    "email": {"type": "string", "format": "email", "maxLength": 30},
    "hostname": {"type": "string", "format": "hostname", "maxLength": 20},
    "empty array": {"type": "array", "maxItems": 0},
    "exact items": _list(FLAG, 2, minItems=2),
    "exact text": {"type": "string", "minLength": 4, "maxLength": 4},
    "object or list": {"anyOf": [_object(a=FLAG), _list(FLAG, 2)]},
    "boolean schema inside": _object(a=True, b=FLAG),
    "lists of objects": _list(_object(k=_one_of("x", "y"), v=_whole(0, 9)), 3, minItems=1),
}
SCHEMAS: dict[str, Any] = DOCUMENTS | FEATURES

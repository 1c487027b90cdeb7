"""What a field of a request is, and how a body is read against a table of them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from unspool.config.parameter import LARGEST_COUNT, Kind, Parameter
from unspool.config.parameters import PARAMETERS
from unspool.config.values import LONGEST_STRING, LONGEST_TEXT, MOST_CHOICES, MOST_STRINGS, check_value
from unspool.errors import SettingError, excerpt
from unspool.server.refusals import RequestError, refuse_field
from unspool.wording import suggest

Use = Literal[
    "setting",  # a setting of the library, by its own name or a client's
    "read",  # read by the route
    "without effect",
    "refused",  # unless its value is neutral
]
Json = dict[str, Any]


@dataclass(frozen=True)
class Field:
    """One field of a request."""

    parameter: Parameter  # its name, kind, bounds and help
    use: Use = "read"
    becomes: str = ""  # the name under which a request has it, if that is another
    neutral: tuple[Any, ...] = ()  # values that ask for nothing, beside null and what is empty
    why: str = ""  # why it is refused, or has no effect
    schema: Mapping[str, Any] | None = None  # JSON schema of an "object"
    same: tuple[Any, Any] | None = None  # a value, and the one that it stands for

    @property
    def name(self) -> str:
        """What it is called in the request."""
        return self.parameter.name

    @property
    def target(self) -> str:
        """The name under which `read_fields` returns it."""
        return self.becomes or self.name

    def describe(self) -> Json:
        """Its JSON schema."""
        if self.use == "refused":
            options: list[Any] = [{"enum": [None, *self.neutral]}]
        else:
            made = dict(self.schema) if self.schema is not None else dict(_SCHEMAS[self.parameter.kind](self.parameter))
            options = [made, {"enum": [None, *self.neutral, *(self.same or ())[:1]]}]
        return {"description": self.explain(), "anyOf": options}

    def explain(self) -> str:
        """One line for the docs."""
        text = self.parameter.help
        if self.becomes and self.use == "setting":
            text = f"{text} The setting `{self.becomes}`.".strip()
        if self.use == "without effect":
            text = f"{text} Without effect: {self.why}.".strip()
        if self.use == "refused":
            shown = ", ".join(f"`{_spell(one)}`" for one in (None, *self.neutral))
            text = f"{text} Refused unless it is {shown}: {self.why}.".strip()
        return text


def _spell(value: Any) -> str:
    return json.dumps(value) if isinstance(value, bool | None) else repr(value)


def _texts() -> Json:
    one = make_string(1, LONGEST_STRING)
    return {"anyOf": [one, {"type": "array", "items": one, "minItems": 1, "maxItems": MOST_STRINGS}]}


def make_string(least: int, most: int) -> Json:
    """The JSON schema of a text."""
    return {"type": "string", "minLength": least, "maxLength": most}


def _numbers(parameter: Parameter, kind: str) -> Json:
    made: Json = {"type": kind}
    if parameter.at_least is not None:
        made["minimum"] = parameter.at_least
    if parameter.at_most is not None:
        made["maximum"] = parameter.at_most
    return made


_ID: Final[Json] = {"type": "integer", "minimum": 0, "maximum": LARGEST_COUNT}
_IDS: Final[Json] = {"type": "array", "items": _ID, "minItems": 1}
_SCHEMAS: Final[Mapping[Kind, Callable[[Parameter], Json]]] = {
    "flag": lambda _: {"type": "boolean"},
    "integer": lambda parameter: _numbers(parameter, "integer"),
    "number": lambda parameter: _numbers(parameter, "number"),
    "text": lambda _: make_string(1, LONGEST_STRING),
    "texts": lambda _: _texts(),
    "choice": lambda parameter: {"enum": list(parameter.all_choices)},
    "ids": lambda _: {"anyOf": [_ID, _IDS]},
    "id list": lambda _: {"type": "array", "items": _ID},
    "id lists": lambda _: {"type": "array", "items": _IDS, "minItems": 1},
    "layers": lambda _: {"anyOf": [{"enum": ["low", "high"]}, _IDS]},
    "bias": lambda _: {
        "type": "array",
        "items": {"type": "array", "prefixItems": [_IDS, {"type": "number"}], "minItems": 2, "maxItems": 2},
    },
    "token bias": lambda _: {"type": "object", "additionalProperties": {"type": "number"}},
    "decay": lambda _: {
        "type": "array",
        "prefixItems": [{"type": "integer"}, {"type": "number"}],
        "minItems": 2,
        "maxItems": 2,
    },
    "forced ids": lambda _: {
        "type": "array",
        "items": {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
    },
    "schema": lambda _: {"anyOf": [{"type": "object"}, {"type": "boolean"}, make_string(1, LONGEST_TEXT)]},
    "long text": lambda _: make_string(1, LONGEST_TEXT),
    "choices": lambda _: {"type": "array", "items": make_string(1, LONGEST_STRING), "maxItems": MOST_CHOICES},
    "tags": lambda _: {"type": "object"},
    "object": lambda _: {"type": "object"},
}

_TENSORS: Final = "it returns tensors, which an answer in JSON has no place for"
_SERVER: Final = "it is decided where the server is started"
_OBJECTS: Final = "it holds Python objects"
NOT_OFFERED: Final[Mapping[str, str]] = {
    "output_attentions": _TENSORS,
    "output_hidden_states": _TENSORS,
    "output_scores": _TENSORS,
    "output_logits": _TENSORS,
    "return_dict_in_generate": _TENSORS,
    "return_legacy_cache": _TENSORS,
    "return_beam_trace": "it is a report for `unspool explain`",
    "constraints": f"{_OBJECTS}; use force_words",
    "generation_kwargs": _OBJECTS,
    "compile": _SERVER,
    "compile_config": _SERVER,
    "disable_compile": _SERVER,
    "use_cache": _SERVER,
    "cache_implementation": _SERVER,
    "cache_config": _SERVER,
    "max_cache_len": _SERVER,
    "prefill_chunk_size": f"{_SERVER}: the engine cuts prompts itself",
    "decoder_start_token_id": "it is the model's",
    "bos_token_id": "it is the model's",
    "pad_token_id": "a request has no padding",
}


# What clients send for "off", beside our own words for it.
OFF: Final[Mapping[str, tuple[Any, ...]]] = {
    "top_n_sigma": (-1,),
    "min_p": (0,),
    "seed": (-1,),
    "speculate": (False,),
}
SAME: Final[Mapping[str, tuple[Any, Any]]] = {"top_k": (-1, 0)}


def make_setting(parameter: Parameter) -> Field:
    """The field of a setting of the library."""
    why = NOT_OFFERED.get(parameter.name)
    if why is not None:
        neutral = () if parameter.default in (None, {}) else (parameter.default,)
        return Field(parameter, "refused", neutral=neutral, why=why)
    schema = {"type": "object"} if parameter.kind == "object" else None
    return Field(
        parameter, "setting", neutral=OFF.get(parameter.name, ()), same=SAME.get(parameter.name), schema=schema
    )


class FieldTable(Mapping[str, Field]):
    """The fields of one route: its own, those of every route, and the library's settings."""

    def __init__(self, *own: Iterable[Field]) -> None:
        self._own = {one.name: one for fields in own for one in fields}

    def _all(self) -> dict[str, Field]:
        return {name: make_setting(one) for name, one in PARAMETERS.items()} | self._own

    def __getitem__(self, name: str) -> Field:
        found = self._own.get(name)
        return found if found is not None else make_setting(PARAMETERS[name])

    def __iter__(self) -> Any:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def describe(self, required: Iterable[str]) -> Json:
        """The JSON schema of a body."""
        properties = {name: one.describe() for name, one in self._all().items()}
        for name in required:
            known = self[name]
            made = known.schema if known.schema is not None else _SCHEMAS[known.parameter.kind](known.parameter)
            properties[name] = {"description": known.explain(), **made}
        return {
            "type": "object",
            "properties": properties,
            "required": list(required),
            "additionalProperties": False,
        }


@dataclass
class Found:
    """A request's fields that ask for something, by the names that the rest of the server knows."""

    values: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)  # of settings, as the client has them

    def put(self, name: str, value: Any) -> None:
        """Enter a value that the route made itself, unless it asks for nothing."""
        if not is_empty(value):
            self.values[name] = value

    def take(self, name: str, default: Any = None) -> Any:
        """A value that the route reads."""
        return self.values.pop(name, default)


def is_empty(value: Any) -> bool:
    """Whether a value asks for nothing, whatever the field."""
    return value is None or (isinstance(value, str | list | dict) and not value)


def is_one_of(value: Any, known: Iterable[Any]) -> bool:
    """Whether a value is among others, where true is not 1."""
    return any(isinstance(value, bool) == isinstance(one, bool) and value == one for one in known)


def read_fields(body: Any, table: Mapping[str, Field], required: Iterable[str] = ()) -> Found:
    """Check a body field by field; raises for what is unknown, impossible or not offered."""
    if not isinstance(body, dict):
        raise RequestError(400, "the body must be a JSON object with the fields of the request")
    found = Found()
    for name, value in body.items():
        try:
            known = table[name]
        except KeyError:
            raise _refuse_unknown(name, table) from None
        if is_empty(value) or is_one_of(value, known.neutral):
            continue
        if known.same is not None and is_one_of(value, known.same[:1]):
            value = known.same[1]
        _enter(found, known, value)
    for name in required:
        if name not in found.values:
            raise refuse_field(
                name, f"the field {name!r} is required and must not be empty", "missing_required_parameter"
            )
    return found


def _enter(found: Found, known: Field, value: Any) -> None:
    name = known.name
    if known.use == "refused":
        raise refuse_field(
            name, f"`{name}`={excerpt(value)} is not offered: {known.why}; leave it out", "unsupported_parameter"
        )
    if known.parameter.holds_rows(value):
        raise refuse_field(name, f"`{name}` has one value in a request, not a list; send one request for each")
    if known.parameter.kind == "object":
        if known.schema is not None:
            _check_type(name, value, known.schema)
    else:
        try:
            check_value(known.parameter, value)
        except SettingError as error:
            raise refuse_field(name, str(error), "invalid_value") from error
    if known.use == "without effect":
        return
    into = found.settings if known.use == "setting" else found.values
    target = known.target
    if target in into and into[target] != value:
        raise refuse_field(name, f"`{name}` and `{found.names[target]}` say two things of the same setting; give one")
    into[target] = value
    found.names[target] = name


_TYPES: Final = {"array": list, "object": dict, "boolean": bool, "string": str, "integer": int}


def _check_type(name: str, value: Any, schema: Mapping[str, Any]) -> None:
    """The outermost type of a value; its reader looks inside."""
    options = schema.get("anyOf", [schema])
    wanted = [_TYPES[one["type"]] for one in options if isinstance(one.get("type"), str)]
    listed = [choice for one in options for choice in one.get("enum", ())]
    if not wanted and not listed:
        return
    for kind in wanted:
        if isinstance(value, kind) and (kind is not int or not isinstance(value, bool)):
            return
    if not is_one_of(value, listed):
        allowed = [kind.__name__ for kind in wanted] + [repr(one) for one in listed]
        raise refuse_field(name, f"`{name}` must be {' or '.join(allowed)}, but is {excerpt(value)}", "invalid_type")


def _refuse_unknown(name: str, table: Mapping[str, Field]) -> RequestError:
    hint = suggest(name, table) or "; /openapi.json lists the fields"
    return refuse_field(name[:64], f"unknown field {excerpt(name, 64)}{hint}", "unknown_parameter")


def refuse_deep(value: Any, depth: int = 64) -> None:
    """Raise for values nested more deeply than anything here reads."""
    level = [value]
    for _ in range(depth):
        level = [part for one in level for part in _list_parts(one)]
        if not level:
            return
    raise RequestError(400, f"the body is nested more than {depth} levels deep")


def _list_parts(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [one for one in value.values() if isinstance(one, dict | list)]
    return [one for one in value if isinstance(one, dict | list)] if isinstance(value, list) else []

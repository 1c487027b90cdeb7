"""The forms in which models write tool calls: each is read as it is written, and written as a part of a grammar."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from unspool.grammar.call_text import Added, Begun, CallText, Ended, Event, Reading, Source, read_json
from unspool.grammar.sources import embed_schema, spell
from unspool.outputs import ToolCall

_LONGEST_VALUE: Final = 1 << 20  # characters of a value that is not JSON
_DEEPEST: Final = 64
Schemas = Mapping[str, Any]


class ToolForm(Protocol):
    """A form of tool calls."""

    @property
    def trigger(self) -> str:
        """The text with which calls begin in free text; empty if a grammar can't tell them from it."""
        ...

    @property
    def section(self) -> tuple[str, str]:
        """What stands around all calls of an answer."""
        ...

    @property
    def between(self) -> str:
        """What stands between two calls."""
        ...

    @property
    def lead(self) -> str:
        """What may stand before the first call behind a thought."""
        ...

    @property
    def id_length(self) -> int:
        """Letters and digits of a call's id; 0 if it may be any."""
        ...

    def read_calls(self, text: str, schemas: Schemas | None = None) -> list[ToolCall]:
        """The whole calls in a text."""
        ...

    def read(self, source: Source, schemas: Schemas) -> Reading:
        """Read calls, and text between them, until the source ends; `schemas` are those of the tools' arguments."""
        ...

    def write_call(
        self, place: int, name: str, schema: Any, specials: Container[str], cut: str = ""
    ) -> tuple[str, list[str]]:
        """A call of a tool, without `cut` at its beginning, as an expression of a Lark grammar, and the rules that it
        needs."""
        ...


def read_events(form: ToolForm, text: str, schemas: Schemas | None = None) -> list[Event]:
    """All of a whole text."""
    reader = CallText(lambda source: form.read(source, schemas or {}))
    return [*reader.put(text), *reader.end()]


def collect_calls(events: Sequence[Event]) -> list[ToolCall]:
    """The whole calls among events."""
    calls: list[ToolCall] = []
    name, parts = "", list[str]()
    for event in events:
        if isinstance(event, Begun):
            name, parts = event.name, []
        elif isinstance(event, Added):
            parts.append(event.text)
        elif isinstance(event, Ended) and event.is_whole:
            arguments = read_arguments("".join(parts))
            if arguments is not None:
                calls.append(ToolCall(name, arguments))
    return calls


def read_arguments(text: str) -> dict[str, Any] | None:
    """Arguments as an object; None if the text is none."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


# --- arguments as JSON ------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class CallFormat:
    """Calls with arguments as JSON: what stands before a call's name, between the name and the arguments, and after
    them. In marks, `{index}` stands for a number and `{id}` for letters and digits."""

    begin: str
    middle: str
    end: str
    section: tuple[str, str] = ("", "")
    between: str = ""
    begins: tuple[str, ...] = ()  # other forms of the beginning,
    middles: tuple[str, ...] = ()  # and of the middle, that are read
    id_length: int = 0
    ends: tuple[str, ...] = ()  # other forms of the end
    lead: str = ""  # what may stand before the first call behind a thought
    names_ids: bool = False  # a call's id is its name, with what stands before it, and the number behind it

    @property
    def trigger(self) -> str:
        """The text with which calls begin in free text."""
        return re.split(r"\{index\}|\{id\}", self.section[0] or self.begin)[0]

    def read_calls(self, text: str, schemas: Schemas | None = None) -> list[ToolCall]:  # noqa: ARG002
        """The whole calls in a text."""
        return collect_calls(read_events(self, text))

    def read(self, source: Source, schemas: Schemas) -> Reading:  # noqa: ARG002 - JSON says what it is
        """Read calls, and text between them."""
        begins = (self.begin, *self.begins)
        openings = (*(f"{self.section[0]}{begin}" for begin in begins if self.section[0]), *begins)
        behind = tuple(mark for mark in (self.between, self.section[1]) if mark)
        while length := (yield from source.find(openings)):
            name, mark, stop = yield from source.read_name(length, (self.middle, *self.middles))
            if not stop or (yield from source.peek(stop)) != "{":
                source.say(1)
                continue
            source.take(stop)
            yield from source.skip_space()
            source.emit(Begun(name, _make_id(name, mark) if self.names_ids else ""))
            is_whole = yield from read_json(source)
            if is_whole and self.end:
                source.take((yield from source.match((self.end, *self.ends))))
            source.emit(Ended(is_whole))
            if behind:
                source.take((yield from source.match(behind)))

    def write_call(
        self,
        place: int,  # noqa: ARG002 - it needs no rules
        name: str,
        schema: Any,
        specials: Container[str],
        cut: str = "",
    ) -> tuple[str, list[str]]:
        """A call as an expression of a Lark grammar."""
        before = _spell_mark(f"{self.begin}{name}{self.middle}".removeprefix(cut), specials)
        after = _spell_mark(self.end, specials)
        return f"{before} {embed_schema(schema)} {after}", []


def _make_id(name: str, mark: str) -> str:
    number = re.match(r":\d+", mark)
    return f"functions.{name}{number[0]}" if number else ""


def _spell_mark(mark: str, specials: Container[str]) -> str:
    parts = re.split(r"(\{index\}|\{id\})", mark)
    named = {"{index}": "/[0-9]{1,3}/", "{id}": "/[a-zA-Z0-9]{9}/"}
    return " ".join(named.get(part) or spell(part, specials) for part in parts if part)


# --- arguments one by one ---------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class ParameterFormat:
    """Calls whose arguments stand one by one between marks, as in XML."""

    begin: str
    middle: str  # behind the name
    parameter: str  # before an argument's name,
    key_end: str  # behind it,
    value_end: str  # and behind its value
    end: str
    section: tuple[str, str] = ("", "")
    between: str = ""
    begins: tuple[str, ...] = ()
    middles: tuple[str, ...] = ()  # other forms that are read, one of which may be the beginning of what follows
    key_ends: tuple[str, ...] = ()
    lead: str = ""
    id_length: int = 0

    @property
    def trigger(self) -> str:
        """The text with which calls begin in free text."""
        return self.section[0].strip() or self.begin.strip()

    def read_calls(self, text: str, schemas: Schemas | None = None) -> list[ToolCall]:
        """The whole calls in a text."""
        return collect_calls(read_events(self, text, schemas))

    def read(self, source: Source, schemas: Schemas) -> Reading:
        """Read calls, and text between them."""
        begins = (self.begin, *self.begins)
        openings = (*(f"{self.section[0]}{begin}" for begin in begins if self.section[0]), *begins)
        behind = tuple(mark for mark in (self.between.strip(), self.section[1].strip()) if mark)
        while length := (yield from source.find(openings)):
            ends = (self.middle, self.parameter.strip(), self.end.strip(), *self.middles)
            name, mark, stop = yield from source.read_name(length, ends)
            if not stop:
                source.say(1)
                continue
            source.take(stop - len(mark) if mark in (self.parameter.strip(), self.end.strip()) else stop)
            source.emit(Begun(name))
            source.emit(Ended((yield from self._read_parameters(source, schemas.get(name)))))
            yield from source.skip_space() if behind else ()
            if behind:
                source.take((yield from source.match(behind)))

    def _read_parameters(self, source: Source, schema: Any) -> Any:
        """Read a call's arguments and its end; whether it is whole."""
        count = 0
        while True:
            yield from source.skip_space()
            found = yield from source.match((self.parameter.strip(),))
            if not found:
                stop = yield from source.match((self.end.strip(),))
                source.take(stop)
                source.emit(Added("}" if count else "{}"))
                return bool(stop)
            key, _, stop = yield from source.read_name(found, (self.key_end, *self.key_ends))
            if not stop:
                return False
            source.take(stop)
            source.emit(Added(f"{', ' if count else '{'}{json.dumps(key, ensure_ascii=False)}: "))
            count += 1
            if not (yield from self._read_value(source, _find_property(schema, key))):
                return False

    def _read_value(self, source: Source, schema: Any) -> Any:
        end = self.value_end
        ends = tuple(dict.fromkeys((end, end.lstrip(), end.rstrip(), end.strip())))
        if _is_text(schema):
            source.emit(Added('"'))
            is_whole = yield from source.read_until(ends, lambda text: source.emit(Added(_escape(text))))
            source.emit(Added('"'))
            return is_whole
        parts: list[str] = []
        is_whole = yield from source.read_until(ends, parts.append)
        if is_whole:
            source.emit(Added(write_value("".join(parts))))
        return is_whole

    def write_call(
        self, place: int, name: str, schema: Any, specials: Container[str], cut: str = ""
    ) -> tuple[str, list[str]]:
        """A call as an expression of a Lark grammar: the parameters in the schema's order."""
        parts, rules = [spell(f"{self.begin}{name}{self.middle}".removeprefix(cut), specials)], list[str]()
        for number, (key, held, is_required) in enumerate(list_properties(schema)):
            rule = f"value_{place}_{number}"
            before = spell(f"{self.parameter}{key}{self.key_end}", specials)
            after = spell(self.value_end, specials)
            texts = _list_texts(held)
            if texts is not None:
                body = f"({' | '.join(spell(text, ()) for text in texts)}) {after}"
            elif _is_text(held):
                lazily = "" if _is_special(after) else "[lazy]"
                rules.append(f"{rule}{lazily}: /(.|\\n)*/ {after}")
                body = rule
            else:
                body = f"{embed_schema(held)} {after}"
            parts.append(f"{before} {body}" if is_required else f"({before} {body})?")
        return " ".join([*parts, spell(self.end, specials)]), rules


def _is_special(spelled: str) -> bool:
    return spelled.startswith("<")


def _escape(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _find_property(schema: Any, key: str) -> Any:
    properties = schema.get("properties") if isinstance(schema, Mapping) else None
    return properties.get(key) if isinstance(properties, Mapping) else None


def _is_text(schema: Any) -> bool:
    """Whether a value can be nothing but a text."""
    if not isinstance(schema, Mapping):
        return False
    return schema.get("type") == "string" or _list_texts(schema) is not None


def _list_texts(schema: Any) -> list[str] | None:
    """The texts that a value is one of, if it is one of some."""
    if not isinstance(schema, Mapping):
        return None
    given = schema.get("enum", [schema["const"]] if "const" in schema else None)
    return given if isinstance(given, list) and given and all(isinstance(one, str) for one in given) else None


def list_properties(schema: Any) -> list[tuple[str, Any, bool]]:
    """The properties of an object's schema, whether each is required; those that need the schema's definitions have
    them."""
    if not isinstance(schema, Mapping):
        return []
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return [
        (key, {**held, **shared} if isinstance(held, Mapping) and shared else held, key in required)
        for key, held in properties.items()
    ]


def write_value(text: str) -> str:
    """A value that models wrote as JSON, in Python's words, or as plain text, as JSON."""
    told = text.strip()
    if len(told) <= _LONGEST_VALUE:
        try:
            return json.dumps(json.loads(told, parse_constant=_refuse_constant), ensure_ascii=False)
        except (ValueError, RecursionError):
            pass
        try:
            return json.dumps(read_literal(told), ensure_ascii=False, allow_nan=False)
        except (ValueError, TypeError, RecursionError):
            pass
    return json.dumps(text, ensure_ascii=False)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def read_literal(text: str) -> Any:
    """A value in Python's words; raises ValueError for anything else."""
    depth = deepest = 0
    for character in text:
        depth += (character in "([{") - (character in ")]}")
        deepest = max(deepest, depth)
    if deepest > _DEEPEST or len(text) > _LONGEST_VALUE or text.count("-") + text.count("+") > 10_000:
        raise ValueError("it is too large")
    try:
        return ast.literal_eval(text)
    except (SyntaxError, MemoryError, ValueError, TypeError) as error:
        raise ValueError("it is no literal") from error


# --- Python's words ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class PythonFormat:
    """Calls as Python writes them: `[f(a=1, b="x"), g()]`, between marks or as a whole answer."""

    before: tuple[str, ...] = ()  # marks that may stand before; without one, calls are read at a text's beginning alone
    after: tuple[str, ...] = ()
    is_bare: bool = False  # whether calls may begin an answer without a mark
    section: tuple[str, str] = ("[", "]")
    between: str = ", "
    lead: str = ""
    id_length: int = 0

    @property
    def trigger(self) -> str:
        """The text with which calls begin in free text; none if that may be a bracket."""
        return "" if self.is_bare else self.before[0]

    def read_calls(self, text: str, schemas: Schemas | None = None) -> list[ToolCall]:  # noqa: ARG002
        """The whole calls in a text."""
        return collect_calls(read_events(self, text))

    def read(self, source: Source, schemas: Schemas) -> Reading:
        """Read calls, and text around them."""
        if self.is_bare:
            yield from source.peek()
            space = len(source.text) - len(source.text.lstrip())
            length = yield from source.match(("[",), space)
            if length:
                yield from self._read_list(source, length, schemas)
        marks = tuple(f"{mark}[" for mark in self.before)
        while marks and (length := (yield from source.find(marks))):
            if not (yield from self._read_list(source, length, schemas)):
                source.say(1)
        yield from source.say_rest()

    def _read_list(self, source: Source, start: int, schemas: Schemas) -> Any:
        """Read a list of calls behind its opening; whether one stands there: of a tool, with its arguments named."""
        name, _, stop = yield from source.read_name(start, ("(",))
        if not stop or (schemas and name not in schemas):
            return False
        if (yield from source.peek(stop)) != ")" and not (yield from source.read_name(stop, ("=",)))[2]:
            return False
        while stop:
            source.take(stop)
            source.emit(Begun(name))
            is_whole = yield from self._read_arguments(source)
            source.emit(Ended(is_whole))
            if not is_whole:
                return True
            yield from source.skip_space()
            found = yield from source.match((",",))
            if not found:
                break
            source.take(found)
            yield from source.skip_space()
            name, _, stop = yield from source.read_name(0, ("(",))
        source.take((yield from source.match(("]",))))
        if self.after:
            source.take((yield from source.match(self.after)))
        return True

    def _read_arguments(self, source: Source) -> Any:
        count = 0
        while True:
            yield from source.skip_space()
            closing = yield from source.match((")",))
            if closing:
                source.take(closing)
                source.emit(Added("}" if count else "{}"))
                return True
            key, _, stop = yield from source.read_name(0, ("=",))
            if not stop:
                return False
            source.take(stop)
            value = yield from _read_balanced(source, ",)")
            if value is None:
                return False
            try:
                written = json.dumps(read_literal(value.strip()), ensure_ascii=False, allow_nan=False)
            except (ValueError, TypeError, RecursionError):
                written = write_value(value)
            source.emit(Added(f"{', ' if count else '{'}{json.dumps(key)}: {written}"))
            count += 1
            source.take((yield from source.match((",",))))

    def write_call(
        self,
        place: int,  # noqa: ARG002 - it needs no rules,
        name: str,
        schema: Any,
        specials: Container[str],  # noqa: ARG002 - holds no marks,
        cut: str = "",  # noqa: ARG002 - and nothing can be cut
    ) -> tuple[str, list[str]]:
        """A call as an expression of a Lark grammar."""
        required, optional = list[str](), list[str]()
        for key, held, is_required in list_properties(schema):
            (required if is_required else optional).append(f"{json.dumps(f'{key}=')} {_write_python(held)}")
        body = ' ", " '.join(required)
        for number, one in enumerate(optional):
            body += f' (", " {one})?' if required else f" ({one})?" if not number else ""
        return f'{json.dumps(f"{name}(")} {body} ")"', []


def _write_python(schema: Any) -> str:
    """A value in Python's words, as an expression of a Lark grammar."""
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    texts = _list_texts(schema)
    if texts is not None:
        return f"({' | '.join(json.dumps(json.dumps(text, ensure_ascii=False), ensure_ascii=False) for text in texts)})"
    if kind == "boolean":
        return '("True" | "False")'
    if kind == "null":
        return '"None"'
    if kind in ("string", "integer", "number") or (kind == "array" and _holds_json(schema.get("items"))):
        return embed_schema(schema)
    return embed_schema(
        {"anyOf": [{"type": "string"}, {"type": "number"}, {"type": "array", "items": {"type": "string"}}]}
    )


def _holds_json(schema: Any) -> bool:
    """Whether JSON and Python write a value alike."""
    return isinstance(schema, Mapping) and schema.get("type") in ("string", "integer", "number")


def _read_balanced(source: Source, ends: str) -> Any:
    """Read a value up to one of some characters outside its brackets and texts; None if none comes."""
    at, depth, quote = 0, 0, ""
    while True:
        while at < len(source.text):
            character = source.text[at]
            if quote:
                if character == "\\":
                    if at + 1 == len(source.text) and not source.is_over:
                        break
                    at += 1
                elif character == quote:
                    quote = ""
            elif character in "\"'":
                quote = character
            elif not depth and character in ends:
                return source.take(at)
            elif character in "([{":
                depth += 1
            elif character in ")]}":
                depth -= 1
            at += 1
        if source.is_over or len(source.text) > _LONGEST_VALUE:
            return None
        yield


# --- Gemma's ----------------------------------------------------------------------------------------------------------
_QUOTE: Final = '<|"|>'
_QUOTED: Final = re.compile(re.escape(_QUOTE) + r"(.*?)" + re.escape(_QUOTE), re.S)


@dataclass(frozen=True)
class GemmaFormat:
    """Gemma 4's calls: `<|tool_call>call:f{key:<|"|>text<|"|>,other:1}<tool_call|>`."""

    begin: str = "<|tool_call>call:"
    end: str = "<tool_call|>"
    section: tuple[str, str] = ("", "")
    between: str = ""
    lead: str = ""
    id_length: int = 0

    @property
    def trigger(self) -> str:
        """The text with which calls begin in free text."""
        return "<|tool_call>"

    def read_calls(self, text: str, schemas: Schemas | None = None) -> list[ToolCall]:  # noqa: ARG002
        """The whole calls in a text."""
        return collect_calls(read_events(self, text))

    def read(self, source: Source, schemas: Schemas) -> Reading:  # noqa: ARG002 - values say what they are
        """Read calls, and text between them."""
        while length := (yield from source.find((self.begin,))):
            name, _, stop = yield from source.read_name(length, ("{",))
            if not stop:
                source.say(1)
                continue
            source.take(stop)
            source.emit(Begun(name))
            is_whole = yield from self._read_arguments(source)
            if is_whole:
                source.take((yield from source.match((self.end,))))
            source.emit(Ended(is_whole))

    def _read_arguments(self, source: Source) -> Any:
        count = 0
        while True:
            yield from source.skip_space()
            closing = yield from source.match(("}",))
            if closing:
                source.take(closing)
                source.emit(Added("}" if count else "{}"))
                return True
            key, _, stop = yield from source.read_name(0, (":",))
            if not stop:
                return False
            source.take(stop)
            source.emit(Added(f"{', ' if count else '{'}{json.dumps(key)}: "))
            count += 1
            if not (yield from self._read_value(source)):
                return False
            source.take((yield from source.match((",",))))

    def _read_value(self, source: Source) -> Any:
        opening = yield from source.match((_QUOTE,))
        if opening:
            source.take(opening)
            source.emit(Added('"'))
            is_whole = yield from source.read_until((_QUOTE,), lambda text: source.emit(Added(_escape(text))))
            source.emit(Added('"'))
            return is_whole
        value = yield from _read_gemma(source)
        if value is None:
            return False
        source.emit(Added(_write_gemma(value)))
        return True

    def write_call(
        self, place: int, name: str, schema: Any, specials: Container[str], cut: str = ""
    ) -> tuple[str, list[str]]:
        """A call as an expression of a Lark grammar."""
        quote, rules = spell(_QUOTE, specials), list[str]()
        required, optional = list[str](), list[str]()
        for number, (key, held, is_required) in enumerate(list_properties(schema)):
            texts = _list_texts(held)
            if texts is not None:
                body = f"{quote} ({' | '.join(spell(text, ()) for text in texts)}) {quote}"
            elif _is_text(held):
                rule = f"value_{place}_{number}"
                rules.append(f"{rule}{'' if _is_special(quote) else '[lazy]'}: /(.|\\n)*/ {quote}")
                body = f"{quote} {rule}"
            else:
                body = embed_schema(held)
            (required if is_required else optional).append(f"{json.dumps(f'{key}:')} {body}")
        body = ' "," '.join(required)
        for number, one in enumerate(optional):
            body += f' ("," {one})?' if required else f" ({one})?" if not number else ""
        before = spell(f"{self.begin}{name}".removeprefix(cut), specials)
        return f'{before} "{{" {body} "}}" {spell(self.end, specials)}', rules


def _read_gemma(source: Source) -> Any:
    """Read a value that is no text, up to the comma or brace behind it; None if none comes."""
    at, depth = 0, 0
    while True:
        while at < len(source.text):
            rest = source.text[at : at + len(_QUOTE)]
            if _QUOTE.startswith(rest) and (len(rest) == len(_QUOTE) or not source.is_over):
                close = source.text.find(_QUOTE, at + len(_QUOTE))
                if len(rest) < len(_QUOTE) or close < 0:
                    break
                at = close + len(_QUOTE)
                continue
            character = source.text[at]
            if not depth and character in ",}":
                return source.take(at)
            depth += (character in "[{") - (character in "]}")
            at += 1
        if source.is_over or len(source.text) > _LONGEST_VALUE:
            return None
        yield


def _write_gemma(text: str) -> str:
    """A list, an object, a number or a word as JSON."""
    texts: list[str] = []

    def keep(found: re.Match[str]) -> str:
        texts.append(json.dumps(found[1], ensure_ascii=False))
        return f'"{len(texts) - 1}"'

    plain = re.sub(r"([{,]\s*)([\w.-]+)\s*:", r'\1"\2":', _QUOTED.sub(keep, text))
    places = re.compile(r'"(\d+)"(?!\s*:)')
    return write_value(places.sub(lambda found: texts[int(found[1])], plain))

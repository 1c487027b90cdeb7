"""From a setting (a schema, a regular expression, a grammar, choices, tags) to a grammar's source, within bounds."""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from unspool.config.shapes import is_shape, make_schema
from unspool.errors import MissingExtraError, SettingError, excerpt
from unspool.grammar.schemas import check_schema
from unspool.wording import about

MOST_CHARACTERS: Final = 65_536
MOST_CHOICES: Final = 4_096
MOST_TAGS: Final = 256
OWN_HEADER: Final = "// begins right behind a thought"
"""A line of a grammar whose texts have all that a model writes between a thought and what follows it."""

# Between the parts of a JSON document: nothing, a space, or a new line and its indentation. Unbounded white space is
# what small models like best.
_WHITE_SPACE: Final = r"(?: |\n[ \t]{0,32})?"


@dataclass(frozen=True)
class GrammarSource:
    """A grammar as the grammar library reads it."""

    setting: str
    text: str
    schema: str = ""  # the JSON schema that it was made from
    choices: tuple[str, ...] = ()  # the texts that it was made from
    is_simple: bool = False  # so small and plain that compiling it can't take long

    @property
    def is_free(self) -> bool:
        """Whether what it describes may stand in any text."""
        return self.setting == "structural_tag"

    @property
    def is_json(self) -> bool:
        """Whether what it describes is a JSON document."""
        return self.setting in ("json_schema", "json_object")


def require_library() -> Any:
    """The package that compiles grammars, or the error that says what to install."""
    try:
        import llguidance
        import llguidance.numpy
    except ImportError as error:
        raise MissingExtraError("llguidance", "grammar", "structured output") from error
    return llguidance


def read_source(setting: str, value: Any, specials: Container[str] = ()) -> GrammarSource | None:
    """The source of what a setting asks for; None if it asks for nothing. `specials` are the special tokens."""
    if value is None or (setting == "json_object" and value is False):
        return None
    require_library()
    return _read_tags(value, specials) if setting == "structural_tag" else _READERS[setting](value)


def _read_schema(value: Any) -> GrammarSource:
    return _make_schema_source("json_schema", _write_schema(value))


def _write_schema(value: Any) -> str:
    """A schema (a dict, its JSON text or a Python type) as JSON text."""
    if is_shape(value):
        value = make_schema(value)
    if isinstance(value, str):
        _check_size("json_schema", value)
        try:
            value = json.loads(value, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise SettingError(about("json_schema", f"is no JSON text: {error}; got {excerpt(value)}")) from error
    if not isinstance(value, (Mapping, bool)):
        raise SettingError(
            about("json_schema", f"must be a schema (a dict), its JSON text or a type, not {excerpt(value)}")
        )
    try:
        text = json.dumps(value, allow_nan=False, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise SettingError(about("json_schema", f"holds what JSON has no form for: {error}")) from error
    _check_size("json_schema", text)
    return text


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


@lru_cache(maxsize=128)
def _make_schema_source(setting: str, text: str) -> GrammarSource:
    schema = json.loads(text)
    is_simple = check_schema(schema)
    if schema is False:
        raise SettingError(about("json_schema", "is false: no document keeps it"))
    schema = {} if schema is True else schema
    defaults = {"whitespace_pattern": _WHITE_SPACE}
    grammar: str = require_library().LLMatcher.grammar_from_json_schema(schema, defaults=defaults)
    return GrammarSource(setting, grammar, text, is_simple=is_simple)


def _read_object(_: Any) -> GrammarSource:
    return _make_schema_source("json_object", '{"type": "object"}')


def _read_regex(value: Any) -> GrammarSource:
    _check_text("regex", value)
    is_simple = len(value) <= 256 and not re.search(r"\{\d{3,}|[*+}]\)?[*+{]", value)
    return GrammarSource("regex", require_library().LLMatcher.grammar_from_regex(value), is_simple=is_simple)


def check_choices(value: Any) -> list[str]:
    """The texts of a choice."""
    if not isinstance(value, (list, tuple)) or not all(isinstance(one, str) and one for one in value):
        raise SettingError(about("choice", f"must be a list of texts that are not empty, but is {excerpt(value)}"))
    if not 1 <= len(value) <= MOST_CHOICES:
        raise SettingError(about("choice", f"has {len(value)} texts; give 1 to {MOST_CHOICES}"))
    _check_size("choice", "".join(value))
    return list(value)


def _read_choice(value: Any) -> GrammarSource:
    value = check_choices(value)
    pattern = "|".join(re.escape(one) for one in sorted(set(value), key=len, reverse=True))
    grammar = require_library().LLMatcher.grammar_from_regex(pattern)
    return GrammarSource("choice", grammar, choices=tuple(value), is_simple=len(pattern) <= 4_096)


def _read_grammar(value: Any) -> GrammarSource:
    _check_text("grammar", value)
    library = require_library()
    try:
        return GrammarSource("grammar", library.grammar_from("gbnf" if "::=" in value else "lark", value))
    except (ValueError, RecursionError) as error:
        raise SettingError(about("grammar", f"can't be read: {error}")) from error


def _read_tags(value: Any, specials: Container[str]) -> GrammarSource:
    """Free text in which a trigger begins a structure: {"structures": [{begin, schema, end}], "triggers": […]}.

    With `"stop_after_first": true` the text ends behind its first structure.
    """
    wanted = '{"triggers": [text, …], "structures": [{"begin": text, "schema": {…}, "end": text}, …]}'
    if not isinstance(value, Mapping):
        raise SettingError(about("structural_tag", f"must be {wanted}, but is {excerpt(value)}"))
    triggers: Any = value.get("triggers")
    structures: Any = value.get("structures")
    stops: Any = value.get("stop_after_first", False)
    is_sound = isinstance(triggers, (list, tuple)) and isinstance(structures, (list, tuple)) and structures
    if not is_sound or set(value) - {"type", "triggers", "structures", "stop_after_first"}:
        raise SettingError(about("structural_tag", f"must be {wanted}, but is {excerpt(value)}"))
    if not isinstance(stops, bool):
        raise SettingError(about("structural_tag", f": stop_after_first is true or false, not {excerpt(stops)}"))
    if max(len(triggers), len(structures)) > MOST_TAGS:
        raise SettingError(about("structural_tag", f"has {len(structures)} structures; at most {MOST_TAGS} are taken"))
    rules = []
    for place, one in enumerate(structures):
        if not isinstance(one, Mapping) or not all(isinstance(one.get(name), str) for name in ("begin", "end")):
            raise SettingError(
                about("structural_tag", f": structure {place} must be {{begin, schema, end}}: {excerpt(one)}")
            )
        begin = one["begin"]
        trigger = next((each for each in triggers if isinstance(each, str) and each and begin.startswith(each)), "")
        if not trigger:
            raise SettingError(about("structural_tag", f": no trigger begins {excerpt(begin)}"))
        body = embed_schema(one.get("schema", {}))
        rest = f"{spell(begin[len(trigger) :], specials)} {body} {spell(one['end'], specials)}"
        if trigger in specials:
            rules.append(f"tag_{place}: TEXT {trigger} {rest}")
        else:
            rules += [f"open_{place}[lazy]: TEXT {spell(trigger, ())}", f"tag_{place}: open_{place} {rest}"]
    names = " | ".join(f"tag_{place}" for place in range(len(structures)))
    whole = f"TEXT | {names}" if stops else f"({names})* TEXT"
    text = "\n".join(["%llguidance {}", f"start: {whole}", r"TEXT: /(.|\n)*/", *rules])
    _check_size("structural_tag", text)
    return GrammarSource("structural_tag", require_library().LLMatcher.grammar_from_lark(text))


def embed_schema(schema: Any) -> str:
    """A JSON schema as a part of a Lark grammar."""
    checked = json.loads(_write_schema(schema))
    check_schema(checked)
    if checked is False:
        raise SettingError(about("json_schema", "is false: no document keeps it"))
    whole = {"x-guidance": {"whitespace_pattern": _WHITE_SPACE}, **(checked if isinstance(checked, dict) else {})}
    return f"%json {json.dumps(whole, ensure_ascii=False)}"


def spell(text: str, specials: Container[str]) -> str:
    """A fixed text as a part of a Lark grammar: special tokens by name, or by their ids, the rest as a literal."""
    if not text:
        return ""
    parts = re.split(r"(<[^<>\s]{1,64}>|\[[A-Z_/]{1,64}\])", text) if specials else [text]
    literal = [_name_special(part, specials) or json.dumps(part, ensure_ascii=False) for part in parts if part]
    return " ".join(literal)


def _name_special(text: str, specials: Container[str]) -> str:
    """A special token as a grammar names it; empty for other texts."""
    if text not in specials:
        return ""
    return text if text.startswith("<") else f"<[{specials[text]}]>" if isinstance(specials, Mapping) else ""


def _check_text(setting: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise SettingError(about(setting, f"must be a text that is not empty, but is {excerpt(value)}"))
    _check_size(setting, value)


def _check_size(setting: str, text: str) -> None:
    if len(text) > MOST_CHARACTERS:
        raise SettingError(about(setting, f"has {len(text)} characters; at most {MOST_CHARACTERS} are taken"))


_READERS: Final = {
    "json_schema": _read_schema,
    "json_object": _read_object,
    "regex": _read_regex,
    "choice": _read_choice,
    "grammar": _read_grammar,
}

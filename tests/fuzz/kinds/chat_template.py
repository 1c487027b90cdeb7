"""Chat templates of pieces whose types fit, rendered as jinja2 does, and of hostile ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from tests.fuzz.findings import Difference
from tests.fuzz.mutate import mutate_string
from unspool.errors import UnspoolError
from unspool.text.chat import render_chat

NAME = "chat_template"
SHARE = 2.0
SHORT = 40

_METHODS = (
    *("upper", "split", "strip", "join", "format", "replace", "zfill", "center", "rfind", "rsplit", "encode", "items"),
    *("get", "keys", "append", "splitlines", "title", "count", "translate", "expandtabs", "partition", "__class__"),
)
_FILTERS = (
    *("upper", "join", "tojson", "list", "sort", "unique", "replace", "indent", "map", "select", "groupby", "batch"),
    *("length", "format", "sum", "string", "trim", "reverse", "first", "round", "int", "dictsort", "title", "escape"),
    *("selectattr", "default", "truncate", "wordcount", "urlencode", "min", "max", "items", "slice", "float", "abs"),
)
_TESTS = (
    "defined",
    "string",
    "mapping",
    "iterable",
    "none",
    "number",
    "eq(1)",
    "in([1])",
    "divisibleby(3)",
    "sameas(1)",
)
_WORDS = (
    *("messages", "messages[0]", "messages[0].content", "bos_token", "x", "s", "ns", "ns.a", "loop", "loop.index"),
    *("'a'", "'%s%9999d'", "'{0:99}{1}'", "'é\\n'", "''", "0", "1", "-1", "3", "400", "8000000", "2.5", "none", "true"),
    *("range(9)", "range(99999)", "[]", "{}", "namespace(a=1)", "self", "caller", "m", "dict", "cycler(1,2)"),
)
_OPERATORS = ("+", "-", "*", "/", "//", "%", "**", "~", "==", "<", "in", "and", "or", "is not")
_BLOCKS = (
    "{{% for x in {0} %}}{{{{ {1} }}}}{{% endfor %}}",
    "{{% for x in {0} if {1} %}}{{% break %}}{{% endfor %}}",
    "{{% for x in {0} recursive %}}{{{{ loop({1}) }}}}{{% endfor %}}",
    "{{% if {0} %}}{{{{ {1} }}}}{{% endif %}}",
    "{{% set s = {0} %}}{{{{ {1} }}}}",
    "{{% set ns = namespace(a={0}) %}}{{% for i in range(9) %}}{{% set ns.a = {1} %}}{{% endfor %}}{{{{ ns.a }}}}",
    "{{% macro m(x) %}}{{{{ {0} }}}}{{% endmacro %}}{{{{ m({1}) }}}}",
    "{{% set s %}}{{{{ {0} }}}}{{% endset %}}{{{{ {1} }}}}",
    "{{% filter upper %}}{{{{ {0} }}}}{{% endfilter %}}{{{{ {1} }}}}",
    "{{% generation %}}{{{{ {0} }}}}{{% endgeneration %}}{{{{ {1} }}}}",
    "{{{{ {0} }}}}{{{{ {1} }}}}",
    "{{{{ raise_exception({0}) }}}}{{{{ strftime_now({1}) }}}}",
)


# Expressions of known types, which mostly succeed: T a text, N a number, L a list, B a truth value, D a dict.
_TYPED = {
    "T": (
        *("'a b'", "'é<x>'", "messages[0].content", "messages[0]['role']", "bos_token", "'<think>x</think>y'", "''"),
        *("({T} + {T})", "({T} ~ {N})", "{T}.split('</think>')[-1]", "{T} | trim", "{T}.strip('\\n')", "{T} | upper"),
        *("{T}.replace({T}, {T})", "({T})[2:]", "{L} | join({T})", "{D} | tojson", "{L} | tojson(indent=2)"),
        *("({T} if {B} else {T})", "{T}.title()", "{N} | string", "({T} * 3)", "'%s-%s' % ({T}, {N})", "{L} | string"),
        *("'{{}}:{{:>5}}'.format({T}, {N})", "{T} | replace({T}, '_')", "{T} | indent(2)", "({T})[:-1]"),
        *("{T}.lstrip()", "{T} | capitalize", "{T}.partition('b')[0]", "{T} | truncate(9)", "{T} | escape"),
        *("{T}.removeprefix({T})", "{T} | reverse", "{L} | first | string", "{T}.zfill(9)", "{T} | urlencode"),
    ),
    "N": (
        *("0", "1", "3", "7", "2.5", "-1", "messages | length", "{T} | length", "({N} + {N})", "({N} * {N})"),
        *("({N} - {N})", "{T}.count('a')", "{T}.find({T})", "{L} | length", "[1, 2, {N}] | max", "{T} | wordcount"),
        *("'12' | int", "{N} | abs", "{N} | round(2)", "[{N}, {N}] | sum", "({N} // 2)", "({N} % 5)", "(2 ** 9)"),
    ),
    "L": (
        *("[]", "messages", "[{T}, {T}]", "[{N}, {N}]", "range(5) | list", "{T}.split(' ')", "messages[::-1]"),
        *("({L} + {L})", "messages | map(attribute='role') | list", "{D}.keys() | list", "({L})[1:]", "{T} | list"),
        *("messages | selectattr('role', 'equalto', 'user') | list", "[{T}, {T}] | sort", "[{T}, {T}] | unique | list"),
        *("{D}.items() | list", "{T}.splitlines()", "[{L}, {L}]", "{D} | dictsort", "({L} * 2)"),
        *("{L} | reverse | list", "{L} | batch(2) | list"),
    ),
    "B": (
        *("true", "false", "{T} in {T}", "{T} == {T}", "{N} < {N}", "{T} is string", "x is defined", "not {B}"),
        *("({B} and {B})", "({B} or {B})", "{T}.startswith({T})", "{L} is iterable", "{D} is mapping", "none is none"),
    ),
    "D": ("{{}}", "{{'a': {N}, 'b': {T}}}", "messages[0]", "dict(a={T})", "{{'l': {L}}}"),
}
_TYPED_BLOCKS = (
    "{{{{ {T} }}}}",
    "{{{{ {N} }}}}{{{{ {L} }}}}",
    "{{%- if {B} %}}{T}{{{{- {T} }}}}{{%- else -%}}{{{{ {D} }}}}{{% endif %}}",
    "{{% for x in {L} %}}{{{{ loop.index ~ ': ' ~ x }}}}{{% if {B} %}}{{% break %}}{{% endif %}}{{% endfor %}}",
    "{{% for m in messages if {B} %}}{{{{ m.role + {T} }}}}{{% endfor %}}",
    "{{% set n = namespace(a={T}) %}}{{% for i in range(4) %}}{{% set n.a = n.a + {T} %}}{{% endfor %}}{{{{ n.a }}}}",
    "{{% macro m(x, y=1) %}}{{{{ x ~ y }}}}{{% endmacro %}}{{{{ m({T}, {N}) }}}}",
    "{{% set s %}}{{{{ {T} }}}}{{% endset %}}{{{{ s | trim }}}}",
    "{{% set x = {L} %}}{{% for y in x %}}{{{{ y }}}}{{{{ ', ' if not loop.last }}}}{{% endfor %}}",
    "{{% generation %}}{{{{ {T} }}}}{{% endgeneration %}}",
    "{{% for k, v in {D} | items %}}{{{{ k ~ v }}}}{{% endfor %}}",
    "{{% filter upper %}}{{{{ {T} }}}}{{% endfilter %}}",
    "{{% with q = {N} %}}{{{{ q }}}}{{% endwith %}}",
)


def make(rng: Random) -> tuple[str, bool]:
    """A template, and whether all its types fit; the others are made of whatever there is."""
    is_typed = rng.random() < 0.6
    if is_typed:
        blocks = [_fill(rng, rng.choice(_TYPED_BLOCKS), 0) for _ in range(rng.choice((1, 2, 4)))]
    else:
        starts = ("", "{% set s = 'x'*8000000 %}", "{% set s = 'é'*100000 %}", "{% set s = range(9999)|list %}")
        blocks = [rng.choice(starts)]
        for _ in range(rng.choice((1, 1, 2, 3))):
            blocks.append(rng.choice(_BLOCKS).format(_expression(rng, 0), _expression(rng, 0)))
    template = "".join(blocks)
    return (mutate_string(rng, template), False) if rng.random() < 0.1 else (template, is_typed)


def _fill(rng: Random, text: str, depth: int) -> str:
    """A text with an expression of its type for every `{T}`, `{N}`, … in it."""
    pieces = re.split(r"\{([TNLBD])\}", text)
    for index in range(1, len(pieces), 2):
        choices = _TYPED[pieces[index]]
        chosen = rng.choice(choices if depth < 3 else [one for one in choices if not re.search(r"\{[TNLBD]\}", one)])
        inner = _fill(rng, chosen, depth + 1) if depth < 3 else chosen.replace("{{", "{").replace("}}", "}")
        pieces[index] = f"({inner})"
    pieces[::2] = [piece.replace("{{", "{").replace("}}", "}") for piece in pieces[::2]]
    return "".join(pieces)


def _expression(rng: Random, depth: int) -> str:
    roll = rng.randrange(9) if depth < 4 else 0
    if roll < 2:
        return rng.choice(_WORDS)
    inner = _expression(rng, depth + 1)
    other = _expression(rng, depth + 1)
    return (
        f"({inner} {rng.choice(_OPERATORS)} {other})",
        f"({inner}).{rng.choice(_METHODS)}({rng.choice(('', other))})",
        f"({inner})|{rng.choice(_FILTERS)}{rng.choice(('', f'({other})'))}",
        f"({inner})|map(attribute='zz', default={other})|list",
        f"({inner})[{rng.choice(('1:', '::-1', other))}]",
        f"({inner} is {rng.choice(_TESTS)})",
        f"[{inner}, {other}]",
    )[roll - 2]


def run(given: tuple[str, bool], folder: Path) -> None:
    """Render it; where its types fit, as jinja2 itself does."""
    template, is_typed = given
    messages = [
        {"role": "user", "content": "Hi <there>"},
        {"role": "assistant", "content": [{"type": "text", "text": "é"}]},
    ]
    try:
        text = render_chat(template, messages, add_generation_prompt=True, special_tokens={"bos_token": "<s>"})
    except UnspoolError as error:
        if is_typed and (expected := _render_plainly(template, messages)) is not None:
            raise Difference(f"{error} where jinja2 writes {expected[:200]!r}") from error
        raise
    # An escaped text is a plain one here; jinja2's escapes what is added to it.
    if is_typed and "escape" not in template and (expected := _render_plainly(template, messages)) != text:
        raise Difference(f"{text[:200]!r} where jinja2 writes {expected and expected[:200]!r}")


def _render_plainly(template: str, messages: list[dict[str, Any]]) -> str | None:
    """What jinja2's sandbox writes, set up as transformers has it; None if it fails."""
    # Constants are not folded here either.
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols], optimized=False
    )
    environment.filters["tojson"] = lambda value, **how: json.dumps(value, ensure_ascii=False, **how)
    plain = re.sub("{% (end)?generation %}", "", template)
    try:
        return environment.from_string(plain).render(messages=messages, bos_token="<s>", add_generation_prompt=True)
    except Exception:  # a template can fail in every way that Python can
        return None

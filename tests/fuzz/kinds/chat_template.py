"""Chat templates put together from hostile pieces and rendered."""

from __future__ import annotations

from pathlib import Path
from random import Random

from tests.fuzz.mutate import mutate_string
from unspool.text.chat import render_chat

NAME = "chat_template"
SHARE = 2.0
SHORT = 40

_METHODS = (
    *("upper", "split", "strip", "join", "format", "replace", "zfill", "center", "rfind", "rsplit", "encode", "items"),
    *("get", "keys", "append", "splitlines", "title", "count", "translate", "expandtabs", "partition", "__class__"),
)  # fmt: skip
_FILTERS = (
    *("upper", "join", "tojson", "list", "sort", "unique", "replace", "indent", "map", "select", "groupby", "batch"),
    *("length", "format", "sum", "string", "trim", "reverse", "first", "round", "int", "dictsort", "title", "escape"),
    *("selectattr", "default", "truncate", "wordcount", "urlencode", "min", "max", "items", "slice", "float", "abs"),
)  # fmt: skip
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
)  # fmt: skip
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


def make(rng: Random) -> str:
    start = rng.choice(("", "{% set s = 'x'*8000000 %}", "{% set s = 'é'*100000 %}", "{% set s = range(9999)|list %}"))
    blocks = [
        rng.choice(_BLOCKS).format(_expression(rng, 0), _expression(rng, 0)) for _ in range(rng.choice((1, 1, 2, 3)))
    ]
    template = start + "".join(blocks)
    return mutate_string(rng, template) if rng.random() < 0.15 else template


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


def run(given: str, folder: Path) -> None:
    messages = [
        {"role": "user", "content": "Hi <there>"},
        {"role": "assistant", "content": [{"type": "text", "text": "é"}]},
    ]
    render_chat(given, messages, add_generation_prompt=True, special_tokens={"bos_token": "<s>"})

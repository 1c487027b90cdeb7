"""Chat templates: the text that transformers renders, and no way out for hostile ones."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import unspool
from unspool.errors import InputError, SettingError
from unspool.text.chat import render_chat

USER = [{"role": "user", "content": "Hi"}]
CHAT = [
    {"role": "system", "content": "Be <brief> & kind."},
    {"role": "user", "content": "What's 1+1? 日本"},
    {"role": "assistant", "content": "<think>hm</think>2"},
    {"role": "user", "content": [{"type": "text", "text": "Why?"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1, 2.5]}}}]},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"é": {}}}}}]

# Every construction that real templates use, in small.
TEMPLATES = {
    "chatml": (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + (m['content'] or '') | string + '<|im_end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
    ),
    "blocks": (
        "{%- if tools %}\n  {{- 'Tools: ' }}\n  {%- for t in tools %}\n    {{- t | tojson }}\n  {%- endfor %}\n"
        "{% endif %}\n"
        "{%- set ns = namespace(last=0, text='') %}\n{%- for m in messages[::-1] %}\n"
        "  {%- set i = messages|length - 1 - loop.index0 %}\n"
        "  {%- if m.role == 'user' and m.content is string %}{% set ns.last = i %}{% break %}{% endif %}\n"
        "{%- endfor %}\n"
        "last={{ ns.last }} {{ bos_token }}{{ tools | tojson(indent=2) }}"
    ),
    "macros": (
        "{%- macro show(x, depth=0) -%}{%- if x is mapping -%}{{ '{' }}{% for k, v in x | dictsort %}{{ k ~ ':' }}"
        "{{ show(v, depth + 1) }}{{ ', ' if not loop.last }}{% endfor %}{{ '}' }}"
        "{%- elif x is iterable and x is not string -%}[{% for v in x %}{{ show(v, depth + 1) }};{% endfor %}]"
        "{%- else -%}{{ x }}{%- endif -%}{%- endmacro -%}"
        "{{ show(messages) }}"
    ),
    "strings": (
        "{% for m in messages %}{% set c = m.content if m.content is string else '' %}"
        "{{ c.split('</think>')[-1].lstrip('\\n') | trim | upper }}|{{ c.replace('1', 'one') }}|{{ c[:3] }}|"
        "{{ '%s-%05d' % (m.role, 7) }}|{{ '{}:{:>5}'.format(m.role, 3) }}|{{ c.startswith('W') }}|{{ 'x' * 3 }}|"
        "{{ [m.role, 'b'] | join(', ') }}|{{ c | replace('&', 'and') | indent(2) }}|{{ loop.index0 % 2 == 0 }}\n"
        "{% endfor %}"
    ),
    "filters": (
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='role') | list }}"
        "{{ messages | map(attribute='role') | unique | join('+') }}{{ (messages | first).role }}{{ [3, 1, 2] | sort }}"
        "{{ {'a': 1}.items() | list }}{{ none is none }}{{ x | default('d') }}{{ 7 // 2 }}{{ 2 ** 10 }}{{ -7 % 3 }}"
        "{{ [1, 2] + [3] }}{{ (1, 2) }}{{ range(3) | list }}{{ 3.7 | int }}{{ 'a' in 'abc' }}{{ dict(a=1) }}"
        "{{ messages | rejectattr('role', 'in', ['user']) | list | length }}{{ [1, 2, 3] | sum }}{{ '5' | int + 1 }}"
    ),
    "tags": (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% continue %}{% endif %}{% set s %}<{{ m.role }}>{% endset %}{{ s }}{% else %}none{% endfor %}"
        "{% call(x) twice() %}[{{ x }}]{% endcall %}"
    ).replace("{% call", "{% macro twice() %}{{ caller(1) }}{{ caller(2) }}{% endmacro %}{% call"),
    "llama 3": (
        "{{- bos_token }}\n{%- if not date_string is defined %}{%- set date_string = '26 Jul 2024' %}{%- endif %}\n"
        "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content']|trim %}"
        "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}\n"
        "{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}"
        "{{- 'Today: ' + date_string + system }}{{- '<|eot_id|>' }}"
        "{%- for message in messages %}{%- if not ('tool_calls' in message) %}"
        "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | string }}"
        "{%- elif message.tool_calls|length != 1 %}{{- raise_exception('one call at a time') }}"
        "{%- else %}{%- set call = message.tool_calls[0].function %}"
        "{{- '{\"name\": \"' + call.name + '\", \"parameters\": ' }}{{- call.arguments | tojson }}{{- '}' }}"
        "{%- endif %}{%- endfor %}{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant' }}{%- endif %}"
    ),
    "gemma": (
        "{{ bos_token }}{% for message in messages %}{% if loop.first and message['role'] == 'system' %}"
        "{% set prefix = message['content'] + '\\n\\n' %}{% continue %}{% endif %}"
        "{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}"
        "{% endif %}{{ '<start_of_turn>' + role + '\\n' }}{% if message['content'] is string %}"
        "{{ message['content'] | trim }}{% elif message['content'] is iterable %}{% for item in message['content'] %}"
        "{% if item['type'] == 'text' %}{{ item['text'] | trim }}{% endif %}{% endfor %}{% endif %}"
        "{{ '<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}{% endif %}"
    ),
    "recursive": (
        "{% for t in [{'v': 1, 'c': [{'v': 2, 'c': []}]}] recursive %}{{ t.v }}({{ loop(t.c) }}){% endfor %}"
        "{% filter upper %}abc{% endfilter %}{% with a = 3 %}{{ a }}{% endwith %}"
    ),
}


def render(template: str, messages: Any = USER, **kwargs: Any) -> str:
    kwargs.setdefault("add_generation_prompt", False)
    kwargs.setdefault("special_tokens", {})
    return render_chat(template, messages, **kwargs)


@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers(name: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    template = TEMPLATES[name]
    tools = TOOLS if "tools" in template else None
    (expected,), _ = render_jinja_template(
        [CHAT], tools=tools, chat_template=template, add_generation_prompt=True, bos_token="<s>"
    )
    assert (
        render(template, CHAT, tools=tools, add_generation_prompt=True, special_tokens={"bos_token": "<s>"}) == expected
    )
    assert len(expected) >= 10


def test_variables_and_dates() -> None:
    assert render("{{ mode }}/{{ date }}", mode="fast", date="x") == "fast/x"
    assert render("{{ strftime_now('%Y') }}") == str(time.localtime().tm_year)
    assert render("{{ documents[0].title }}", documents=[{"title": "T"}]) == "T"
    with pytest.raises(SettingError, match=r"does not read enable_thinking.*mode"):
        render("{{ mode }}", mode=1, enable_thinking=True)
    with pytest.raises(SettingError, match="does not read tools"):
        render("{{ messages }}", tools=TOOLS)


def test_the_templates_own_message_reaches_the_user() -> None:
    with pytest.raises(InputError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(InputError, match=r"line 2"):
        render("a\n{% if %}")
    with pytest.raises(InputError, match="'dict object' has no attribute 'nope'"):
        render("{{ messages[0].nope.more }}")
    with pytest.raises(InputError, match="ZeroDivisionError"):
        render("{{ 1 / 0 }}")
    with pytest.raises(InputError, match="No filter named 'xmlattr'"):
        render("{{ messages | xmlattr }}")


def test_parts_that_a_template_does_not_take_are_named() -> None:
    parts = [{"type": "image", "url": "a.png"}, {"type": "text", "text": "hi"}]
    with pytest.raises(InputError, match=r"Messages have parts \(image, text\).*one text"):
        render_chat(
            "{% for m in messages %}{{ '<' + m['content'] }}{% endfor %}",
            [{"role": "user", "content": parts}],
            add_generation_prompt=False,
            special_tokens={},
        )


def test_what_the_caller_gave_is_left_alone() -> None:
    messages = [{"role": "user", "content": "Hi", "parts": [1]}]
    with pytest.raises(InputError):
        render("{% set _ = messages[0].parts.append(2) %}", messages)
    assert messages == [{"role": "user", "content": "Hi", "parts": [1]}]


def doubled(value: str, more: str, show: str = "length") -> str:
    """Sixty times over, a value made of the one before."""
    loop = "{% for i in range(60) %}{% set ns.x = MORE %}{% endfor %}".replace("MORE", more)
    return (
        "{% set ns = namespace(x=VALUE) %}".replace("VALUE", value) + loop + "{{ ns.x | SHOW }}".replace("SHOW", show)
    )


FLOOD = "{% for i in range(90000) %}" + "x" * 9000 + "{% endfor %}"
HOSTILE = {
    # ways out
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class by item": "{{ ''['__class__'] }}{{ (''['__class__']).mro() }}",
    "class by attr": "{{ '' | attr('__class__') }}",
    "class by format": "{{ '{0.__class__.__mro__}'.format(messages) | length }}{{ '{0.__class__}'.format('').x }}",
    "class by map": "{{ ([''] | map(attribute='__class__') | first).mro }}",
    "globals": "{{ raise_exception.__globals__['os'] }}",
    "init": "{{ namespace.__init__.__globals__ }}",
    "cycler": "{{ cycler.__init__.__globals__.os.system('true') }}",
    "self": "{{ self.__init__.__globals__ }}",
    "private name": "{% set ns = namespace(__class__=1) %}",
    "private name set": "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "include": "{% include '/etc/passwd' %}",
    "import": "{% import 'os' as os %}",
    "generator": "{{ (messages | map('upper')).gi_frame.f_globals }}",
    "lipsum": "{{ lipsum(1000000) }}",
    # loops
    "nested loops": "{% for a in range(100000) %}{% for b in range(100000) %}{% endfor %}{% endfor %}",
    "deep loops": "".join(f"{{% for v{i} in range(99) %}}" for i in range(9)) + "x" + "{% endfor %}" * 9,
    "filtered loops": "{% for a in range(100000) %}{% for b in range(100000) if false %}x{% endfor %}{% endfor %}",
    "lazy loops": "{% for a in range(9999) %}{{ range(99999) | map('abs') | select('none') | list }}{% endfor %}",
    "string loop": "{% for a in 'abc' * 1000000 %}{% for b in 'abc' * 1000000 %}{% endfor %}{% endfor %}",
    "recursive loop": "{% for a in [[]] recursive %}{{ loop([a, a]) }}{% endfor %}",
    "long range": "{{ range(10000000) | list | length }}",
    "wide body": "{% for a in range(99999) %}" + "{% if a %}b{% endif %}" * 5000 + "{% endfor %}",
    # numbers
    "power": "{{ 10 ** (10 ** 8) }}",
    "powers": doubled("3", "ns.x * ns.x"),
    "product": "{{ 'a' * 10000000000 }}",
    "product of products": "{{ 'a' * 100000 * 100000 }}",
    "list product": "{{ ([1] * 100000 * 100000) | length }}",
    "product reversed": "{{ 10000000000 * 'a' }}",
    "bytes": "{{ (5).to_bytes(10000000000, 'big') }}",
    "rounding": "{{ 1.5 | round(100000000, 'ceil') }}",
    # growth
    "doubled by +": doubled("'aaaaaaaa'", "ns.x + ns.x"),
    "doubled by ~": doubled("'aaaaaaaa'", "ns.x ~ ns.x"),
    "doubled by join": doubled("'aaaaaaaa'", "[ns.x, ns.x] | join"),
    "doubled by str.join": doubled("'aaaaaaaa'", "ns.x.join(['a', 'a', 'a'])"),
    "doubled by %": doubled("'aaaaaaaa'", "'%s%s' % (ns.x, ns.x)"),
    "doubled by format": doubled("'aaaaaaaa'", "'{0}{0}'.format(ns.x)"),
    "doubled by format filter": doubled("'aaaaaaaa'", "'%s%s' | format(ns.x, ns.x)"),
    "doubled by replace": doubled("'aaaaaaaa'", "ns.x.replace('a', 'aa')"),
    "doubled by replace filter": doubled("'aaaaaaaa'", "ns.x | replace('a', 'aa')"),
    "squared by replace": doubled("'aaaaaaaa'", "ns.x.replace('a', ns.x)"),
    "doubled lists": doubled("[1]", "ns.x + ns.x"),
    "nested lists": doubled("[1]", "[ns.x, ns.x]", "string"),
    "nested dicts": doubled("{}", "{'a': ns.x, 'b': ns.x}", "tojson"),
    "nested tuples": doubled("()", "(ns.x, ns.x)", "string"),
    "nested calls": doubled("{}", "dict(a=ns.x, b=ns.x)", "string"),
    "nested namespaces": doubled("1", "namespace(a=ns.x, b=ns.x)", "string"),
    "nested by attribute": (
        "{% set ns = namespace(p=1) %}{% for i in range(60) %}{% set n = namespace() %}{% set n.a = ns.p %}"
        "{% set n.b = ns.p %}{% set ns.p = n %}{% endfor %}{{ ns.p }}"
    ),
    "doubled by blocks": (
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(60) %}{% set y %}{{ ns.x }}{{ ns.x }}{% endset %}"
        "{% set ns.x = y %}{% endfor %}{{ ns.x | length }}"
    ),
    "doubled by macros": (
        "{% macro m(x) %}{{ x }}{{ x }}{% endmacro %}{% set ns = namespace(x='aaaaaaaa') %}"
        "{% for i in range(60) %}{% set ns.x = m(ns.x) %}{% endfor %}{{ ns.x | length }}"
    ),
    "data in a macro": "{% macro m() %}" + FLOOD + "{% endmacro %}{{ m() | length }}",
    "data": FLOOD,
    "sum of lists": "{{ [[1], [2]] | sum(start=[]) }}",
    # widths
    "center": "{{ 'a'.center(10000000000) }}",
    "ljust": "{{ 'a'.ljust(10000000000) }}",
    "zfill": "{{ 'a'.zfill(10000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(10000000000) }}",
    "translate": "{{ 'a'.translate({97: 'b' * 1000000}) }}",
    "printf": "{{ '%10000000000d' % 1 }}",
    "printf star": "{{ '%*d' % (10000000000, 1) }}",
    "printf filter": "{{ '%10000000000d' | format(1) }}",
    "format": "{{ '{:>10000000000}'.format(1) }}",
    "format nested": "{{ '{:>{w}}'.format(1, w=10000000000) }}",
    "format map": "{{ '{a:>10000000000}'.format_map({'a': 1}) }}",
    "indent": "{{ 'a\nb' | indent(10000000000) }}",
    "json indent": "{{ [1] | tojson(indent=10000000000) }}",
    "strftime": "{{ strftime_now('%Y' * 100000) }}",
    # depth
    "macro recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "macro fan-out": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "deep parentheses": "{{ " + "(" * 50_000 + "1" + ")" * 50_000 + " }}",
    "deep lists": "{{ " + "[" * 50_000 + "]" * 50_000 + " }}",
    "long sums": "{{ 1" + "+1" * 100_000 + " }}",
    "nested ifs": "{% if 1 %}" * 20_000 + "{% endif %}" * 20_000,
    "self namespace": "{% set ns = namespace() %}{% set ns.x = ns %}{% set ns.x = ns %}{{ ns }}",
    "too long": "a" * 1_000_000,
    # what was once made before it was paid for; s is a text as long as there may be
    "many wide printf fields": "{{ ('%(a)9999d'*300000) % {'a':1} }}",
    "many wide fields": "{{ ('{0:9999}'*300000).format(1) }}",
    "many allowed fields": "{{ ('{0:999}'*300000).format(1) }}",
    "one long text formatted often": "{{ ('{0}'*400).format(s) }}",
    "one long text printed often": "{{ ('%(a)s'*400) % {'a': s} }}",
    "long separator": "{{ s.join(range(400)|map('string')) }}",
    "long separator of a filter": "{{ range(400)|join(s) }}",
    "long default": "{{ range(400)|map(attribute='zz',default=s)|join }}",
    "long default kept": "{{ (range(400)|map(attribute='zz',default=s)|list ~ '') | length }}",
    "long indent of JSON": "{{ range(400)|list|tojson(indent=s) }}",
    "long separators of JSON": "{{ range(400)|list|tojson(separators=(s,s)) }}",
    "JSON of escapes": "{{ ('\x01'*8000000)|tojson }}{{ ['\x01'*8000000, 1]|tojson }}",
    "printed escapes": "{{ ['\U000e0001'*8000000]|string }}",
    "replacement by name": "{{ ('a'*8000000)|replace(old='a',new='b'*400) }}",
    "bytes made": "{{ ('é'*4000000).encode('idna') }}",
    "sorted letters": "{{ ('éa'*4000000)|sort }}",
    "unique letters": "{{ ('éa'*4000000)|unique }}",
    "letters": "{{ ('éa'*4000000)|list }}",
    "reversed letters": "{{ ('éa'*4000000)|list|reverse|list }}",
    "search from the right": "{{ ('a'*8000000).rfind('ab' ~ 'a'*4000000) }}",
    "split from the right": "{{ ('a'*8000000).rsplit('ab' ~ 'a'*4000000) }}",
    "stripped": "{{ ('a'*8000000).strip('b'*4000000 ~ 'a') }}",
    "trimmed": "{{ ('a'*8000000)|trim('b'*4000000 ~ 'a') }}",
    "words": "{{ ('é '*4000000).split()|length }}",
    "lines": "{{ ('é\n'*4000000).splitlines()|length }}",
    "equal hashes": "{{ range(0, 2305843009213693951*100000, 2305843009213693951)|unique|list|length }}",
    "equal hashes of keys": "{{ dict(range(0, 2305843009213693951*9000, 2305843009213693951)|batch(2)) }}",
    "equal hashes of tuples": "{{ [(-1,-2),(-2,-1)]|unique|list }}",
    "long attribute": "{{ range(90000)|map(attribute='a.' * 4000000)|list }}",
    "chain of comparisons": "{% set t = s ~ '' %}{{ s " + "== t == s " * 2500 + "}}",
    "slices": "{% for i in range(9999) %}{{ s[1:]|length }}{% endfor %}",
    "kept slices": "{% set ns=namespace(x=[]) %}{% for i in range(9999) %}{% set ns.x = [ns.x, s[i:]] %}{% endfor %}",
    "many empty lists": "{% set ns=namespace(x=[]) %}{% for i in range(99999) %}{% for j in range(99) %}"
    "{% set ns.x = [[], ns.x] %}{% endfor %}{% endfor %}",
    # compiling
    "long concatenation": "{{ 1" + "~1" * 60_000 + " }}",
    "many macros": "".join(f"{{% macro m{i}() %}}{{% endmacro %}}" for i in range(3000)),
    "many ifs": "".join(f"{{% if x %}}{{% set a{i}=1 %}}{{% endif %}}" for i in range(3000)),
    "many outputs": "{{1}}a" * 20_000,
}
LONG = "{% set s = 'x'*8000000 %}"


REASONS = (
    *("stopped because", "is unsafe", "calls itself too deeply", "no loader", "No filter named", "is undefined"),
    *("the longest that is run", "has no attribute", "too many nested", "recursion"),
)

# Every hostile template in one process that may have 500 MB more than it started with.
IN_LITTLE_MEMORY = """
import pathlib, resource, time
import unspool.text.chat.budget
from tests.text.test_chat import HOSTILE, LONG, render
from unspool.errors import UnspoolError
taken = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (500 << 20),) * 2)
unspool.text.chat.budget.MAX_SECONDS = 0.5
for name, template in HOSTILE.items():
    start = time.process_time()
    try:
        render(LONG + template)
    except UnspoolError as error:
        assert "MemoryError" not in str(error), (name, error)
    assert time.process_time() - start < 8, name
print("done")
"""


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_templates_are_stopped(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("unspool.text.chat.budget.MAX_SECONDS", 0.4)
    start = time.process_time()
    with pytest.raises((InputError, SettingError)) as caught:
        render(LONG + HOSTILE[name])
    assert time.process_time() - start < 8, "too slow"
    message = str(caught.value)
    assert any(reason in message for reason in REASONS), message


@pytest.mark.skipif(sys.platform != "linux", reason="memory is limited by Linux's means")
def test_hostile_templates_are_stopped_in_little_memory() -> None:
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", IN_LITTLE_MEMORY], cwd=root, capture_output=True, text=True)
    assert done.stdout == "done\n", done.stderr[-2000:]


# About the most that is compiled, in several shapes. Each takes below a second.
LARGEST = {
    "one long row": "{{ " + "~".join(["1"] * 11_000) + " }}",
    "names": "".join(f"{{{{ n{i} }}}}" for i in range(5_900)),
    "statements": "".join(f"{{% set a{i} = 1 %}}" for i in range(990)),
    "names in branches": "".join(f"{{% if b{i} %}}{{% set a{i} = 2 %}}{{% endif %}}" for i in range(490)),
    "names in loops": (
        "{% for i in x %}" * 18 + "".join(f"{{% set a{i} = 1 %}}" for i in range(950)) + "{% endfor %}" * 18
    ),
    "names in scopes": (
        "{% with a = 1 %}" * 18 + "".join(f"{{{{ b{i} }}}}" for i in range(5_500)) + "{% endwith %}" * 18
    ),
    "macros": "".join(f"{{% macro m{i}(x) %}}{{{{ x }}}}{{% endmacro %}}" for i in range(990)),
    "arguments": "{{ dict(" + ",".join(f"a{i}=1" for i in range(5_500)) + ") | length }}",
    "lines cut": (" " * 120 + "{%- set a = 1 -%}") * 900,
}


@pytest.mark.parametrize("name", LARGEST)
def test_the_largest_templates_compile_in_time(name: str) -> None:
    start = time.thread_time()
    render(LARGEST[name])
    assert time.thread_time() - start < 5


@pytest.mark.parametrize("name", ["one long row", "names", "macros", "arguments"])
def test_larger_templates_are_refused_before_they_are_compiled(name: str) -> None:
    start = time.thread_time()
    with pytest.raises(InputError, match=r"more than|the longest that is run"):
        render(LARGEST[name] * 3)
    assert time.thread_time() - start < 5


def test_a_long_chat_is_not_hostile() -> None:
    messages = [{"role": "user", "content": f"message {i} " * 50} for i in range(2000)]
    text = render(TEMPLATES["chatml"], messages)
    assert len(text) > 1_000_000
    one = [{"role": "user", "content": "x" * 2_000_000}]
    assert len(render(TEMPLATES["strings"], one)) > 4_000_000


def test_threads_do_not_share_a_budget() -> None:
    from concurrent.futures import ThreadPoolExecutor

    template = "{% for i in range(9000) %}{{ i }}{% endfor %}"
    with ThreadPoolExecutor(4) as pool:
        texts = list(pool.map(lambda _: render(template), range(40)))
    assert set(texts) == {"".join(map(str, range(9000)))}


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ("Hi", "list of dicts"),
        ({"role": "user", "content": "Hi"}, "list of dicts"),
        ([], "empty"),
        (["Hi"], "must be a dict"),
        ([USER], "one conversation at a time"),
        ([{"content": "Hi"}], "'role'"),
        ([{"role": 3, "content": "Hi"}], "'role'"),
        ([{"role": "user"}], "no 'content'"),
        ([{"role": "user", "content": 3}], "text or a list"),
        ([{"role": "user", "content": "Hi", "x": object()}], "is a object"),
        ([{"role": "user", "content": "Hi", "x": float("nan")}], "finite"),
        ([{"role": "user", "content": "Hi", "x": 10**100}], "usual size"),
        ([{"role": "user", "content": "Hi", 3: 3}], "keys must be strings"),
        (USER * 20_000, "at most"),
        ([{"role": "user", "content": "x" * 10_000_000}], "too many"),
    ],
)
def test_bad_messages(messages: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        render("{{ messages }}", messages)


def test_shared_and_endless_values_are_counted_as_written_out() -> None:
    nested: Any = "x"
    for _ in range(50):
        nested = [nested, nested]
    endless: list[Any] = []
    endless.append(endless)
    for value in (nested, endless):
        with pytest.raises(InputError, match="too large"):
            render("x", [{"role": "user", "content": "Hi", "extra": value}])


@pytest.mark.parametrize("tools", ["f", {"a": 1}, [3], [len]])
def test_bad_tools(tools: Any) -> None:
    with pytest.raises(InputError, match="tools"):
        render("{{ tools }}", tools=tools)


def test_templates_are_run_nowhere_else() -> None:
    root = Path(unspool.__file__).parent
    importing = set()
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.split(".")[0] == "jinja2" for name in names):
                importing.add(path.relative_to(root).parent.as_posix())
    assert importing == {"text/chat"}

"""Templates that would take time, memory or more than they are given are stopped; the largest honest ones are not."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.text.chats import render

from unspool.errors import InputError, SettingError


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
from tests.text.chats import render
from tests.text.test_hostile_templates import HOSTILE, LONG
from unspool.errors import UnspoolError
taken = int(pathlib.Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (500 << 20),) * 2)
unspool.text.chat.budget.MAX_SECONDS = 0.2
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
    monkeypatch.setattr("unspool.text.chat.budget.MAX_SECONDS", 0.2)
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

"""Chat templates: the text that transformers renders, and no way out for hostile ones."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tests.source import find_imports, parse_files
from tests.text.chats import USER, render

from unspool.errors import InputError, SettingError
from unspool.text.chat import render_chat

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
    importing = {
        Path(path).parent.as_posix()
        for path, tree in parse_files(r"\bjinja2\b")
        if any(one.module.split(".")[0] == "jinja2" for one in find_imports(tree.body))
    }
    assert importing == {"text/chat"}
